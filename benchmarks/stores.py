"""Store policies on agent sessions, after LMCache #4499: does host memory pay, by size and policy?

Weka's sessions whose first prompt has at most 40,000 tokens, ``--turns`` requests of each at most, ``--slots`` sessions at a
time on one worker, ``--think`` seconds from an answer to the next request. Changes are against no host memory at all.

    python benchmarks/stores.py TRACE [--gib 10,20,40] [--stores write_through,lazy]
"""

from __future__ import annotations

import argparse
import time

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
    parser.add_argument("--bytes-per-token", default="36KiB")
    args = parser.parse_args()
    rows = agents(args.trace, args.turns, args.think, args.limit)
    tokens = sum(row.input_length for row in rows) / len(rows)
    print(f"{len(rows):,} requests of {len({row.session for row in rows})} sessions, {tokens:,.0f} tokens a prompt")
    print(
        "host (GiB)  store          coverage  host hit  TTFT (ms)  change  decode (ms)  change  E2E (ms)  change    CPU"
    )

    def measure(gib: str, store: str, base: Report | None) -> Report:
        began = time.process_time()
        report = replay(
            rows,
            workers=1,
            router="round-robin",
            block_size=64,
            num_gpu_blocks=args.blocks,
            bytes_per_token=args.bytes_per_token,
            concurrency=args.slots,
            host_bytes=f"{gib}GiB",
            store=store,
        ).report
        ttft, e2e = report.latency["ttft"].mean, report.latency["e2e"].mean
        of = base or report
        first, whole = of.latency["ttft"].mean, of.latency["e2e"].mean
        device, coverage = report.reuse["device"], report.reuse["all"].value
        host_hit = report.reuse["host"].part / max(1, device.whole - device.part)
        print(
            f"{gib:>10}  {store:<13}  {coverage:>8.3f}  {host_hit:>8.3f}  "
            f"{ttft:>9.0f}  {ttft - first:>+6.0f}  {e2e - ttft:>11.0f}  {e2e - ttft - whole + first:>+6.0f}  {e2e:>8.0f}  "
            f"{e2e - whole:>+6.0f}  {time.process_time() - began:>5.1f}",
            flush=True,
        )
        return report

    base = measure(args.gib.split(",")[0], "none", None)
    for gib in args.gib.split(","):
        for store in args.stores.split(","):
            measure(gib, store, base)


if __name__ == "__main__":
    main()
