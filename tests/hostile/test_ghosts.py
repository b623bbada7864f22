"""A client that hangs up is noticed at every stage and for every size: engines do nothing for it, and nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import connect
from tests.server.gateway.support import Gated
from tests.server.mock.support import Served as MockServed

from kvyard.engine.timing import FixedTiming
from kvyard.server.mock import schemas
from kvyard.server.mock.routes import MockRoutes
from kvyard.server.mock.tally import WorkerTally

pytestmark = pytest.mark.zmq
SIZES = (1_000, 200_000)
"""Bytes of prompts: a body and its head leave in one write below 64 KiB."""
WAYS = ("closed", "reset", "half-closed", "pipelined", "HTTP/1.0")
AT_ONCE = 2 * len(WAYS) * len(SIZES)
SLOW = {"timing": FixedTiming(prefill_ms=5, decode_ms=5), "max_model_len": 400_000, "num_gpu_blocks": 400_000}
MOST_TOKENS = 190_000
"""A quarter of an hour of the engine's time, which is longer than the test may run: however busy the machine is, no answer ends
before its client hangs up."""


class Clients:
    """Clients that ask for much, each in another way, and hang up together."""

    def __init__(self, server: Gated | MockServed, *, whole: bool = True, stream: bool = False) -> None:
        self.lines: list[tuple[str, socket.socket]] = []
        for at, (way, size, _) in enumerate(itertools.product(WAYS, SIZES, range(2))):
            line = connect(server.url)
            data = request(f"{at} " + "a" * size, way == "HTTP/1.0", stream)
            if not whole:
                data = data[: -size // 2]
            elif way == "pipelined":
                data += data
            line.sendall(data)
            self.lines.append((way, line))

    def read_first(self) -> None:
        """Wait for each answer's first bytes."""
        for _, line in self.lines:
            assert line.recv(20).startswith(b"HTTP/1.1 200")

    def hang_up(self) -> None:
        for way, line in self.lines:
            if way == "half-closed":
                line.shutdown(socket.SHUT_WR)
                continue
            if way == "reset":
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.close()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for _, line in self.lines:
            line.close()


def request(prompt: str, old: bool, stream: bool) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": MOST_TOKENS, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.{0 if old else 1}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def front(**settings: Any) -> Iterator[tuple[Gated, WorkerTally]]:
    """A gateway in front of a slow engine, and the engine's own count of what it does."""
    limits = {"limits": {"tokens": 400_000}}
    with MockServed(engine=SLOW) as mock, Gated(fleets=[mock.url], **limits, **settings) as gate:
        gate.ready(1)
        yield gate, mock.fleet.workers[0].tally
        mock.check()


def idle(gate: Gated) -> None:
    """Wait until nothing of clients that have hung up is left at the gateway."""
    gate.idle()
    held, counters = gate.gateway.held, gate.gateway.traffic.counters
    eventually(lambda: held.bytes == 0, lambda: held.bytes)
    assert counters.refused == counters.failed == 0


def reaches(count: Callable[[], int], number: int) -> None:
    """Wait until there are this many."""
    eventually(lambda: count() >= number, count)


MANY = pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


def test_before_it_is_read() -> None:
    """What a busy engine finds as it has time again: requests of clients that have gone are not computed."""
    go_on = threading.Event()
    with MockServed(engine=SLOW) as mock:
        held = threading.Thread(target=mock.inside, args=(go_on.wait,))
        held.start()
        with Clients(mock) as clients:
            clients.hang_up()
        go_on.set()
        held.join()
        mock.check()
        assert mock.fleet.workers[0].tally.came == 0


@pytest.mark.parametrize("total", [AT_ONCE, MANY])
def test_a_client_gone_while_its_body_is_read_leaves_no_ghost(total: int) -> None:
    with front() as (gate, tally):
        held = gate.gateway.held
        for _ in range(0, total, AT_ONCE):
            with Clients(gate, whole=False) as clients:
                reaches(lambda: held.bytes, AT_ONCE // 2 * SIZES[1] // 2)
                clients.hang_up()
                idle(gate)
        assert tally.came == 0


@pytest.mark.parametrize("total", [AT_ONCE, MANY])
def test_a_client_gone_while_an_engine_tokenizes_leaves_no_ghost(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def tokenize(self: MockRoutes, body: schemas.Tokenize, headers: Any) -> None:
        """Never answers."""
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(MockRoutes, "tokenize", tokenize)
    with front(tokenizer="engine", tokenize_seconds=1000.0) as (gate, tally):
        for before in range(0, total, AT_ONCE):
            with Clients(gate) as clients:
                reaches(lambda: asked, before + AT_ONCE)
                clients.hang_up()
                idle(gate)
        assert (asked, tally.came) == (total, 0)
        assert gate.gateway.traffic.counters.cancelled == total


@pytest.mark.parametrize("total", [AT_ONCE, MANY])
def test_a_client_gone_while_queued_leaves_no_ghost(total: int) -> None:
    with front(engine_requests=1) as (gate, tally), connect(gate.url) as first:
        first.sendall(request("first", False, True))
        eventually(lambda: tally.came == 1)
        waiting = next(iter(gate.gateway.members.pools.values())).waiting
        for _ in range(0, total, AT_ONCE):
            with Clients(gate) as clients:
                reaches(lambda: len(waiting), AT_ONCE)
                clients.hang_up()
                eventually(lambda: not waiting, lambda: len(waiting))
        first.close()
        idle(gate)
        eventually(lambda: tally.cancelled == 1)
        assert (tally.came, tally.finished) == (1, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["computes", "streams"])
@pytest.mark.parametrize("total", [AT_ONCE, MANY])
def test_a_client_gone_while_the_engine_answers_leaves_no_ghost(total: int, stream: bool) -> None:
    with front() as (gate, tally):
        for before in range(0, total, AT_ONCE):
            with Clients(gate, stream=stream) as clients:
                reaches(lambda: tally.came, before + AT_ONCE)
                if stream:
                    clients.read_first()
                clients.hang_up()
                idle(gate)
        eventually(lambda: tally.cancelled == total, lambda: vars(tally))
        assert (tally.came, tally.finished) == (total, 0)
