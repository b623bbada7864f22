"""Store policies on agent sessions, after LMCache #4499: does host memory pay, by size and policy?

Sessions whose first prompt has at most 40,000 tokens, ``--turns`` requests of each at most, ``--slots`` sessions at a time on
one worker, ``--think`` seconds from an answer to the next request. Changes are against no host memory at all. With ``--waits
off,on`` passes that wait for their stores (``wait_for_save``) are replayed beside passes that don't.

    python benchmarks/stores.py TRACE [--gib 10,20,40] [--stores write_through,lazy] [--waits off,on] [--set model=qwen3-8b ...]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from msgspec.structs import replace

from kvyard.clock import SECOND
from kvyard.replay.report.report import Report
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest, open_trace

FIRST = 40_000
LAST = 100_000


def agents(trace: str, turns: int, think_s: float, limit: int) -> list[TraceRequest]:
    """Rows of the sessions, one session after the other."""
    found: dict[str, list[TraceRequest]] = {}
    for row in open_trace(trace):
        if row.session is not None and row.root is None and len(found.setdefault(row.session, [])) < turns:
            found[row.session].append(row)
    rows = []
    for name in sorted(found):
        own = found[name]
        if len(own) > 3 and own[0].input_length <= FIRST and own[-1].input_length <= LAST:
            rows += [
                replace(row, delay=round(think_s * SECOND) if index else None, after=())
                for index, row in enumerate(own)
            ]
    return rows[:limit]


def paced(rows: list[TraceRequest], slots: int, rate: float) -> list[TraceRequest]:
    """``rows`` as ``slots`` clients that take turns, ``rate`` requests a second in all; each has one session after another."""
    sessions: dict[str | None, list[TraceRequest]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    queue, made = list(sessions.values()), []
    busy: list[list[TraceRequest]] = [[] for _ in range(slots)]
    for turn in range(len(rows) * slots):
        own = busy[turn % slots]
        if not own and queue:
            own += queue.pop(0)
        if own:
            made.append(replace(own.pop(0), arrival=round(turn / rate * SECOND), delay=None))
    return made


def main() -> None:
    """Print a line for each size and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--gib", default="40,20,10")
    parser.add_argument("--stores", default="write_through,on_eviction,lazy,exclusive")
    parser.add_argument("--slots", type=int, default=14)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--think", type=float, default=20.0)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=8000, help="blocks of 64 tokens on the device")
    parser.add_argument("--rate", type=float, help="requests a second, slots in turn, instead of a closed loop")
    parser.add_argument("--waits", default="off", help="passes that wait for their stores: off, on or both")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the replay")
    args = parser.parse_args()
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in args.set) or {"bytes_per_token": "36KiB"}
    rows = agents(args.trace, args.turns, args.think, args.limit)
    load: dict[str, Any] = {"concurrency": args.slots}
    if args.rate:
        rows, load = paced(rows, args.slots, args.rate), {}
    tokens = sum(row.input_length for row in rows) / len(rows)
    print(f"{len(rows):,} requests of {len({row.session for row in rows})} sessions, {tokens:,.0f} tokens a prompt")
    print(
        "host (GiB)  store          waits  coverage  host hit  TTFT (ms)  change  decode (ms)  change  E2E (ms)  change    CPU"
    )

    def measure(gib: str, store: str, waits: str, base: Report | None) -> Report:
        began = time.process_time()
        report = replay(
            rows,
            workers=1,
            router="round-robin",
            block_size=64,
            num_gpu_blocks=args.blocks,
            host_bytes=f"{gib}GiB",
            store=store,
            **({"wait_for_save": True} if waits == "on" else {}),
            **load,
            **settings,
        ).report
        ttft, e2e = report.latency["ttft"].mean, report.latency["e2e"].mean
        of = base or report
        first, whole = of.latency["ttft"].mean, of.latency["e2e"].mean
        device, coverage = report.reuse["device"], report.reuse["all"].value
        host_hit = report.reuse["host"].part / max(1, device.whole - device.part)
        print(
            f"{gib:>10}  {store:<13}  {waits:<5}  {coverage:>8.3f}  {host_hit:>8.3f}  "
            f"{ttft:>9.0f}  {ttft - first:>+6.0f}  {e2e - ttft:>11.0f}  {e2e - ttft - whole + first:>+6.0f}  {e2e:>8.0f}  "
            f"{e2e - whole:>+6.0f}  {time.process_time() - began:>5.1f}",
            flush=True,
        )
        return report

    base = measure(args.gib.split(",")[0], "none", "", None)
    for gib in args.gib.split(","):
        for store in args.stores.split(","):
            for waits in args.waits.split(","):
                measure(gib, store, waits, base)


if __name__ == "__main__":
    main()
