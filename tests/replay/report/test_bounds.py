"""Bounds, where counting is easy to follow. That they bound real runs, and explain them, is in test_make."""

from __future__ import annotations

from msgspec.structs import replace
from tests.replay.report.support import config

from kvyard.engine.config import EngineConfig
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import make_report
from kvyard.replay.report.bounds import make_bounds
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig

SECOND = 10**9


def fleet_of(rows: list[TraceRequest], blocks: int = 1000, workers: int = 1) -> Fleet:
    engine = EngineConfig(block_size=16, num_gpu_blocks=blocks)
    made = ReplayConfig(
        workers=(WorkerConfig(engine=engine, count=workers),), router=RouterConfig(policy="round-robin")
    )
    fleet = Fleet(made)
    fleet.run(rows)
    return fleet


def prompt(number: int, ids: list[int], at: int | None = None) -> TraceRequest:
    when = (number if at is None else at) * 100 * SECOND
    return TraceRequest(str(number), when, 16 * len(ids), 1, ids=ids, id_block_size=16)


def test_by_hand() -> None:
    """A and B in turn, in a cache with room for one and a half of them."""
    a, b = [1, 2, 3, 4], [11, 12, 13, 14]
    rows = [prompt(0, a), prompt(1, b), prompt(2, a), prompt(3, b)]
    fleet = fleet_of(rows, blocks=6)
    found = make_bounds(fleet, rows)
    assert {name: (one.part, one.whole) for name, one in found.items()} == {
        "infinite": (8 * 16, 256),
        # Between its two uses, all of A and two blocks of B fit.
        "belady": (6 * 16, 256),
        # By the time that A comes back, B has pushed it out, and the other way round.
        "pooled": (0, 256),
        "routed_infinite": (8 * 16, 256),
        "routed_belady": (6 * 16, 256),
        "routed": (0, 256),
    }
    assert make_report(fleet).reuse["all"].part <= found["routed_belady"].part


def test_two_workers_have_their_own() -> None:
    rows = [prompt(0, [1, 2, 3]), prompt(1, [1, 2, 3])]
    found = make_bounds(fleet_of(rows, workers=2), rows)
    assert found["infinite"].part == 48 and found["routed_infinite"].part == 0


def test_answers_can_be_reused() -> None:
    """A conversation in tokens: the second prompt holds the first and its answer."""
    first, answer = list(range(64)), list(range(100, 148))
    more = [*first, *answer, *range(200, 232)]
    rows = [
        TraceRequest("a", 0, len(first), len(answer), tokens=first, output_tokens=answer),
        TraceRequest("b", 100 * SECOND, len(more), 5, tokens=more, output_tokens=[7, 8, 9, 10, 11]),
    ]
    fleet = fleet_of(rows)
    reused = make_report(fleet).reuse["all"].part
    bound = make_bounds(fleet, rows)
    assert 64 < reused <= bound["infinite"].part == 112
    assert {one.part for one in bound.values()} == {112}


def test_a_shared_tier_leaves_routing_out() -> None:
    made = config("round-robin", workers=2, host=3000)
    kind = made.workers[0]
    assert kind.engine.tiers is not None
    shared = replace(kind.engine.tiers, tiers=(replace(kind.engine.tiers.tiers[0], scope="shared"),))
    fleet = Fleet(replace(made, workers=(replace(kind, engine=replace(kind.engine, tiers=shared)),)))
    ids = list(range(10))
    rows = [TraceRequest(str(n), n * 100 * SECOND, 640, 1, ids=ids, id_block_size=64) for n in range(2)]
    fleet.run(rows)
    report = make_report(fleet, bounds=make_bounds(fleet, rows))
    assert set(report.bounds) == {"infinite", "belady", "pooled"}
    # The second worker never saw it, and finds it with the first one's help.
    assert report.reuse["host"].part > 0
    assert report.reuse["all"].part <= report.bounds["infinite"].part
    assert report.tiers["host"].capacity_blocks == 3000 and report.tiers["host"].links["inward"].links == 1


def test_requests_without_ids_share_nothing() -> None:
    rows = [TraceRequest(str(n), n * SECOND, 100, 1) for n in range(3)]
    found = make_bounds(fleet_of(rows), rows)
    assert all((one.part, one.whole) == (0, 300) for one in found.values())
    assert make_report(fleet_of(rows)).missed_tokens["unknown"].part == 300
