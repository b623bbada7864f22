"""Which engines are asked to tokenize prompts: drained, sick and slow ones are left alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated
from tests.server.gateway.support import PATIENCE

from kvyard.clock import SECOND, VirtualClock
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.server.gateway.client import EngineClient, _read_tokens
from kvyard.server.gateway.config import GatewayEngine, convert
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.engine_tokenizer import LONGEST_BACKOFF_SECONDS, EngineTokenizer
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.gateway.pool import EnginePool

TOKENS = answer("200 OK", json.dumps({"tokens": list(range(40))}).encode())


def tokenizes(head: str, body: bytes) -> Sequence[bytes]:
    return [TOKENS if "/tokenize" in head else answer("200 OK", b"{}")]


def asked(engine: ScriptedEngine) -> int:
    return sum("/tokenize" in head for head, _ in engine.requests)


class FakeClient:
    """Answers at once, with the clock's time that each engine takes."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.fails: set[str] = set()
        self.asked: list[str] = []

    async def tokenize(self, url: str, body: bytes, seconds: float) -> list[int] | None:
        self.asked.append(url.rpartition("/")[2])
        if self.asked[-1] in self.fails:
            raise EngineFailed("it was silent for too long")
        return [1, 2, 3]


class Asked:
    """Three engines that are up, and a tokenizer that asks them."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.client = FakeClient(self.clock)
        self.engines = {name: Engine(GatewayEngine(url=f"http://{name}", name=name)) for name in "abc"}
        for engine in self.engines.values():
            engine.state = "ready"
            engine.models = {"m": None}
        config = convert({}, "the test")
        pool = cast(EnginePool, type("Pool", (), {"model": "m", "engines": self.engines, "config": config}))
        self.tokenizer = EngineTokenizer(pool, cast(EngineClient, self.client), self.clock)

    def wait(self, seconds: int) -> None:
        self.clock.advance(self.clock.now() + seconds * SECOND)

    def ask(self, **body: Any) -> tuple[list[int] | None, str]:
        self.client.asked.clear()
        tokens = asyncio.run(self.tokenizer({"prompt": "x", **body}))
        return tokens, "".join(self.client.asked)


def test_an_engine_that_drains_or_is_down_is_not_asked() -> None:
    pool = Asked()
    pool.engines["a"].draining = True
    pool.engines["b"].state = "down"
    assert {pool.ask()[1] for _ in range(3)} == {"c"}
    pool.engines["c"].state = "starting"
    assert pool.ask() == (None, "")


def test_a_suspect_is_asked_only_where_no_other_engine_is_well() -> None:
    pool = Asked()
    pool.engines["a"].state = "suspect"
    pool.engines["b"].in_flight = pool.engines["c"].in_flight = 9
    assert pool.ask()[1] == "b"
    pool.engines["b"].state = pool.engines["c"].state = "down"
    assert pool.ask()[1] == "a"


def test_only_engines_that_serve_an_adapter_are_asked_for_it() -> None:
    pool = Asked()
    pool.engines["c"].models = {"m": None, "adapter": "m"}
    assert pool.ask(model="adapter")[1] == "c"
    assert pool.ask(model="m")[1] == "a"


def test_a_failure_is_followed_by_one_more_try_and_remembered() -> None:
    pool = Asked()
    pool.client.fails = {"a", "b"}
    assert pool.ask() == (None, "ab"), "two tries"
    assert pool.ask() == ([1, 2, 3], "c")
    pool.wait(1)
    pool.client.fails = {"a"}
    assert pool.ask() == ([1, 2, 3], "ab"), "asked again after a second, and b is well"
    pool.wait(1)
    assert pool.ask()[1] == "b", "after a second failure in a row it is left alone for longer"
    pool.wait(1)
    assert pool.ask()[1] == "ab"


def test_how_long_a_failing_engine_is_left_alone_is_bounded() -> None:
    pool = Asked()
    pool.client.fails = {"a"}
    times: list[int] = []
    for _ in range(600):
        if pool.ask()[1].startswith("a"):
            times.append(pool.clock.now())
        pool.wait(1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) <= (LONGEST_BACKOFF_SECONDS + 1) * SECOND
    assert len(times) < 20, "600 seconds with a failing engine cost few tries"


def test_an_engine_that_hangs_delays_few_requests_and_no_other_answer() -> None:
    """One that drains is never asked; one that never answers costs a time limit now and then, and not for each request."""
    hold = threading.Event()

    def hangs(head: str, body: bytes) -> Sequence[bytes]:
        if "/tokenize" in head:
            hold.wait(PATIENCE)
        return [answer("200 OK", b"{}")]

    with ScriptedEngine(hangs) as slow, ScriptedEngine(tokenizes) as well, ScriptedEngine(tokenizes) as drained:
        try:
            with gated(slow, well, drained, tokenizer="engine", tokenize_seconds=0.5) as gate:
                gate.ready(3)
                gate.post("/admin/drain", engine="odd2")

                def ask() -> None:
                    reply = httpx.post(f"{gate.url}/v1/completions", json={"prompt": "x" * 100}, timeout=PATIENCE)
                    assert reply.status_code == 200

                for _ in range(4):
                    together = [threading.Thread(target=ask) for _ in range(5)]
                    for one in together:
                        one.start()
                    for one in together:
                        one.join()
                assert asked(drained) == 0
                # Each question to it is half a second that a request waits; the next ones come after a second, two and four.
                assert 1 <= asked(slow) <= 4 and asked(well) == 20, (asked(slow), asked(well))
        finally:
            hold.set()


@pytest.mark.parametrize("count", [0, 1, 5, 200_000])
def test_long_answers_are_read_piece_by_piece(count: int) -> None:
    ids = [at * 7919 % 4_294_967_296 for at in range(count)]
    assert asyncio.run(_read_tokens(json.dumps({"count": count, "tokens": ids, "max_model_len": 9}).encode())) == ids


@pytest.mark.parametrize("tokens", [b'"%b"', b"{%b}", b"[%b,]", b"[%b,1.5]", b"null, %b"])
def test_long_answers_without_ids_are_no_ids(tokens: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        asyncio.run(_read_tokens(b'{"tokens": %b}' % (tokens % b",".join([b"1"] * 200_000))))
