"""Plans against single steps on real traffic: the Mooncake traces, with and without tiers, hybrid, and on one time line."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec
import pytest
from tests.engine.driving import Log, Row, drive, drive_together

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.tiers import OffloadConfig, TierConfig, Timeline
from kvyard.tiers.links import LaneConfig, LinkConfig

OURS = Path(__file__).parents[2] / "examples" / "data"
SHARED = Path(__file__).parents[3] / "shared" / "traces" / "mooncake"
LANE = LaneConfig(bandwidth=16_000_000_000)
LINK = LinkConfig(outward=LANE, inward=LANE)
BLOCK = 64
BYTES = 131_072 * BLOCK

TIERS = OffloadConfig(tiers=(TierConfig(num_blocks=6000, link=LINK),))
HYBRID = (
    GroupSpec(kind="full", block_size=BLOCK),
    GroupSpec(kind="sliding_window", block_size=BLOCK, window=1024),
)
# A quarter of the usual pool, so that a short stretch of the trace fills it.
ENGINES = {
    "plain": EngineConfig(num_gpu_blocks=4096, block_size=BLOCK),
    "host": EngineConfig(num_gpu_blocks=4096, block_size=BLOCK, tiers=TIERS, bytes_per_block=BYTES),
    "hybrid": EngineConfig(num_gpu_blocks=6000, groups=HYBRID),
    "hybrid, host": EngineConfig(num_gpu_blocks=6000, groups=HYBRID, tiers=TIERS, bytes_per_block=BYTES),
}


class Line(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def rows_of(path: Path, count: int) -> list[Row]:
    """The first ``count`` requests of a trace, from the repo's own copy where there is one."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    lines = [msgspec.json.decode(line, type=Line) for line in text.splitlines()[:count]]
    return [Row(line.timestamp * 1_000_000, line.input_length, line.output_length, line.hash_ids) for line in lines]


def run(config: EngineConfig, rows: list[Row], plans: bool) -> Log:
    log = Log()
    core = make_core(config, watcher=log, events=True, plans=plans)
    drive(core, rows, check=False)
    core.check_integrity()
    return log


def run_together(config: EngineConfig, rows: list[Row], plans: bool) -> list[Log]:
    timeline = Timeline()
    logs = [Log(), Log()]
    cores = [
        make_core(config, name=f"w{at}", watcher=log, events=True, plans=plans, timeline=timeline)
        for at, log in enumerate(logs)
    ]
    drive_together(cores, rows, timeline, check=False)
    for core in cores:
        core.check_integrity()
    return logs


def equal(planned: Log, stepped: Log) -> None:
    assert planned.jobs == stepped.jobs
    assert planned.events == stepped.events
    # Lengths first: a difference of a hundred thousand passes is no use to anybody.
    assert len(planned.passes) == len(stepped.passes)
    assert planned.passes == stepped.passes


def conversation(count: int) -> list[Row]:
    found = sorted(OURS.glob("*conversation*.jsonl*"))
    assert found, f"no copy of the conversation trace in {OURS}"
    return rows_of(found[0], count)


@pytest.mark.parametrize("name", ENGINES)
def test_conversation(name):
    rows = conversation(120)
    equal(run(ENGINES[name], rows, True), run(ENGINES[name], rows, False))


SHARING = EngineConfig(
    num_gpu_blocks=2048,
    block_size=BLOCK,
    bytes_per_block=BYTES,
    tiers=OffloadConfig(
        tiers=(TierConfig(num_blocks=1500, link=LINK), TierConfig(num_blocks=8000, link=LINK, scope="shared")),
    ),
)


def test_two_cores_on_one_time_line():
    rows = conversation(80)
    for planned, stepped in zip(run_together(SHARING, rows, True), run_together(SHARING, rows, False), strict=True):
        equal(planned, stepped)


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.timeout(900)
def test_two_thousand_requests(name, trace):
    path = SHARED / f"{trace}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not at hand")
    rows = rows_of(path, 2000)
    equal(run(ENGINES[name], rows, True), run(ENGINES[name], rows, False))


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
@pytest.mark.timeout(900)
def test_two_thousand_requests_on_one_time_line(trace):
    path = SHARED / f"{trace}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not at hand")
    rows = rows_of(path, 2000)
    for planned, stepped in zip(run_together(SHARING, rows, True), run_together(SHARING, rows, False), strict=True):
        equal(planned, stepped)
