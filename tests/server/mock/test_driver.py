"""Live runs on nominal time: the same stamps give the same decisions, whatever the machine did meanwhile (I10)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.mock.support import ENGINE, LOOPBACK, Served

from kvyard.clock import WallClock
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.watcher import Watcher
from kvyard.events.batcher import Batcher
from kvyard.hashing import TokenChain
from kvyard.server.mock.driver import EngineDriver
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links.config import LaneConfig, LinkConfig

TIGHT: dict[str, Any] = {"num_gpu_blocks": 22, "max_num_seqs": 6, "max_num_batched_tokens": 96}
LANE = LaneConfig(bandwidth=10**9)
HOST = OffloadConfig(tiers=(TierConfig(num_blocks=60, link=LinkConfig(outward=LANE, inward=LANE)),))
TIERED: dict[str, Any] = {**TIGHT, "bytes_per_block": 1 << 16, "tiers": HOST}


class Log(Watcher):
    """Every decision of a rank, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        self.lines.append(("admitted", job.id, now, cached, external))

    def preempted(self, job: Job, now: int) -> None:
        self.lines.append(("preempted", job.id, now))

    def loading(self, job: Job, now: int, tokens: int) -> None:
        self.lines.append(("loading", job.id, now, tokens))

    def ended(self, job: Job, now: int, reason: str) -> None:
        self.lines.append(("ended", job.id, now, reason, job.output))

    def announced(self, batch: Any, now: int) -> None:
        events = [
            (type(one).__name__, getattr(one, "tier", None), list(getattr(one, "hashes", ()))) for one in batch.events
        ]
        self.lines.append(("announced", batch.seq, now, events))


NAMES = ("admitted", "preempted", "loading", "ended", "announced")


def overheard(watcher: Any, log: Log) -> None:
    """Have ``log`` told what ``watcher`` is told, before it."""

    def both(one: Any, two: Any, *given: Any) -> None:
        one(*given)
        two(*given)

    for name in NAMES:
        setattr(watcher, name, partial(both, getattr(log, name), getattr(watcher, name)))


