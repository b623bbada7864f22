"""Two workers, a time line, and whatever hypothesis thinks of: after every step invariants hold and contents are right."""

from __future__ import annotations

from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.blocks.content import Job
from tests.blocks.support import FULL
from tests.tiers.content import Page, TieredEngine
from tests.tiers.support import link, tiers

from kvyard.blocks import GroupSpec
from kvyard.events.types import Tier
from kvyard.tiers import Copy, LoadStep, Timeline

WINDOW = GroupSpec(kind="sliding_window", window=6, block_size=4)
STATES = GroupSpec(kind="mamba", mode="all", block_size=4)

POLICIES: list[dict[str, Any]] = [
    {},
    {"policy": "write_through_generated"},
    {"policy": "after_hits"},
    {"policy": "on_eviction", "offload_ahead": 3},
    {"policy": "on_eviction"},
    {"policy": "on_eviction", "on_unclean": "drop"},
    {"policy": "lazy"},
    {"policy": "exclusive"},
    {"load_policy": "threshold", "load_options": {"tokens": 12, "in_flight": 1}},
    {"load_policy": "least-time"},
    {"offload_batch_size": 2},
    {"spill": "on_eviction"},
]

SCOPES = [("private", None), ("shared", None), ("private", "shared"), ("shared", "shared"), ("private", "private")]
"""Of host and storage."""

TEXTS = [[text * 100 + at for at in range(40)] for text in (1, 2)]


class Tiers(RuleBasedStateMachine):
    """Requests come, load, run, are preempted and go; copies land at awkward instants."""

    @initialize(
        groups=st.sampled_from([[FULL], [FULL, WINDOW], [FULL, STATES]]),
        policy=st.sampled_from(POLICIES),
        scopes=st.sampled_from(SCOPES),
        discipline=st.sampled_from(["fifo", "fair"]),
        host=st.integers(3, 30),
        latency=st.sampled_from([0, 700]),
    )
    def configure(
        self,
        groups: list[GroupSpec],
        policy: dict[str, Any],
        scopes: tuple[str, str | None],
        discipline: str,
        host: int,
        latency: int,
    ) -> None:
        if (policy.get("policy") == "exclusive" and scopes[0] == "shared") or ("spill" in policy and scopes[1] is None):
            policy = {}  # refused
        wire = link(discipline=discipline, latency=latency)
        config = tiers(
            host,
            40 if scopes[1] else None,
            host_keys={"scope": scopes[0], "link": wire},
            storage_keys={"scope": scopes[1], "link": wire},
            **policy,
        )
        note(str(config))
        self.timeline = Timeline() if config.shared else None
        pages: dict[Tier, dict[int, Page]] = {}
        for tier, scope in zip((Tier.G2, Tier.G3), scopes, strict=True):
            if scope == "shared":
                pages[tier] = {}
        names: dict[Any, Any] = {}
        self.engines: list[TieredEngine] = []
        for name in ("w0", "w1") if self.timeline is not None else ("w0",):
            engine = TieredEngine(14 * len(groups), groups, config, name=name, timeline=self.timeline, pages=pages)
            engine.texts = names
            self.engines.append(engine)

        def moved(copy: Copy) -> None:
            next(engine for engine in self.engines if engine.offload.name == copy.worker).moved(copy)

        for tier in pages:
            assert self.timeline is not None
            tier = self.timeline.tiers.get(tier)
            assert tier is not None
            tier.watch = moved
        self.now = 0
        self.count = 0

    def pick(self, jobs: dict[str, Job], which: int) -> Job:
        return list(jobs.values())[which % len(jobs)]

    @rule(delay=st.sampled_from([0, 1, 999, 1_000, 1_001, 3_500]))
    def time_passes(self, delay: int) -> None:
        self.now += delay
        for engine in self.engines:
            engine.manager.begin_step()
            engine.tick(self.now)

    @rule()
    def the_next_copy_lands(self) -> None:
        times = [at for engine in self.engines if (at := engine.offload.earliest_deadline()) is not None]
        if times:
            self.time_passes(max(0, min(times) - self.now))

    @rule(at=st.integers(0, 1), text=st.sampled_from(TEXTS), length=st.integers(0, 40), own=st.integers(1, 9))
    def create(self, at: int, text: list[int], length: int, own: int) -> None:
        engine = self.engines[at % len(self.engines)]
        self.count += 1
        engine.create(f"r{self.count}", [*text[:length], *[7] * own])

    @precondition(lambda self: any(engine.waiting for engine in self.engines))
    @rule(at=st.integers(0, 1), which=st.integers(0, 9), new=st.sampled_from([1, 8, 99]))
    def admit(self, at: int, which: int, new: int) -> None:
        engine = self.engines[at % len(self.engines)]
        if not engine.waiting:
            return
        job = self.pick(engine.waiting, which)
        if engine.onboard(job) is LoadStep.NOTHING:
            blocks = -(-len(job.tokens) // 4) * len(engine.manager.groups)
            if engine.offload.make_clean(blocks, self.now) is None:
                engine.admit(job, new)

    @precondition(lambda self: any(engine.jobs for engine in self.engines))
    @rule(at=st.integers(0, 1), which=st.integers(0, 9), new=st.sampled_from([1, 8, 99]))
    def step(self, at: int, which: int, new: int) -> None:
        engine = self.engines[at % len(self.engines)]
        if engine.jobs:
            job = self.pick(engine.jobs, which)
            if job.request.id not in engine.loading:
                engine.step(job, new, [], 0, 5)

    @precondition(lambda self: any(engine.jobs for engine in self.engines))
    @rule(at=st.integers(0, 1), which=st.integers(0, 9), how=st.sampled_from(["finish", "preempt"]))
    def stop(self, at: int, which: int, how: str) -> None:
        engine = self.engines[at % len(self.engines)]
        if engine.jobs:
            getattr(engine, how)(self.pick(engine.jobs, which))

    @precondition(lambda self: any(engine.waiting for engine in self.engines))
    @rule(at=st.integers(0, 1), which=st.integers(0, 9))
    def cancel(self, at: int, which: int) -> None:
        engine = self.engines[at % len(self.engines)]
        if engine.waiting:
            job = self.pick(engine.waiting, which)
            engine.offload.forget(job.request, self.now)
            del engine.waiting[job.request.id]

    @rule(at=st.integers(0, 1), block=st.integers(1, 13))
    def evict(self, at: int, block: int) -> None:
        self.engines[at % len(self.engines)].manager.evict([block])

    @invariant()
    def everything_holds(self) -> None:
        for engine in getattr(self, "engines", ()):
            engine.offload.check_integrity()
            engine.verify()
        if getattr(self, "timeline", None) is not None:
            assert self.timeline is not None
            self.timeline.check_integrity()

    def teardown(self) -> None:
        """When all have gone and all has landed, nothing is held anywhere."""
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            for job in list(engine.jobs.values()):
                engine.finish(job)
            for job in list(engine.waiting.values()):
                engine.offload.forget(job.request, self.now)
        for _ in range(10_000):
            times = [at for engine in self.engines if (at := engine.offload.earliest_deadline()) is not None]
            if not times:
                break
            self.time_passes(max(0, min(times) - self.now))
        self.everything_holds()
        for engine in self.engines:
            assert engine.offload.earliest_deadline() is None, "copies without end"
            assert engine.manager.pool.free == engine.manager.pool.num_blocks - 1, "the device lost blocks"
            for tier in engine.offload.tiers:
                assert tier.store.pool.free == tier.store.num_pages, f"{tier.store.tier.name} lost pages"


TestTiers = Tiers.TestCase
