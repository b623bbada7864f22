"""A report, against counting its records naively."""

from __future__ import annotations

from collections import Counter
from statistics import mean, pstdev

import msgspec
import pytest
from tests.replay.report.support import SLO, config, ran, reported, trace

from kvyard.engine.config import EngineConfig
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.record import Record
from kvyard.replay.report import Report, make_report, sketch, totals
from kvyard.replay.report.files import to_json
from kvyard.replay.traces import TraceRequest

RUNS = [
    {"policy": "kv"},
    {"policy": "round-robin", "blocks": 2200},
    {"policy": "kv", "blocks": 2200, "host": 4000},
    {"policy": "kv", "blocks": 2000, "host": 2500, "storage": 20000, "workers": 2, "limit": 400},
    {"policy": "round-robin", "workers": 2, "dp": 2},
]


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run.values())))
def both(request: pytest.FixtureRequest) -> tuple[list[Record], Report, Fleet]:
    fleet = ran(**request.param)
    return list(fleet.records.values()), reported(**request.param), fleet


def test_latencies(both: tuple[list[Record], Report, Fleet]) -> None:
    records, report, _ = both
    naive = {
        "ttft": [one.first_token - one.arrival for one in records],
        "e2e": [one.ended - one.arrival for one in records],
        "queue": [one.admitted - one.arrival for one in records],
        "tpot": [(one.ended - one.first_token) / (one.output - 1) for one in records if one.output > 1],
    }
    assert all(one.status == "finished" for one in records)
    for name, values in naive.items():
        ordered = sorted(value / 1e6 for value in values)
        found = report.latency[name]
        assert found.count == len(ordered)
        assert found.mean == pytest.approx(mean(ordered))
        assert found.std == pytest.approx(pstdev(ordered), abs=1e-6)
        assert found.p99 == pytest.approx(ordered[round(0.99 * (len(ordered) - 1))])
        drawn = report.histograms[name]
        assert drawn.zeros + sum(drawn.counts) == found.count
    # Every token but the first of a request ends one gap, unless a preemption made it compute again.
    gaps = sum(one.output - 1 for one in records)
    assert report.latency["itl"].count == pytest.approx(gaps, rel=0.02 if report.preemptions else 0)
    total = sum(one.ended - one.first_token for one in records) / 1e6
    if not report.preemptions:
        # Gaps are kept to the microsecond.
        assert report.latency["itl"].mean * gaps == pytest.approx(total, abs=gaps * 0.0006)


def test_rates(both: tuple[list[Record], Report, Fleet]) -> None:
    records, report, _ = both
    seconds = (max(one.ended for one in records) - min(one.arrival for one in records)) / 1e9
    assert report.duration_s == pytest.approx(seconds)
    assert report.throughput["requests_per_s"] == pytest.approx(len(records) / seconds)
    assert report.throughput["output_tokens_per_s"] == pytest.approx(sum(one.output for one in records) / seconds)
    good = [
        one
        for one in records
        if (one.first_token - one.arrival) / 1e6 <= (SLO.ttft or 0)
        and (one.output < 2 or (one.ended - one.first_token) / (one.output - 1) / 1e6 <= (SLO.itl or 0))
    ]
    assert report.goodput is not None
    assert (report.goodput.requests.part, report.goodput.requests.whole) == (len(good), len(records))
    assert report.goodput.output_tokens_per_s == pytest.approx(sum(one.output for one in good) / seconds)
    assert report.requests == {"all": len(records), "finished": len(records)}


def test_every_prompt_token_is_accounted_for(both: tuple[list[Record], Report, Fleet]) -> None:
    records, report, _ = both
    whole = sum(one.input for one in records)
    parts = [report.reuse[name] for name in ("device", "host", "storage")] + list(report.missed_tokens.values())
    assert sum(part.part for part in parts) == whole
    assert all(part.whole == whole and part.value == part.part / whole for part in parts)
    assert all(" / " in part.of for part in parts)
    assert report.reuse["all"].part == sum(part.part for part in parts[:3])
    assert sum(share.part for share in report.misses.values()) == len(records)
    expected: Counter[str] = Counter()
    for one in records:
        found = sources(one)
        assert sum(found.values()) == one.input and min(found.values()) >= 0
        expected.update(found)
    over_time = {name: sum(counts) for name, counts in report.series.prompts.items()}
    assert over_time == {name: tokens for name, tokens in expected.items() if tokens}
    shares = {**report.reuse, **report.missed_tokens}
    assert over_time == {name: shares[name].part for name in over_time}
    assert sum(over_time.values()) == whole


