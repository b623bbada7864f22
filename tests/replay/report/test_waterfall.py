"""Where the reuse went: a trace for each step, and steps that add up."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from random import Random

from msgspec.structs import replace as replaced
from tests.replay.report import test_bounds
from tests.replay.report.test_bounds import fleet_of
from tests.replay.traces.support import CONVERSATION

from kvyard.blocks import GroupSpec, Hints, Retention
from kvyard.engine.config import EngineConfig
from kvyard.replay import replay
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.bounds import make_bounds
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.plain_cache import absent_levels
from kvyard.replay.report.report import Waterfall
from kvyard.replay.report.table import report_text
from kvyard.replay.report.waterfall import LEVELS, step_cells
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig
from kvyard.tiers.config import OffloadConfig, TierConfig

SECOND = 10**9


def fleet(
    rows: list[TraceRequest], policy: str = "kv", *, workers: int = 1, lag: int = 0, **engine: object
) -> tuple[Report, Fleet]:
    """Return the report of ``rows``, and the fleet."""
    fields: dict[str, object] = {"block_size": 16, "num_gpu_blocks": 1000, **engine}
    if "groups" in fields:
        del fields["block_size"]
    kind = WorkerConfig(engine=EngineConfig(**fields), count=workers)  # type: ignore[arg-type]
    made = Fleet(ReplayConfig(workers=(kind,), router=RouterConfig(policy=policy, predicted_ttl_s=0), event_lag=lag))
    made.run(rows)
    return make_report(made, bounds=make_bounds(made, rows)), made


def changes(report: Report) -> dict[str, int]:
    """The steps that aren't 0, in blocks of 16."""
    assert all(step.change % 16 == 0 for step in report.waterfall.steps)
    return {step.level: step.change // 16 for step in report.waterfall.steps if step.change}


def prompt(number: int, ids: list[int], at: float | None = None, output: int = 1) -> TraceRequest:
    """A prompt with a block of its own behind ``ids``: the last block is always computed."""
    when = round((number * 100 if at is None else at) * SECOND)
    return TraceRequest(str(number), when, 16 * len(ids) + 16, output, ids=[*ids, 10_000 + number], id_block_size=16)


A, B, C = [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]


def test_nothing_is_lost() -> None:
    report, _ = fleet([prompt(0, A), prompt(1, B), prompt(2, A)])
    assert changes(report) == {} and report.waterfall.absent == {}
    assert [step.level for step in report.waterfall.steps] == list(LEVELS)
    assert {step.tokens for step in report.waterfall.steps} == {64}


def test_too_little_room_even_with_foresight() -> None:
    # A and B both come back, and there is room for one of them and a block. Foresight keeps that block of A; LRU spends it
    # on the one of its own that the last B brings, as any cache must that has no foresight.
    rows = [prompt(0, A), prompt(1, B), prompt(2, B), prompt(3, A)]
    report, _ = fleet(rows, num_gpu_blocks=5)
    assert changes(report) == {"belady": -3, "pooled": -1}


def test_eviction_without_foresight() -> None:
    # C never comes back: who knows that keeps A, LRU doesn't.
    report, _ = fleet([prompt(0, A), prompt(1, B), prompt(2, C), prompt(3, A)], num_gpu_blocks=10)
    assert changes(report) == {"pooled": -4}


def test_routed_elsewhere() -> None:
    # By turns: the second A goes to the other worker, which never saw it.
    report, _ = fleet([prompt(0, A), prompt(1, A)], "round-robin", workers=2)
    assert changes(report) == {"routed": -4}
    assert set(report.waterfall.absent) == {"believed", "kept"}
    assert "Not given: as the router knew it, and still there" in report_text(report)


def test_not_known_to_the_router() -> None:
    # Its events take longer than the second prompt, which goes to the only worker all the same, and finds it there.
    report, _ = fleet([prompt(0, A), prompt(1, A)], lag=10**6 * SECOND, workers=1)
    assert "believed" in report.waterfall.absent  # no worker was ever known to have any of a prompt
    rows = [prompt(0, A), prompt(1, B), prompt(2, A, at=200), prompt(3, B, at=150)]
    report, _ = fleet(sorted(rows, key=lambda row: row.arrival), lag=120 * SECOND)
    assert changes(report) == {"believed": -4, "delivered": 4}


def test_gone_between_routing_and_admission() -> None:
    # The second prompt waits behind one whose answer needs the room: what it was sent there for is gone when its turn comes.
    rows = [prompt(0, A), prompt(1, [], at=100, output=16 * 12), prompt(2, A, at=100.001)]
    report, _ = fleet(rows, num_gpu_blocks=13, max_num_seqs=1)
    assert changes(report) == {"kept": -4}


def test_steps_add_up_whatever_the_fleet() -> None:
    """Random traces over random fleets: steps are differences of levels, the last is the report's own reuse."""
    rng = Random(5)
    groups = (GroupSpec(kind="full", block_size=16), GroupSpec(kind="sliding_window", block_size=16, window=48))
    engines: list[dict[str, object]] = [{}, {"eviction": "priority"}, {"groups": groups}, {"max_num_seqs": 2}]
    for number in range(24):
        roots = [[at * 100 + depth + 1 for depth in range(8)] for at in range(10)]
        rows = []
        for at in range(60):
            ids = rng.choice(roots)[: rng.randrange(0, 9)]
            rows.append(prompt(at, ids, at=at * rng.choice([0.0, 0.01, 1.0]), output=rng.randrange(1, 60)))
        rows.sort(key=lambda row: row.arrival)
        report, _ = fleet(
            rows,
            rng.choice(["kv", "round-robin", "least-loaded", "longest-match"]),
            workers=rng.randrange(1, 4),
            num_gpu_blocks=rng.choice([40, 60, 200]),
            lag=rng.choice([0, SECOND]),
            **engines[number % len(engines)],
        )
        steps = report.waterfall.steps
        levels = {step.level: step.tokens for step in steps}
        assert [step.level for step in steps] == [level for level in LEVELS if level in levels]
        assert {*levels, *report.waterfall.absent} == set(LEVELS)
        assert steps[0].change == 0
        assert all(after.tokens - before.tokens == after.change for before, after in pairwise(steps))
        assert levels["infinite"] + sum(step.change for step in steps) == report.reuse["all"].part
        assert levels["infinite"] >= levels["belady"] >= max(levels["pooled"], levels["delivered"])
        if "kept" in levels:
            assert levels["kept"] <= min(levels["believed"], levels["delivered"])
        assert report.prefill_ms_per_token is not None
        for step in steps:
            assert step.ms == -step.change * report.prefill_ms_per_token
            assert step_cells(step, report)[1] == f"{step.tokens / report.reuse['all'].whole:.2%}"  # a ratio of sums


def told(lag: object) -> Report:
    fleet = {"workers": 2, "num_gpu_blocks": 4000, "router": "kv", "limit": 250, "event_lag": lag}
    return replay(CONVERSATION, bounds=True, predicted_ttl_s=0, **fleet).report


def test_the_router_s_knowledge_and_what_was_there() -> None:
    late, prompt_ = ({step.level: step.tokens for step in told(lag).waterfall.steps} for lag in ("20s", 0))
    assert late["believed"] < late["delivered"] and prompt_["believed"] > late["believed"]


def test_steps_are_shown_and_written() -> None:
    report = told(lag=0)
    text = report_text(report)
    assert "Where the reuse went" in text and "Split, routed as it was" in text and " ms " in text
    assert from_json(to_json(report)).waterfall == report.waterfall != Waterfall()


def test_without_bounds_there_is_none() -> None:
    report = make_report(fleet_of([prompt(0, A)]))
    assert report.waterfall == Waterfall() and "Where the reuse went" not in report_text(report)


def test_another_eviction_is_the_fleet_s_own() -> None:
    """A stays by its priority, though it was used longest ago: the pooled cache knows that, a plain LRU doesn't."""
    kept = replaced(prompt(0, A), hints=Hints(retention=(Retention(0, 64, 90),)))
    report, _ = fleet([kept, prompt(1, B), prompt(2, C), prompt(3, A)], num_gpu_blocks=10, eviction="priority")
    assert changes(report) == {}


def test_a_hybrid_model_has_its_own_hits() -> None:
    """Its window needs blocks beside those of full attention, so the same room holds less than its tokens say."""
    groups = (GroupSpec(kind="full", block_size=16), GroupSpec(kind="sliding_window", block_size=16, window=32))
    rows = [prompt(0, A), prompt(1, B), prompt(2, A)]
    small, large = (fleet(rows, num_gpu_blocks=blocks, groups=groups)[0] for blocks in (16, 100))
    assert changes(large) == {}
    assert changes(small) == {"pooled": -3}  # as the engine itself found: no later step loses anything
    plain, _ = fleet(rows, num_gpu_blocks=16)
    assert changes(plain) == {}


def test_requests_that_never_meet_find_what_the_plain_cache_does() -> None:
    """The engine is the oracle of simulated caches: far apart, and answered in one token, nothing tells them apart."""
    rng = Random(8)
    window = GroupSpec(kind="sliding_window", block_size=16, window=48)
    state = GroupSpec(kind="mamba", block_size=16, mode="align")
    full = GroupSpec(kind="full", block_size=16)
    roots = [[at * 100 + depth + 1 for depth in range(8)] for at in range(12)]
    rows = [prompt(number, rng.choice(roots)[: rng.randrange(1, 9)]) for number in range(150)]
    wishes = [replaced(row, hints=Hints(retention=(Retention(0, 32, rng.randrange(100)),))) for row in rows]
    for engine, asked in (
        ({"groups": (full, window)}, rows),
        ({"groups": (full, state)}, rows),
        ({"eviction": "priority"}, wishes),
    ):
        for workers, blocks in ((1, 60), (3, 40)):
            report, _ = fleet(asked, "round-robin", workers=workers, num_gpu_blocks=blocks, **engine)
            found = {step.level: step.tokens for step in report.waterfall.steps}
            assert found["routed"] == found["delivered"] > 0
            assert found["pooled"] == found["routed"] or workers > 1


def test_missing_steps_say_why() -> None:
    window = (GroupSpec(kind="sliding_window", block_size=16, window=32),)
    report, _ = fleet([prompt(0, A), prompt(1, A)], groups=window)
    assert "bounds nothing" in report.waterfall.absent["belady"]
    both = [WorkerConfig(engine=EngineConfig(num_gpu_blocks=50, groups=groups)) for groups in (None, window)]
    assert "bounds nothing" in absent_levels(ReplayConfig(workers=tuple(both)))["belady"], "one such worker is enough"
    below = OffloadConfig(tiers=(TierConfig(num_blocks=50, eviction="priority"),))
    report, _ = fleet([prompt(0, A), prompt(1, A)], tiers=below, bytes_per_block=1024)
    assert set(report.waterfall.absent) == {"pooled", "routed"}
    assert sum(step.change for step in report.waterfall.steps) == 0
    shared = OffloadConfig(tiers=(TierConfig(num_blocks=50, scope="shared"),))
    report, _ = fleet([prompt(0, A), prompt(1, A)], workers=2, tiers=shared, bytes_per_block=1024)
    assert "share a tier" in report.waterfall.absent["routed"]


def test_the_pooled_cache_is_a_plain_lru() -> None:
    """Against a cache of single blocks that is written out: touch front to back, evict the oldest."""
    rng = Random(2)
    roots = [[at * 100 + depth for depth in range(6)] for at in range(12)]
    rows = []
    for number in range(150):
        root = rng.choice(roots)
        rows.append(test_bounds.prompt(number, root[: rng.randrange(1, 7)]))
    for blocks in (5, 9, 20, 40):
        kept: OrderedDict[int, None] = OrderedDict()
        hit = 0
        for row in rows:
            assert row.ids is not None
            hits = 0
            while hits < len(row.ids) and row.ids[hits] in kept:
                hits += 1
            hit += hits * 16
            for one in row.ids:
                kept.pop(one, None)
                kept[one] = None
            while len(kept) > blocks:
                kept.popitem(last=False)
        fleet = fleet_of(rows, blocks=max(blocks, 8))
        bound = make_bounds(fleet, rows)["pooled"]
        if blocks >= 8:
            assert bound.part == hit
