"""What a sweep recommends: the cheapest that keeps an SLO, or nearly the best; and what that costs."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from tests.replay.report.support import reported

from kvyard.lab.sweep.advice import FleetCost, advice, fleet_cost
from kvyard.lab.sweep.grid import make_grid
from kvyard.lab.sweep.run import Sweep
from kvyard.replay.report import Slo
from kvyard.replay.report.report import Goodput, PercentileLimit, share
from kvyard.replay.settings import make_config

GIB = 1 << 30


def swept(times: dict[str, float], within: dict[str, float] | None = None, **base: object) -> Sweep:
    """A sweep over workers with these mean TTFTs, and these shares of requests within the SLO."""
    grid = make_grid(base, {"workers": list(times)})
    slo = Slo(ttft=500.0) if within else None
    made = Sweep(grid, "trace", Path("x"), slo)
    run = reported()
    for point, (value, mean) in zip(grid.points, times.items()):
        good = None
        if within and slo is not None:
            count = round(within[value] * run.requests["all"])
            good = Goodput(
                slo_ms=slo, requests=share(count, run.requests["all"], ""), requests_per_s=1, output_tokens_per_s=1
            )
        latency = run.latency | {"ttft": replace(run.latency["ttft"], mean=mean)}
        made.reports[point.key] = replace(run, latency=latency, goodput=good)
    return made


def test_what_a_fleet_is_made_of() -> None:
    settings = {"workers": 4, "num_gpu_blocks": 1000, "host_bytes": "2GiB", "block_size": 64}
    assert fleet_cost(make_config(settings)) == FleetCost(4, 4000, (8 * GIB, 0, 0))
    assert fleet_cost(make_config({**settings, "host_scope": "shared"})).lower == (2 * GIB, 0, 0)
    assert fleet_cost(make_config({"workers": 3, "num_gpu_blocks": 10})) < fleet_cost(
        make_config({"workers": 4, "num_gpu_blocks": 1})
    )


def test_the_cheapest_that_is_nearly_as_good() -> None:
    assert advice(swept({"2": 900.0, "4": 410.0, "8": 400.0, "16": 500.0}, num_gpu_blocks=100)) == [
        "workers=8 has the soonest first token (400.0 ms on average): 8 workers and 800 device blocks in all. "
        "Within 5% of it, workers=4 is the cheapest: 410.0 ms, 4 workers and 400 device blocks in all."
    ]
    assert advice(swept({"2": 400.0, "4": 430.0, "8": 440.0}, num_gpu_blocks=100))[0].startswith(
        "Take workers=2: the soonest first token (400.0 ms on average), and none within 5% of it is cheaper"
    )


def test_the_edge_of_the_grid() -> None:
    assert "edge of the grid (workers=8)" in advice(swept({"2": 900.0, "4": 600.0, "8": 400.0}))[-1]
    assert len(advice(swept({"2": 900.0, "8": 400.0}))) == 1  # two values are a comparison, and no grid


def test_an_slo() -> None:
    times = {"2": 900.0, "4": 410.0, "8": 300.0, "16": 305.0}
    found = advice(swept(times, {"2": 0.5, "4": 0.992, "8": 1.0, "16": 1.0}, num_gpu_blocks=100, host_bytes="1GiB"))
    assert found == [
        "Take workers=4: of 4 points 3 keep 99% of requests within TTFT ≤ 500 ms, and this is the cheapest: "
        "4 workers, 400 device blocks and 4.0 GiB of host memory in all."
    ]
    assert advice(swept(times, {"2": 0.5, "4": 0.9, "8": 0.95, "16": 0.96}))[0].startswith(
        "No point keeps 99% of requests within TTFT ≤ 500 ms. workers=16 comes closest, with 96.0% of requests within "
        "TTFT ≤ 500 ms: 16 workers"
    )


def test_nothing_has_run() -> None:
    made = swept({"2": 900.0})
    made.reports.clear()
    assert advice(made) == []


def test_percentiles_of_the_run() -> None:
    made = swept({"2": 900.0, "4": 410.0, "8": 300.0}, {"2": 0.1, "4": 0.1, "8": 0.1}, num_gpu_blocks=100)
    slo = Slo(percentiles={"ttft_p99": 1000.0})
    for point, met in zip(made.grid.points, (False, True, True)):
        report = made.reports[point.key]
        assert report.goodput is not None
        limit = PercentileLimit(limit_ms=1000.0, value_ms=900.0, met=met)
        good = replace(report.goodput, slo_ms=slo, percentiles={"ttft_p99": limit})
        made.reports[point.key] = replace(report, goodput=good)
    made.slo = slo
    assert advice(made)[0].startswith("Take workers=4: of 3 points 2 keep TTFT p99 ≤ 1000 ms, and this is the cheapest")
    lost = made.reports[made.grid.points[1].key]
    made.reports[made.grid.points[1].key] = replace(lost, requests=lost.requests | {"finished": 1})
    assert advice(made)[0].startswith("Take workers=8: of 3 points 1 keep")


def test_an_oracle_is_not_recommended() -> None:
    grid = make_grid({"workers": 2, "num_gpu_blocks": 100}, {"eviction": ["lru", "slru", "belady"]})
    made = Sweep(grid, "trace", Path("x"))
    run = reported()
    for point, mean in zip(grid.points, (500.0, 480.0, 300.0)):
        latency = run.latency | {"ttft": replace(run.latency["ttft"], mean=mean)}
        made.reports[point.key] = replace(run, latency=latency)
    assert advice(made)[0].startswith("Take eviction=slru: the soonest first token (480.0 ms on average)")
    assert "eviction=belady knows the future" in advice(made)[1] and "300.0 ms" in advice(made)[1]
