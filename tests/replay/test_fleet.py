"""A fleet run from rows: what is shared by requests, what is counted, and workers that differ."""

from __future__ import annotations

from kvyard.clock import SECOND
from kvyard.engine.config import EngineConfig
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig

SMALL = EngineConfig(block_size=16, num_gpu_blocks=64)


def row(name: str, at: int = 0, length: int = 160, output: int = 4, **more: object) -> TraceRequest:
    ids = more.pop("ids", (1, 2, 3))
    return TraceRequest(name, at, length, output, ids=ids, id_block_size=64, **more)  # type: ignore[arg-type]


def run(rows: list[TraceRequest], *engines: EngineConfig) -> Fleet:
    workers = tuple(WorkerConfig(engine=engine) for engine in engines or (SMALL,))
    fleet = Fleet(ReplayConfig(workers=workers, router=RouterConfig(policy="round-robin")))
    fleet.run(rows)
    return fleet


def test_adapters_and_salts_share_nothing() -> None:
    rows = [row("a"), row("b", SECOND, lora="x"), row("c", 2 * SECOND, salt="s"), row("d", 3 * SECOND, lora="x")]
    cached = {name: record.cached for name, record in run(rows).records.items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 144}


def test_the_gap_across_a_preemption_counts() -> None:
    rows = [row(f"r{at}", length=300, output=200, ids=tuple(range(9 * at, 9 * at + 9))) for at in range(3)]
    fleet = run(rows, EngineConfig(block_size=16, num_gpu_blocks=70))
    records = fleet.records.values()
    assert any(record.preemptions for record in records)
    durations, counts = fleet.gaps.columns()
    assert counts.sum() == sum(record.output - 1 for record in records)
    spent = sum(record.ended - record.first_token for record in records)
    assert abs(int((durations * counts).sum()) - spent) <= 1000 * int(counts.sum())


def test_workers_of_different_block_sizes() -> None:
    fleet = run(
        [row("a"), row("b"), row("c", SECOND), row("d", SECOND)], SMALL, EngineConfig(block_size=32, num_gpu_blocks=32)
    )
    assert {record.status for record in fleet.records.values()} == {"finished"}
    assert [fleet.records[name].cached for name in "cd"] == [144, 128]
