"""Hints reach eviction: on the device, in lower tiers, with plans and without; and change nothing where none are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.driving import Log, Row, drive, trace_job

import kvyard
from kvyard.blocks import GroupSpec, Hints
from kvyard.clock import SECOND
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.errors import KvyardError
from kvyard.hashing import TraceChain
from kvyard.replay.traces import TraceRequest
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

LANE = LaneConfig(bandwidth=20_000_000_000)
LINK = LinkConfig(outward=LANE, inward=LANE)


def config(*, heed: bool = True, device: str = "lru", host: int = 0, policy: str = "write_through") -> EngineConfig:
    tiers = None
    if host:
        tiers = OffloadConfig(tiers=(TierConfig(num_blocks=host, link=LINK),), policy=policy)
    return EngineConfig(
        groups=(GroupSpec(block_size=16),),
        num_gpu_blocks=100,
        eviction=device,
        heed_hints=heed,
        tiers=tiers,
        bytes_per_block=1 << 16 if tiers else None,
    )


def hinted(said: dict[int, Hints]) -> Callable[[int, Row, int], Job]:
    """Jobs in which the row at a place says something; all others only whose they are."""

    def make(at: int, row: Row, size: int) -> Job:
        hints = said.get(at, Hints(f"s{row.ids[0]}"))
        chain = TraceChain(row.ids, 512, row.length, size, at)
        return Job(f"r{at}", chain, row.output, arrival=row.arrival, hints=hints)

    return make


ROWS = [
    Row(0, 512, 1, (1,)),
    Row(1 * SECOND, 512, 1, (2,)),
    Row(2 * SECOND, 512, 1, (3,)),
    Row(3 * SECOND, 512, 1, (4,)),  # 32 blocks each: for this one some must go
    Row(4 * SECOND, 512, 1, (1,)),
    Row(20 * SECOND, 512, 1, (2,)),
]


def run(
    engine: EngineConfig, said: dict[int, Hints], rows: list[Row] = ROWS, plans: bool = True
) -> tuple[EngineCore, list[Job]]:
    core = make_core(engine, plans=plans)
    return core, drive(core, rows, make_job=hinted(said))


@pytest.mark.parametrize("plans", [True, False])
def test_a_session_end_changes_who_is_evicted(plans: bool) -> None:
    _, jobs = run(config(), {}, plans=plans)
    assert jobs[4].cached_tokens < 256, "without it, the first that came is the first to go"
    _, jobs = run(config(), {1: Hints("s2", session_end=True)}, plans=plans)
    assert jobs[4].cached_tokens == 496


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize(("ttl", "found"), [(10, 496), (2, 0)])
def test_a_time_to_live_holds_for_its_duration(plans: bool, ttl: int, found: int) -> None:
    said = {0: Hints("s1", ttl=ttl * SECOND, ttl_then="first")}
    _, jobs = run(config(), said, plans=plans)
    assert jobs[4].cached_tokens >= found
    assert (jobs[4].cached_tokens == 496) == (found == 496)


def test_an_engine_that_heeds_hints_evicts_as_before_without_any() -> None:
    logs = []
    for heed in (False, True):
        for host in (0, 60):
            log = Log()
            drive(make_core(config(heed=heed, host=host), watcher=log, events=True), ROWS, make_job=trace_job)
            logs.append((log.passes, log.jobs, log.events))
    assert logs[0] == logs[2]
    assert logs[1] == logs[3]


def resident(core: EngineCore, first: int) -> int:
    """Blocks of the prompt that begins with this id in host memory."""
    assert core.offload is not None
    keys = TraceChain((first,), 512, 512, 16, 0).keys
    return sum(high - low for low, high in core.offload.tiers[0].store.resident(0, keys, 32))


def test_the_host_evicts_first_what_is_over() -> None:
    rows = [Row(at * SECOND, 512, 1, (one,)) for at, one in enumerate((1, 2, 2, 3))]
    core, _ = run(config(host=70), {}, rows)
    assert (resident(core, 1), resident(core, 2), resident(core, 3)) == (6, 32, 32)
    core, _ = run(config(host=70), {2: Hints("s2", session_end=True)}, rows)
    assert (resident(core, 1), resident(core, 2), resident(core, 3)) == (32, 6, 32)


@pytest.mark.parametrize("policy", ["write_through", "on_eviction"])
def test_blocks_of_an_ended_session_are_still_stored(policy: str) -> None:
    """Another session may want it: of a prompt that many begin with, the first one's copy is its own until then."""
    rows = [Row(at * SECOND, 512, 1, (at + 1,)) for at in range(6)]
    core, _ = run(config(host=400, policy=policy), {1: Hints("s2", session_end=True)}, rows)
    assert resident(core, 2) == 32
    core.offload.check_integrity()  # type: ignore[union-attr]


def test_other_orders_are_refused_with_hints() -> None:
    with pytest.raises(KvyardError, match="priority"):
        kvyard.replay([TraceRequest("a", 0, 10, 1)], eviction="unknown", heed_hints=True)


@pytest.mark.parametrize(
    ("host", "policy"), [(0, ""), (60, "write_through"), (60, "write_through_generated"), (60, "on_eviction")]
)
def test_plans_are_steps_with_hints_too(host: int, policy: str) -> None:
    """Both ways through the same rows, with ends and times to live that pass in the middle of long answers."""
    rows = [Row(at * SECOND // 3, 512, 40 + 13 * at % 90, (1 + at * 7 % 5,)) for at in range(24)]
    said = {
        at: Hints(f"s{row.ids[0]}", session_end=at % 3 == 0, ttl=None if at % 3 != 1 else (at + 1) * SECOND // 8)
        for at, row in enumerate(rows)
    }
    found = []
    for plans in (True, False):
        log = Log()
        engine = config(host=host, policy=policy) if host else config()
        core = make_core(engine, watcher=log, events=True, plans=plans)
        drive(core, rows, make_job=hinted(said))
        core.check_integrity()
        found.append((log.passes, log.jobs, log.events))
    assert found[0] == found[1]
