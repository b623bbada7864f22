"""Flow control on agent sessions: flow policies by concurrency, beside first come first served.

Weka's Claude Code sessions in a closed loop: so many sessions at a time, each with its first ``--turns`` requests, and tools
and people cut off at ``--think`` seconds. Workers have ``--engine-requests`` requests each; others wait before the router.

    python benchmarks/sessions.py TRACE [--workers 4,8] [--concurrency 50,100,250] [--flows fifo,las,progress]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

import kvyard
from kvyard.clock import SECOND
from kvyard.replay.report.report import FlowReport, SessionsReport
from kvyard.replay.traces import Trace, TraceRequest, open_trace


def shortened(trace: Trace, turns: int, think_s: float) -> Iterator[TraceRequest]:
    """The first ``turns`` requests of each session without its sub-agents, after at most ``think_s`` of thinking each."""
    seen: Counter[str] = Counter()
    for row in trace:
        if row.root is not None or row.session is None:
            continue
        seen[row.session] += 1
        if seen[row.session] <= turns:
            delay = None if row.delay is None else min(row.delay, round(think_s * SECOND))
            yield replace(row, delay=delay, after=())


def main() -> None:
    """Print a line for each number of workers, concurrency and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--workers", default="8")
    parser.add_argument("--concurrency", default="50,100,250")
    parser.add_argument("--flows", default="fifo,las,las:half_life_s=0,progress,shortest")
    parser.add_argument("--engine-requests", type=int, default=16)
    parser.add_argument("--blocks", default="65536", help="blocks of 64 tokens on each device")
    parser.add_argument("--router", default="kv")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--think", type=float, default=5.0)
    args = parser.parse_args()
    rows = list(shortened(open_trace(args.trace), args.turns, args.think))
    print(f"{len(rows):,} requests of {len({row.session for row in rows}):,} sessions, router {args.router}")
    print("workers  sessions  flow                 session mean  p90 (s)  against fifo  slowdown  Jain   TTFT mean  p99 (s)  "
          "held   reused  moved  CPU s")  # fmt: skip
    for workers in map(int, args.workers.split(",")):
        for concurrency in map(int, args.concurrency.split(",")):
            first = 0.0
            for flow in args.flows.split(","):
                began = time.process_time()
                name, _, options = flow.partition(":")
                settings = {"flow_options": options} if options else {}
                report = kvyard.replay(
                    rows,
                    workers=workers,
                    router=args.router,
                    num_gpu_blocks=args.blocks,
                    concurrency=concurrency,
                    engine_requests=args.engine_requests,
                    flow=name,
                    **settings,  # type: ignore[arg-type]
                ).report
                sessions, held = report.sessions, report.flow
                assert isinstance(sessions, SessionsReport) and isinstance(held, FlowReport)
                assert sessions.slowdown is not None
                mean, ttft = sessions.completion.mean / 1000, report.latency["ttft"]
                first = first or mean
                print(
                    f"{workers:>7}  {concurrency:>8}  {flow:<19}  {mean:>12.1f}  {sessions.completion.p90 / 1000:>7.1f}  "
                    f"{mean / first - 1:>+12.1%}  {sessions.slowdown.mean:>8.2f}  {sessions.jain:.3f}  "
                    f"{ttft.mean / 1000:>9.2f}  {ttft.p99 / 1000:>7.2f}  {held.held.value:>5.0%}  "
                    f"{report.reuse['all'].value:>6.1%}  {sessions.migrations.value:>5.1%}  "
                    f"{time.process_time() - began:>5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