def sources(record: Record) -> dict[str, int]:
    """Prompt tokens of an admitted request by where they came from; what was computed by why."""
    found = dict(zip(("device", "host", "storage", "remote"), (record.cached, *record.loaded), strict=False))
    rest = record.input - sum(found.values())
    if record.miss in ("none", "partial_block", "unknown"):
        return {**found, record.miss: rest}
    known = {"left": record.left, "evicted": record.lost, "other_worker": record.elsewhere}
    return {**found, **known, "never_seen": rest - sum(known.values())}


@pytest.mark.source
def test_beyond_the_exact_limit_percentiles_come_from_the_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"policy": "kv", "blocks": 2200, "host": 4000}
    exact, fleet = reported(**run), ran(**run)
    assert exact.percentiles is msgspec.UNSET
    monkeypatch.setattr(totals, "MOST_EXACT", 20)
    found = make_report(fleet, slo=SLO)
    assert found.percentiles == sketch.PercentileError() and b"relative_error" in to_json(found)
    for lots in ("latency", "lengths"):
        for name, one in getattr(found, lots).items():
            other = getattr(exact, lots)[name]
            assert one.count == other.count and (one.min, one.max) == (other.min, other.max)
            for part in ("mean", "std"):
                assert getattr(one, part) == pytest.approx(getattr(other, part), rel=1e-9)
            for part in ("p50", "p90", "p95", "p99"):
                assert getattr(one, part) == pytest.approx(getattr(other, part), rel=1.0001 * sketch.RELATIVE_ERROR)
    assert found.latency["itl"] == exact.latency["itl"], "gaps are kept with counts, at any length"
    same = ("digest", "histograms", "reuse", "misses", "missed_tokens", "goodput", "workers", "router", "requests")
    for name in same:
        assert getattr(found, name) == getattr(exact, name), name


def test_bounds_explain_the_misses(both: tuple[list[Record], Report, Fleet]) -> None:
    """What was reused, evicted or elsewhere is all that could be: two counts that know nothing of each other."""
    _, report, fleet = both
    missed = {name: share.part for name, share in report.missed_tokens.items()}
    reused, bounds = report.reuse["all"].part, report.bounds
    # What is left of a prompt when less than a block is missing may have been seen or not.
    spare = missed.get("partial_block", 0) + missed.get("none", 0)
    everything = reused + missed.get("evicted", 0) + missed.get("other_worker", 0)
    assert everything <= bounds["infinite"].part <= everything + spare
    if all(len(worker.cores) == 1 for worker in fleet.workers):  # a worker's ranks have seen what any of them has
        mine = reused + missed.get("evicted", 0)
        assert mine <= bounds["routed_infinite"].part <= mine + spare
    assert reused <= bounds["routed_belady"].part <= bounds["routed_infinite"].part <= bounds["infinite"].part
    assert bounds["routed_belady"].part <= bounds["belady"].part <= bounds["infinite"].part


def test_workers_add_up(both: tuple[list[Record], Report, Fleet]) -> None:
    records, report, fleet = both
    by_worker = Counter(one.worker.partition("@")[0] for one in records)
    assert {one.name: one.requests for one in report.workers} == by_worker
    assert sum(one.input_tokens for one in report.workers) == report.input_tokens
    assert sum(one.output_tokens for one in report.workers) == report.output_tokens
    assert sum(one.preemptions for one in report.workers) == report.preemptions
    computed = sum(one.computed_tokens for one in report.workers)
    first = report.input_tokens - report.reuse["all"].part
    assert computed == first if not report.preemptions else computed >= first
    loads = [one.input_tokens for one in report.workers]
    assert report.balance["max_over_mean"] == pytest.approx(max(loads) / mean(loads))
    assert report.balance["variation"] == pytest.approx(pstdev(loads) / mean(loads))
    for at, one in enumerate(report.workers):
        assert sum(report.series.routed[at]) == one.requests
        assert sum(report.series.routed_tokens[at]) == one.input_tokens
        assert 0 < one.busy <= 1
    assert sum(report.series.arrived) == sum(report.series.finished) == len(records)
    pools = [core.scheduler.manager.pool for worker in fleet.workers for core in worker.cores]
    assert report.tiers["device"].evicted_blocks == sum(pool.evicted for pool in pools)


def test_router(both: tuple[list[Record], Report, Fleet]) -> None:
    records, report, _ = both
    router = report.router
    assert router.decisions == len(records)
    assert router.regret.part == sum(one.best_overlap - one.overlap for one in records)
    assert router.regret.whole == sum(one.best_overlap for one in records)
    assert router.belief.part <= router.belief.whole
    assert bool(router.regret.whole) == (router.policy == "kv")


