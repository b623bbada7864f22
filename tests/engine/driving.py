"""Drives engine cores in tests: hands over what comes from outside, and writes down all that comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.timing import TimingConfig
from kvyard.engine.together import begin_together
from kvyard.engine.watcher import Watcher
from kvyard.hashing import TokenChain, TraceChain, algorithm
from kvyard.tiers import Timeline
from kvyard.tiers.links import LaneConfig, LinkConfig

SHA256_CBOR = algorithm("sha256_cbor")


class LongestTiming(TimingConfig, frozen=True, kw_only=True, tag="longest"):
    """By what a pass can be charged for, the longest context included."""

    def model(self, capacity_tokens: int) -> LongestModel:
        return LongestModel()


class LongestModel:
    """A millisecond a pass, and something for everything in it."""

    needs_longest = True

    def pass_ns(self, prefills, decode_batch, decode_context, longest):
        assert (longest > 0) == (decode_batch > 0)
        tokens = sum(new for new, _ in prefills) + decode_batch
        return 1_000_000 + 1_000 * tokens + 10 * decode_context + 700 * longest

    def decode_ns(self, batch, context, passes, longest):
        return np.array([self.pass_ns((), batch, context + i * batch, longest + i) for i in range(passes)], np.int64)


class Row(msgspec.Struct, frozen=True):
    """One request from outside."""

    arrival: int
    length: int
    output: int
    ids: tuple[int, ...]
    priority: int = 0
    cancel: int | None = None
    """When it is given up, in ns after its arrival."""


class Log(Watcher):
    """Everything, in a form in which plans and single steps look the same."""

    wants_tokens = True

    def __init__(self) -> None:
        self.passes: list[tuple[object, ...]] = []
        self.jobs: list[tuple[object, ...]] = []
        self.events: list[tuple[object, ...]] = []

    def admitted(self, job, now, cached, external):
        self.jobs.append(("admitted", job.id, now, cached, external))

    def passed(self, start, end, chunks, decoding):
        self.passes.append((start, end, [(job.id, new, past) for job, new, past in chunks], decoding))

    def decoded(self, start, durations, decoding, jobs):
        for spent in durations.tolist():
            self.passes.append((start, start + spent, sorted(job.id for job in jobs), decoding))
            start += spent

    def produced(self, job, count, end):
        self.jobs.append(("produced", job.id, count, end))

    def preempted(self, job, now):
        self.jobs.append(("preempted", job.id, now, job.output, job.num_tokens))

    def loading(self, job, now, tokens):
        self.jobs.append(("loading", job.id, now, tokens))

    def ended(self, job, now, reason):
        self.jobs.append(("ended", job.id, now, job.state.name, job.output, reason))

    def announced(self, batch, now):
        self.events.append((now, msgspec.to_builtins(batch.events), batch.seq, batch.ts))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [entry[1:] for entry in self.jobs if entry[0] == kind]


def trace_job(at: int, row: Row, block_size: int) -> Job:
    """``row`` as a job of trace ids."""
    chain = TraceChain(row.ids, 512, row.length, block_size, at)
    return Job(f"r{at}", chain, row.output, arrival=row.arrival, priority=row.priority)


def token_job(at: int, row: Row, block_size: int) -> Job:
    """``row`` as a job of real tokens, hashed as the mock engine does: rows that share ids share tokens."""
    tokens = [(name * 512 + offset) % 50_021 for name in row.ids for offset in range(512)][: row.length]
    return Job(
        f"r{at}",
        TokenChain(tokens, block_size, SHA256_CBOR),
        row.output,
        arrival=row.arrival,
        priority=row.priority,
        sample=lambda start, stop: [(at * 7919 + index) % 50_021 for index in range(start, stop)],
    )


def drive(
    core: EngineCore,
    rows: Sequence[Row],
    looks: Iterable[int] = (),
    check: bool = True,
    make_job: Callable[[int, Row, int], Job] = trace_job,
) -> list[Job]:
    """Run ``rows`` through ``core`` to the end; at ``looks`` it is advanced though nothing happens then."""
    size = core.scheduler.manager.geometry.hash_block_size
    jobs = [make_job(at, row, size) for at, row in enumerate(rows)]
    outside: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        outside.append((row.arrival, 1, at))
        if row.cancel is not None:
            outside.append((row.arrival + row.cancel, 2, at))
    outside += [(when, 0, 0) for when in looks]
    outside.sort()
    at = idle = 0
    while True:
        decision = core.next_decision()
        arrival = outside[at][0] if at < len(outside) else None
        if decision is None and arrival is None:
            break
        now = min(when for when in (decision, arrival) if when is not None)
        core.advance(now)
        while at < len(outside) and outside[at][0] == now:
            kind, who = outside[at][1:]
            if kind == 1:
                core.submit(jobs[who], now)
            elif kind == 2:
                core.cancel(jobs[who], now)
            at += 1
        busy = core.begin(now)
        if check:
            core.check_integrity()
        # I8: time moves or the run ends.
        idle = 0 if busy or core.next_decision() != now else idle + 1
        assert idle < 3, f"no progress at {now}"
    for job in jobs:
        assert job.state.ended, f"{job} was left behind"
    return jobs


def replay(
    config: EngineConfig, rows: Sequence[Row], looks: Iterable[int] = (), *, plans: bool = True, **options
) -> Log:
    """A fresh engine over ``rows``; returns all that it did."""
    log = Log()
    core = make_core(config, watcher=log, events=True, plans=plans, **options)
    drive(core, rows, looks)
    return log


def drive_together(cores: Sequence[EngineCore], rows: Sequence[Row], timeline: Timeline, check: bool = True) -> None:
    """Several cores on one time line, requests dealt out in turn."""
    size = cores[0].scheduler.manager.geometry.hash_block_size
    jobs = [
        Job(f"r{at}", TraceChain(row.ids, 512, row.length, size, at), row.output, arrival=row.arrival)
        for at, row in enumerate(rows)
    ]
    at = 0
    while True:
        due = [core.next_decision() for core in cores]
        due.append(timeline.earliest())
        if at < len(rows):
            due.append(rows[at].arrival)
        now = min((when for when in due if when is not None), default=None)
        if now is None:
            break
        for core in cores:
            core.advance(now)
        timeline.advance(now)
        while at < len(rows) and rows[at].arrival == now:
            cores[at % len(cores)].submit(jobs[at], now)
            at += 1
        begin_together(dict(enumerate(cores)), [n for n, core in enumerate(cores) if not core.busy], now, timeline)
        for core in cores:
            if check:
                core.check_integrity()
        if check:
            timeline.check_integrity()
    timeline.check_integrity()
    for job in jobs:
        assert job.state.ended, f"{job} was left behind"


def link(gbps: float, discipline: str = "fair", latency: int = 0) -> LinkConfig:
    """A link of so many GB/s each way."""
    lane = LaneConfig(bandwidth=int(gbps * 1e9), first_byte_ns=latency)
    return LinkConfig(discipline=discipline, outward=lane, inward=lane)
