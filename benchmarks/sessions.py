"""Flow policies and routers on agent sessions: mean session time, how equal slowdowns are, and time to first token.

``burst`` is llm-d's set-up (guides/agentic-serving, program-aware): so many sessions begin at 10 a second on one worker with
128 sequences, whole and of unequal length. With flow control 133 requests are let in at a time; without it all wait in the
engine. ``--uncached`` is an engine without prefix caching, which is vLLM's default for the hybrid model there; ``--mix`` adds
the sessions of other traces, ``--copies`` times each; ``--slots`` sessions are held at a time instead of all at once;
``--long`` is the share of answers that run to 25,000 tokens, the limit there.
``frontier`` is a closed loop of sessions on several workers with 16 requests each, every router with every flow policy;
starred are those that no other beats in both mean session time and Jain's index of slowdowns.

    python benchmarks/sessions.py burst TRACE [--sessions 100,250]
    python benchmarks/sessions.py frontier TRACE [--workers 4,8] [--loads 1,2] [--routers kv,program] [--flows fifo,las]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvyard.clock import SECOND
from kvyard.replay.record import Record
from kvyard.replay.report.fleet_report import FlowReport
from kvyard.replay.report.report import Report
from kvyard.replay.report.session_report import SessionsReport
from kvyard.replay.run import replay as replayed
from kvyard.replay.traces import TraceRequest, open_trace

PLACES = 16
"""Requests that a worker of the frontier has at a time."""


def agents(trace: str, turns: int, think_s: float, pick: int | None = None) -> Iterator[list[TraceRequest]]:
    """The sessions of ``trace`` without their sub-agents, in an order drawn with seed 42: at most ``turns`` requests each,
    tools and people cut off at ``think_s``. ``pick``: those of even (0) or odd (1) place only.
    """
    found: dict[str, list[TraceRequest]] = {}
    for row in open_trace(trace):
        if row.session is not None and row.root is None:
            found.setdefault(row.session, []).append(row)
    names = sorted(found)
    Random(42).shuffle(names)
    most = round(think_s * SECOND)
    for name in names if pick is None else names[pick::2]:
        yield [
            replace(row, delay=None if row.delay is None else min(row.delay, most), after=())
            for row in found[name][:turns]
        ]


def short_agents(paths: Sequence[str], copies: int, think_s: float) -> Iterator[list[TraceRequest]]:
    """The sessions of the traces ``paths``, ``copies`` of each, the gaps between their requests cut off at ``think_s``. Without
    the names of their blocks, which differ from trace to trace.
    """
    most = round(think_s * SECOND)
    for copy in range(copies):
        for number, path in enumerate(paths):
            found: dict[str, list[TraceRequest]] = {}
            for row in open_trace(path):
                found.setdefault(str(row.session), []).append(row)
            for name, rows in found.items():
                own, before = [], rows[0].arrival
                for place, row in enumerate(rows):
                    gap = row.arrival - before if row.delay is None else row.delay
                    before = row.arrival
                    own.append(
                        replace(
                            row,
                            id=f"{number}-{copy}-{name}-{place}",
                            session=f"{number}-{copy}-{name}",
                            root=None,
                            after=(),
                            ids=None,
                            tokens=None,
                            delay=min(most, max(0, gap)) if place else None,
                        )
                    )
                yield own


def lengthened(rows: Sequence[TraceRequest], share: float) -> list[TraceRequest]:
    """``rows`` with a share of answers, drawn with seed 42, that run to the limit. Later prompts stay as they are, as where a
    client drops what a model has thought.
    """
    draw = Random(42)
    return [replace(row, output_length=LIMIT) if draw.random() < share else row for row in rows]


LIMIT = 25_000
"""Tokens of an answer at most in llm-d's set-up."""
SIZES = ((1, 6), (7, 12), (13, 27), (28, 1 << 30))
"""Requests of a session, from and to, as llm-d groups them."""


def medians(records: Sequence[Record]) -> str:
    """Median seconds from a session's first arrival to its last end, by ``SIZES``."""
    ends: dict[str | None, tuple[int, int, int]] = {}
    for record in records:
        first, last, count = ends.get(record.request.session, (1 << 62, 0, 0))
        ends[record.request.session] = (min(first, record.arrival), max(last, record.ended), count + 1)
    groups = [
        [(last - first) / SECOND for first, last, count in ends.values() if low <= count <= high] for low, high in SIZES
    ]
    return "  ".join(f"{median(group):>6.0f}" if group else "     –" for group in groups)


def parts(report: Report) -> tuple[SessionsReport, FlowReport | None]:
    """The sessions of a report, and what waited before the router."""
    sessions, flow = report.sessions, report.flow
    assert isinstance(sessions, SessionsReport) and sessions.slowdown is not None and sessions.jain is not None
    return sessions, flow if isinstance(flow, FlowReport) else None


