"""Retention reaches eviction: who asked to be kept is kept, on the device and in lower tiers, for as long as it asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.engine.driving import Log, Row, drive, trace_job

import kvyard
from kvyard.blocks import GroupSpec, Hints, RequestError, Retention
from kvyard.clock import SECOND
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

LANE = LaneConfig(bandwidth=20_000_000_000)
LINK = LinkConfig(outward=LANE, inward=LANE)


def config(device: str = "lru", host: str | None = None) -> EngineConfig:
    tiers = None
    if host is not None:
        tiers = OffloadConfig(
            tiers=(TierConfig(num_blocks=200, link=LINK, eviction=host), TierConfig(num_blocks=900, link=LINK))
        )
    return EngineConfig(
        groups=(GroupSpec(block_size=16),),
        num_gpu_blocks=100,
        eviction=device,
        tiers=tiers,
        bytes_per_block=1 << 16 if tiers else None,
    )


def kept_job(retention: tuple[Retention, ...]):
    """Rows of id 1 ask to be kept."""

    def make(at: int, row: Row, size: int) -> Job:
        wish = retention if row.ids[0] == 1 else ()
        return Job(
            f"r{at}",
            TraceChain(row.ids, 512, row.length, size, at),
            row.output,
            arrival=row.arrival,
            hints=Hints(retention=wish),
        )

    return make


def rows(others: int) -> list[Row]:
    """A prompt, others that need the room, ten seconds later the first again. 32 blocks each."""
    first = [Row(0, 512, 1, (1,))]
    between = [Row((1 + at) * SECOND, 512, 1, (10 + at,)) for at in range(others)]
    return [*first, *between, Row(12 * SECOND, 512, 1, (1,))]


def found_again(engine: EngineConfig, others: int, *retention: Retention, plans: bool = True) -> tuple[int, int]:
    """Return the tokens that the last request found on the device and in lower tiers."""
    log = Log()
    core = make_core(engine, watcher=log, plans=plans)
    job = drive(core, rows(others), make_job=kept_job(retention))[-1]
    return job.cached_tokens, job.external_tokens


KEEP = Retention(0, None, priority=80)


@pytest.mark.parametrize("plans", [True, False])
def test_on_the_device_who_asked_to_be_kept_is_kept(plans):
    assert found_again(config("priority"), 6, plans=plans) == (0, 0)
    assert found_again(config("priority"), 6, KEEP, plans=plans) == (496, 0)


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize(("seconds", "found"), [(5, 0), (60, 496)])
def test_a_retention_priority_ends_after_its_duration(plans, seconds, found):
    wish = Retention(0, None, priority=80, duration=seconds * SECOND)
    assert found_again(config("priority"), 9, wish, plans=plans) == (found, 0)


def test_in_the_host_a_copy_is_kept_as_long_as_its_source():
    keep = [Retention(0, 256, priority=80)]
    engine = config("lru", host="priority")
    core = make_core(engine)
    drive(core, rows(9)[:-1], make_job=kept_job(tuple(keep)))
    keys = TraceChain((1,), 512, 512, 16, 0).keys
    assert core.offload.tiers[0].store.resident(0, keys, 32) == [(0, 16)]
    assert core.offload.tiers[1].store.resident(0, keys, 32) == [(0, 32)]

    core = make_core(engine)
    drive(core, rows(9)[:-1])
    assert not core.offload.tiers[0].store.resident(0, keys, 32)


def test_an_order_that_goes_by_age_alone_refuses_retention():
    core = make_core(config("lru"))
    core.submit(kept_job((KEEP,))(0, Row(0, 512, 1, (1,)), 16), 0)
    with pytest.raises(RequestError, match="priority"):
        core.begin(0)


def test_a_trace_says_what_is_worth_keeping(tmp_path: Path):
    path = tmp_path / "kept.jsonl"
    lines = []
    for at, row in enumerate(rows(6)):
        line = {"timestamp": row.arrival // 1_000_000, "input_length": 512, "output_length": 1, "hash_ids": row.ids}
        lines.append(line | ({"retention": 80} if at == 0 else {}))
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = {"workers": 1, "block_size": 16, "num_gpu_blocks": 100}
    assert kvyard.replay(path, **settings).records[-1].cached == 0
    assert kvyard.replay(path, eviction="priority", **settings).records[-1].cached == 496


def test_without_retention_the_priority_policy_is_lru():
    logs = []
    for order in ("lru", "priority"):
        log = Log()
        drive(make_core(config(order), watcher=log, events=True), rows(9), make_job=trace_job)
        logs.append((log.passes, log.jobs, log.events))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_retention_priority_ends_during_decode_steps_too(plans: bool, ahead: bool):
    """One prompt is kept for 3 s, another less so, but for good. A long answer needs room after about 3.2 s: the first goes."""
    engine = EngineConfig(
        block_size=16,
        num_gpu_blocks=41,
        eviction="priority",
        async_scheduling=ahead,
        timing=FixedTiming(prefill_ms=10, decode_ms=10),
    )
    wishes = {1: (Retention(0, None, priority=80, duration=3 * SECOND),), 2: (Retention(0, None, priority=60),)}

    def make(at: int, row: Row, size: int) -> Job:
        chain = TraceChain(row.ids, 512, row.length, size, at)
        return Job(f"r{at}", chain, row.output, arrival=row.arrival, hints=Hints(retention=wishes.get(row.ids[0], ())))

    prompts = [Row(0, 160, 1, (1,)), Row(0, 160, 1, (2,))]
    again = [replace(row, arrival=(10 + at) * SECOND) for at, row in enumerate(prompts[::-1])]
    core = make_core(engine, plans=plans)
    jobs = drive(core, [*prompts, Row(SECOND // 10, 16, 400, (3,)), *again], make_job=make)
    assert jobs[-2].cached_tokens == 144 > jobs[-1].cached_tokens
