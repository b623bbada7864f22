"""Prefill and decode workers in processes of their own, killed with -9 under load: what hadn't begun isn't lost."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, Gated
from tests.server.gateway.support import fleet as mocks
from tests.server.mock.support import Process

from kvyard.server.mock.answers import AnswerWish, compose
from kvyard.server.tokens import ByteTokenizer

pytestmark = pytest.mark.zmq

TOKENS = 24


class Load:
    """Clients that stream one answer after the other until they are told to stop."""

    def __init__(self, url: str, clients: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self._url = url
        self._numbers = count()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as client:
            while not self._over.is_set():
                outcome, why = self._one(client, next(self._numbers))
                with self._lock:
                    self.outcomes[outcome] += 1
                    if why:
                        (self.lost if outcome == "lost" else self.wrong).append(why)

    def _one(self, client: httpx.Client, number: int) -> tuple[str, str]:
        """How a request ended: finished, broken after its first byte, or lost before it."""
        prompt = [number % 50, *range(1000 + number, 1200 + number)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
        begun = False
        ids: list[int] = []
        try:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    return "lost", f"{reply.status_code} {reply.read()!r}"
                for line in reply.iter_lines():
                    begun = True
                    if line.startswith("data: {"):
                        said = json.loads(line[6:])
                        if "error" in said:
                            return "broken", ""
                        ids += said["choices"][0]["token_ids"]
        except httpx.TransportError as error:
            return ("broken", "") if begun else ("lost", repr(error))
        made = compose(prompt, WISH, ByteTokenizer(), mean=128, seed=0, name="mock None 0").ids
        return "finished", "" if ids == list(made) else f"{number}: {ids}"


WISH = AnswerWish(max_tokens=TOKENS, ignore_eos=True)


@contextlib.contextmanager
def fleet(each: int, speed: float) -> Iterator[tuple[Gated, list[Process]]]:
    """A gateway before two prefill and two decode workers. So many of each role are processes of their own, prefill first; the
    others are in this one.
    """
    roles = ["prefill", "decode"]
    with contextlib.ExitStack() as stack:
        flags = ("--kv-events", "--speed", str(speed), "--num-gpu-blocks", "512", "--max-model-len", "2048")
        started = [stack.enter_context(Process(f"--{role}", "1", *flags)) for role in roles for _ in range(each)]
        engines = [{"url": one.urls()[0], "role": roles[at // each]} for at, one in enumerate(started)]
        if each < 2:
            settings = {"engine": {"bytes_per_block": 2 << 20}, "speed": speed, "prefill": 2 - each, "decode": 2 - each}
            inside = stack.enter_context(mocks(**settings))
            engines += [{"url": url, "role": roles[at]} for at, url in enumerate(inside.urls)]
        gated = stack.enter_context(Gated(engines=engines))
        yield gated.ready(4, 4), started


def survive(each: int, clients: int, between: int, speed: float) -> Load:
    """Kill one worker of each role, with so many answers in between."""
    with fleet(each, speed) as (gated, started):
        with Load(gated.url, clients) as load:
            for victim in (started[0], started[each], None):
                wanted = load.outcomes["finished"] + between
                eventually(lambda wanted=wanted: load.outcomes["finished"] >= wanted, lambda: load.outcomes)  # type: ignore[misc]
                if victim is not None:
                    victim.process.kill()
                    victim.process.wait(PATIENCE)
        assert not load.lost, load.lost
        assert not load.wrong, load.wrong
        # What had begun at the one that was killed, and no more than clients can have had there.
        assert load.outcomes["broken"] <= clients
        metrics = gated.metrics()
        assert metrics['kvyard_gateway_handovers_total{model="mock",outcome="handed-over"}'] >= 2 * between
        states = Counter(one["state"] for one in gated.engines().values())
        assert states["down"] == 2 and states["ready"] == 2
        gated.idle()
        return load


def test_one_of_two_is_killed_in_either_role() -> None:
    survive(1, 4, 8, 4.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_requests_while_workers_are_killed() -> None:
    load = survive(2, 24, 250, 2.0)
    print(f"\n{dict(load.outcomes)}")