def test_samples_are_shares_and_counts(both: tuple[list[Record], Report, Fleet]) -> None:
    _, report, _ = both
    samples = report.timeline
    assert len(samples.times_s) > 10 and samples.times_s == sorted(samples.times_s)
    for name, rows in samples.values.items():
        assert len(rows) == len(report.workers)
        assert all(len(line) == len(samples.times_s) for line in rows)
        if name in ("device", "filled", "host", "storage"):
            assert all(0 <= value <= 1 for line in rows for value in line)
    assert any(any(line) for line in samples.values["running"])
    held, filled = samples.values["device"], samples.values["filled"]
    assert all(a <= b + 1e-5 for one, two in zip(held, filled, strict=True) for a, b in zip(one, two, strict=True))


def test_tiers_and_transfers() -> None:
    report = reported(policy="kv", blocks=2000, host=2500, storage=20000, workers=2, limit=400)
    fleet = ran(policy="kv", blocks=2000, host=2500, storage=20000, workers=2, limit=400)
    sites = [core.offload.state for worker in fleet.workers for core in worker.cores if core.offload is not None]
    assert set(report.tiers) == {"device", "host", "storage"}
    assert report.tiers["host"].capacity_blocks == 5000 and report.tiers["storage"].capacity_blocks == 40000
    assert report.tiers["device"].evicted_blocks > 0 and report.tiers["host"].evicted_blocks > 0
    stores, loads = report.transfers["stores"], report.transfers["loads"]
    assert stores.bytes == sum(site.counters.tiers[0].stores.bytes for site in sites) > 0
    assert loads.transfers > 0 and loads.blocks * (64 << 17) == loads.bytes
    out = report.tiers["host"].links["outward"]
    assert out.links == 2 and out.bytes == stores.bytes
    assert 0 < out.busy.value < 1 and out.bandwidth is not None and 0 < out.bandwidth.value < 1
    assert report.loading.count > 0 and report.loading.min > 0
    assert report.reuse["storage"].part > 0
    assert set(reported(policy="kv", blocks=2200, host=4000).transfers) == {"stores", "loads"}
    assert reported(policy="kv").transfers == {} and set(reported(policy="kv").tiers) == {"device"}


def test_evictions_are_counted_in_blocks() -> None:
    """Two prompts that fill the device twice over: the second pushes all of the first out."""
    engine = EngineConfig(block_size=16, num_gpu_blocks=10)
    fleet = Fleet(ReplayConfig(workers=(WorkerConfig(engine=engine),)))
    rows = [
        TraceRequest(id=str(n), arrival=n * 10**9, input_length=128, output_length=1, ids=[n], id_block_size=128)
        for n in range(2)
    ]
    fleet.run(rows)
    report = make_report(fleet)
    # 8 blocks of prompt each, 2 of 10 left over; the one token of output fits the ninth.
    assert report.tiers["device"].evicted_blocks in (6, 7)
    assert report.workers[0].evicted_blocks == report.tiers["device"].evicted_blocks


def test_rejected_requests_have_no_latency() -> None:
    engine = EngineConfig(block_size=16, num_gpu_blocks=4)
    fleet = Fleet(ReplayConfig(workers=(WorkerConfig(engine=engine),)))
    rows = [
        TraceRequest(id="large", arrival=0, input_length=1000, output_length=1, ids=[1], id_block_size=1000),
        TraceRequest(id="small", arrival=5 * 10**9, input_length=20, output_length=2, ids=[2], id_block_size=20),
    ]
    fleet.run(rows)
    report = make_report(fleet)
    assert report.requests == {"all": 2, "finished": 1, "rejected": 1}
    assert report.latency["ttft"].count == 1
    assert report.reuse["all"].whole == 20


def test_an_interrupted_run_has_a_valid_report() -> None:
    fleet = Fleet(config(workers=2))
    rows = iter(trace(400))

    def broken():  # type: ignore[no-untyped-def]
        for number, row in enumerate(rows):
            if number == 150:
                raise KeyboardInterrupt
            yield row

    fleet.run(broken())
    report = make_report(fleet)
    assert not report.complete
    assert 0 < report.requests["finished"] <= report.requests["all"] <= 150
    assert report.requests.get("unfinished", 0) + report.requests["finished"] == report.requests["all"]


def test_nothing_at_all_has_a_report_too() -> None:
    report = make_report(Fleet(config()))
    assert report.requests == {"all": 0} and report.duration_s == 0 and report.latency["ttft"].count == 0


def test_very_many_workers_keep_the_report_small() -> None:
    from kvyard.replay.report.common import CELLS, FEWEST

    report = reported(policy="round-robin", workers=400, blocks=2000, limit=150)
    assert len(report.timeline.times_s) * 400 <= max(CELLS, FEWEST * 400)
    assert len(report.series.arrived) * 400 <= max(CELLS, FEWEST * 400)
    assert sum(map(sum, report.series.routed)) == 150