def offline(config: EngineConfig, ranks: int, actions: list[tuple[int, str, Job, int]], plans: bool) -> list[Log]:
    """Return the logs of these stamps in virtual time, with jobs made anew."""
    logs = [Log() for _ in range(ranks)]
    cores = [
        make_core(
            config,
            name=f"worker0@{rank}",
            watcher=log,
            batcher=Batcher([spec.meta for spec in config.specs], rank=rank, with_tokens=True),
            plans=plans,
        )
        for rank, log in enumerate(logs)
    ]
    engine = Ranks(cores)
    made: dict[str, Job] = {}
    waiting = deque(actions)
    while True:
        due = engine.next_decision()
        if waiting and (due is None or waiting[0][0] < due):
            due = waiting[0][0]
        if due is None:
            return logs
        engine.advance(due)
        while waiting and waiting[0][0] <= due:
            stamp, action, job, rank = waiting.popleft()
            if action == "cancel":
                engine.cancel(made[job.id], due, rank)
                continue
            tokens = list(job.chain.tokens)
            known = tokens[job.num_prompt_tokens :] + [0] * 4096
            chain = TokenChain(tokens[: job.num_prompt_tokens], job.chain.block_size, job.chain.algorithm)
            made[job.id] = Job(
                job.id,
                chain,
                job.max_tokens,
                arrival=stamp,
                sample=lambda low, high, known=known: known[low:high],
            )
            engine.submit(made[job.id], due, rank)
        engine.begin(due)


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [(TIGHT, 1), (TIGHT, 2), (TIERED, 1), (TIERED, 2), (TIGHT | {"async_scheduling": True}, 1)],
    ids=["device", "device-ranks", "tiers", "tiers-ranks", "ahead"],
)
def test_live_is_offline(engine: dict[str, Any], ranks: int) -> None:
    actions: list[tuple[int, str, Job, int]] = []
    logs = [Log() for _ in range(ranks)]

    def journal(number: int) -> Any:
        return lambda *action: actions.append(action)

    with Served(engine=engine, dp_size=ranks, speed=5.0, journal=journal, events_endpoint=LOOPBACK) as served:
        for watcher, log in zip(served.fleet.workers[0].watchers, logs, strict=False):
            served.inside(lambda watcher=watcher, log=log: overheard(watcher, log))

        def ask(number: int) -> None:
            for turn in range(4):
                kind = (number + turn) % 4 * 1000
                prompt = [*range(kind, kind + 50 + 17 * turn), number]
                body = {"prompt": prompt, "max_tokens": 30 + number, "ignore_eos": True}
                if (number + turn) % 5 == 0:
                    body |= {"stream": True, "max_tokens": 180}
                    with served.client.stream("POST", "/v1/completions", json=body) as reply:
                        next(reply.iter_lines())  # and then hang up
                else:
                    served.complete(**body)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        served.check()
        # What is on its way to the host has to land before the logs can be compared.
        eventually(lambda: served.inside(lambda: served.fleet.workers[0].engine.next_decision() is None))
    assert sum(action == "submit" for _, action, _, _ in actions) == 32
    assert [stamp for stamp, *_ in actions] == sorted(stamp for stamp, *_ in actions)
    seen = Counter(line[0] for log in logs for line in log.lines) + Counter(action for _, action, _, _ in actions)
    assert seen["announced"] and seen["ended"] == 32, seen
    config = EngineConfig(**{**ENGINE, **engine})
    for plans in (False, True):
        for live, again in zip(logs, offline(config, ranks, actions, plans), strict=False):
            if not plans:
                assert live.lines == again.lines
            else:  # blocks announced in the middle of a plan are told when it is carried out
                for name in NAMES:
                    assert [x for x in live.lines if x[0] == name] == [x for x in again.lines if x[0] == name]


def test_a_stalled_engine_loses_no_time() -> None:
    with Served() as served:
        driver = served.fleet.workers[0].driver
        served.complete("warm")
        served.inside(driver.freeze)
        before = served.inside(driver.now)
        with pytest.raises(httpx.TimeoutException):
            served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=0.2)
        assert served.inside(driver.now) == before
        served.inside(driver.thaw)
        assert served.complete("y")["usage"]["completion_tokens"] == 4
        assert served.inside(lambda: served.fleet.clock.now() - driver.now()) >= 0.2e9
        served.post("/admin/stall", seconds=0.05)
        served.complete("z")
        served.post("/admin/stall", 400)
        served.check()


def test_nothing_happens_after_a_stop() -> None:
    async def story(stops: bool) -> int:
        turns: list[int] = []
        engine = Ranks([make_core(EngineConfig(**ENGINE))])
        driver = EngineDriver(engine, WallClock(), 1.0, settled=lambda: turns.append(1))
        driver.receive(lambda now: None)
        if stops:
            driver.stop()
        await asyncio.sleep(0)
        return len(turns)

    assert asyncio.run(story(False)) == 1
    assert asyncio.run(story(True)) == 0


def test_priorities_decide_who_is_next() -> None:
    class Order(Log):
        def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
            self.lines.append(("admitted", job.priority))

    log = Order()
    with Served(engine={"scheduling_policy": "priority", "max_num_seqs": 1}) as served, ExitStack() as stack:
        worker = served.fleet.workers[0]
        served.inside(lambda: overheard(worker.watchers[0], log))
        served.inside(worker.driver.freeze)
        for priority in (3, 9, -2, 0):
            body = {"prompt": "x", "max_tokens": 3, "stream": True, "priority": priority}
            stack.enter_context(served.client.stream("POST", "/v1/completions", json=body))
        served.inside(worker.driver.thaw)
        served.check()
    assert [line[1] for line in log.lines if line[0] == "admitted"] == [-2, 0, 3, 9]
