"""What autoscaling costs and saves: a generated day, policies against fixed fleets, and the start-up time that is too long.

    python benchmarks/scaling.py [--requests 11000] [--startups 0,30,60,90,120,180,300]

One hour stands for a day: arrivals rise from 0.3 to 3 sessions a second and fall again, sessions of three turns on average
over shared prefixes, polynomial timing, ``kv`` routing. An answer within the SLO has its first token within a second and 30 ms
between tokens at most. The cheapest fixed fleet with 99 % of answers within the SLO is the one to beat; hours are worker-hours
from asking until off.
"""

from __future__ import annotations

import argparse

from kvyard.replay.run import replay
from kvyard.replay.traces.generate import Workload, generate

SLO = "ttft=1000,itl=30"
POLICIES = {"threshold": "threshold:ttft_p99=1s,queue=4", "predictive": "predictive:busy=0.6"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=11_000)
    parser.add_argument("--startups", default="0,30,60,90,120,180,300")
    asked = parser.parse_args()
    trace = list(
        generate(
            Workload(
                requests=asked.requests,
                seed=7,
                arrivals="daily:low=0.3,high=3,day=1",
                input="lognormal:median=3000,sigma=0.8,max=30000",
                output="lognormal:median=200,sigma=0.6",
                turns="geometric:3",
                think="exponential:20",
                tree="4x1000/16x500",
            )
        )
    )
    print("| fleet | within the SLO | worker-hours | TTFT p99, ms | reuse | computed again after a stop |")
    print("|---|---|---|---|---|---|")
    for workers in range(2, 9):
        show(f"{workers} workers", trace, workers=workers)
    for name, policy in POLICIES.items():
        for startup in asked.startups.split(","):
            show(
                f"{name}, start-up {startup} s", trace, workers=2, autoscale=f"{policy},min=2,max=10,startup={startup}s"
            )


def show(name: str, trace: list, **settings: object) -> None:
    """Replay, and print a row."""
    report = replay(trace, router="kv", slo=SLO, **settings).report
    scaling, good = report.scaling, report.goodput
    assert good is not None
    hours = report.duration_s * len(report.workers) / 3600
    lost = ""
    if scaling is not None:
        hours, lost = scaling.worker_seconds["both"] / 3600, f"{scaling.lost.value:.2%}"
    cells = [f"{good.requests.value:.1%}", f"{hours:.2f}", f"{report.latency['ttft'].p99:,.0f}"]
    print("|", " | ".join([name, *cells, f"{report.reuse['all'].value:.1%}", lost]), "|", flush=True)


if __name__ == "__main__":
    main()