def burst(args: argparse.Namespace) -> None:
    """Print a line for each number of sessions, with flow control and without."""
    all_of_them = list(agents(args.trace, args.turns or 1 << 30, args.think))
    settings: dict[str, Any] = {"workers": 1, "router": "round-robin", "block_size": 64, "num_gpu_blocks": args.blocks}
    if args.uncached:
        settings["enable_prefix_caching"] = False
    if args.slots:
        settings["concurrency"] = args.slots
    if args.mix:
        short = list(short_agents([path for path in args.mix if Path(path).stat().st_size], args.copies, args.think))
        all_of_them = short + all_of_them[: max(map(int, args.sessions.split(","))) - len(short)]
        Random(42).shuffle(all_of_them)
        print(f"{len(short)} of {len(all_of_them)} sessions are of the other traces")
    print(
        "sessions  requests  flow                session mean (s)  change  shortest quarter  TTFT p50  p90 (s)  p99 (s)  "
        "E2E p99  Jain   queue  reused  median s by requests: to 6      12      27    more  CPU s"
    )
    for count in map(int, args.sessions.split(",")):
        rows = [
            replace(row, arrival=round(index / args.rate * SECOND))
            for index, session in enumerate(all_of_them[:count])
            for row in session
        ]
        rows = lengthened(rows, args.long) if args.long else rows
        rows.sort(key=lambda row: row.arrival)
        first = 0.0
        for flow in ("none", *args.flows.split(",")):
            began = time.process_time()
            name, _, options = flow.partition(":")
            control = {} if flow == "none" else {"engine_requests": args.gate, "flow": name}
            if options:
                control["flow_options"] = options
            run = replayed(rows, max_num_seqs=args.sequences, **settings, **control)
            report = run.report
            sessions, held = parts(report)
            mean, ttft = sessions.completion.mean / 1000, report.latency["ttft"]
            first = first or mean
            print(
                f"{count:>8}  {len(rows):>8,}  {flow:<18}  {mean:>16.0f}  {mean / first - 1:>+6.1%}  "
                f"{sessions.sizes[0].service_ms / 1000:>16.0f}  {ttft.p50 / 1000:>8.2f}  {ttft.p90 / 1000:>7.1f}  "
                f"{ttft.p99 / 1000:>7.1f}  "
                f"{report.latency['e2e'].p99 / 1000:>7.0f}  {sessions.jain:.3f}  {held.longest if held else 0:>5}  "
                f"{report.reuse['all'].value:>6.1%}  "
                f"{'':>22}{medians(run.records)}  {time.process_time() - began:>5.1f}",
                flush=True,
            )


class Point(NamedTuple):
    """One router with one flow policy."""

    router: str
    flow: str
    mean_s: float
    jain: float
    rest: str


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both mean session time and Jain's index."""
    return [
        one
        for one in points
        if not any(
            (other.mean_s <= one.mean_s and other.jain >= one.jain)
            and (other.mean_s < one.mean_s or other.jain > one.jain)
            for other in points
        )
    ]


def frontier(args: argparse.Namespace) -> None:
    """Print a table for each number of workers and load."""
    all_of_them = list(agents(args.trace, args.turns or 20, args.think, args.pick))
    for workers in map(int, args.workers.split(",")):
        for load in map(float, args.loads.split(",")):
            concurrency = round(load * PLACES * workers)
            rows = [row for session in all_of_them[: 2 * concurrency] for row in session]
            count = len({row.session for row in rows})
            print(f"{workers} workers, {concurrency} sessions at a time: {len(rows):,} requests of {count} sessions")
            print(
                "   router        flow      session mean (s)  p90 (s)  slowdown  Jain   TTFT mean  p99 (s)  held  reused  moved"
            )
            points = [
                point(rows, router, flow, workers=workers, concurrency=concurrency, num_gpu_blocks=args.blocks)
                for router in args.routers.split(",")
                for flow in args.flows.split(",")
            ]
            best = front(points)
            for one in sorted(points, key=lambda one: one.mean_s):
                star = "*" if one in best else " "
                print(f" {star} {one.router:<12}  {one.flow:<8}  {one.mean_s:>16.1f}  {one.rest}", flush=True)


def point(rows: list[TraceRequest], router: str, flow: str, **settings: Any) -> Point:
    """The figures of one router with one flow policy."""
    name, _, options = flow.partition(":")
    if options:
        settings["flow_options"] = options
    report = replayed(rows, router=router, flow=name, engine_requests=PLACES, block_size=64, **settings).report
    sessions, held = parts(report)
    assert held is not None and sessions.slowdown is not None and sessions.jain is not None
    ttft = report.latency["ttft"]
    return Point(
        router,
        flow,
        sessions.completion.mean / 1000,
        sessions.jain,
        f"{sessions.completion.p90 / 1000:>7.1f}  {sessions.slowdown.mean:>8.2f}  {sessions.jain:.3f}  "
        f"{ttft.mean / 1000:>9.2f}  {ttft.p99 / 1000:>7.2f}  {held.held.value:>4.0%}  {report.reuse['all'].value:>6.1%}  "
        f"{sessions.migrations.value:>5.1%}",
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("burst", "frontier"))
    parser.add_argument("trace")
    parser.add_argument("--sessions", default="50,100,150,200,250")
    parser.add_argument("--rate", type=float, default=10.0, help="sessions that begin per second")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--gate", type=int, default=133)
    parser.add_argument("--uncached", action="store_true", help="burst: an engine without prefix caching")
    parser.add_argument("--mix", nargs="+", default=[], help="burst: traces whose sessions are added")
    parser.add_argument("--copies", type=int, default=1, help="burst: how often each of these")
    parser.add_argument("--long", type=float, default=0.0, help="burst: share of answers of 25,000 tokens")
    parser.add_argument("--slots", type=int, default=0, help="burst: sessions held at a time, instead of all at once")
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--loads", default="1,2", help="sessions at a time, by places of workers")
    parser.add_argument("--routers", default="kv,least-time,sticky,affinity,program")
    parser.add_argument("--flows", default="fifo,las,progress,shortest")
    parser.add_argument("--blocks", type=int, default=65_536, help="blocks of 64 tokens on each device")
    parser.add_argument("--turns", type=int, default=0, help="requests of a session at most; burst: all, frontier: 20")
    parser.add_argument("--think", type=float, default=5.0)
    parser.add_argument("--pick", type=int, choices=(0, 1), default=None, help="every second session only")
    args = parser.parse_args()
    (burst if args.what == "burst" else frontier)(args)


if __name__ == "__main__":
    main()
