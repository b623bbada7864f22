"""How much host memory for this traffic? A study in steps, as one would write it in a notebook.

    python examples/host_tier_study.py [TRACE]

Each step is a cell; paste them one after the other, or run them all. Takes about a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvyard
from kvyard.lab.study import Study
from kvyard.lab.sweep import sweep
from kvyard.replay.report import Report
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe

FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz"
OUT = Path("build/host-tier-study")
LIMIT = 2000
"""Requests of the trace; ``None`` for all."""
FLEET = {"workers": 4, "num_gpu_blocks": 8000, "limit": LIMIT}
SLO = "ttft=500,itl=20"


# %% 1. The trace: what does it ask for, and what could a cache do at best?
def look_at_the_trace() -> None:
    info = describe(open_trace(FILE, limit=LIMIT))
    print(
        f"{info.requests:,} requests, {info.input.total / 1e6:.1f} M prompt tokens, {info.input.mean:,.0f} in the mean"
    )
    if info.reuse is not None:
        print(f"with room for everything, {info.reuse.infinite_tokens:.1%} of prompt tokens could be reused")


# %% 2. A run without host memory: what is missed, and why? What was evicted, host memory can bring back.
def run_without() -> Report:
    run = kvyard.replay(FILE, **FLEET, label="device only", bounds=True, slo=SLO)  # type: ignore[operator]
    report: Report = run.report
    print(run)
    print(f"TTFT {report.latency['ttft'].mean:.0f} ms in the mean, p99 {report.latency['ttft'].p99:.0f} ms")
    print(f"  {report.reuse['all'].value:6.1%} of prompt tokens reused")
    for reason, share in report.missed_tokens.items():
        print(f"  {share.value:6.1%} computed: {reason.replace('_', ' ')}")
    best = report.bounds["routed_infinite"]
    print(f"  {best.value:6.1%} could have been reused at best, with the same routing and caches without end")

    # Requests are plain records: those who waited longest, and why.
    for record in sorted(run.records, key=lambda record: record.ttft, reverse=True)[:3]:
        found = f"{record.cached:,} of {record.input:,} tokens cached"
        print(
            f"  request {record.id}: {found}, TTFT {record.ttft / 1e6:,.0f} ms, the rest {record.miss.replace('_', ' ')}"
        )
    return report


# %% 3. The curve: sizes against routers. Finished points are kept in OUT, so that a second time costs nothing.
def draw_the_curve() -> Study:
    found = sweep(
        FILE,
        {"host_bytes": ["0", "64GiB", "128GiB", "256GiB", "512GiB"], "router": ["round-robin", "kv"]},
        folder=OUT,
        jobs=2,  # more than one process: a script needs the `if __name__` below
        slo=SLO,
        **FLEET,
    )
    found.show()
    found.save()
    print(f"curves: {OUT / 'sweep.html'}")
    return found


# %% 4. The one to pick: the smallest that has most of the gain.
def pick(found: Study, base: Report) -> None:
    routed = [(point, report) for point, report in found.done if point.varied["router"] == "kv"]
    before = base.latency["ttft"].mean
    gain = before - min(report.latency["ttft"].mean for _, report in routed)
    point, report = next(one for one in routed if before - one[1].latency["ttft"].mean >= 0.8 * gain)
    loads = report.transfers.get("loads")
    print(
        f"{point.label} has 80 % of the gain: TTFT {before:.0f} ms without, {report.latency['ttft'].mean:.0f} ms with it"
    )
    if loads is not None:
        print(f"{loads.bytes / 1e9:,.0f} GB came back from host memory, in {loads.transfers:,} loads")


if __name__ == "__main__":
    look_at_the_trace()
    print()
    without = run_without()
    print()
    curve = draw_the_curve()
    print()
    pick(curve, without)
