"""A tenant with ten times the load of another: what the other one sees alone, first come first served, and with fair queueing.

Every eleventh request of a trace is the quiet tenant's, the others flood the fleet.

    python benchmarks/tenants.py TRACE [--workers 4] [--speedup 2] [--engine-requests 16] [--limit 4000]
"""

from __future__ import annotations

import argparse

from msgspec.structs import replace

import kvyard
from kvyard.replay.traces import open_trace

SHARE = 11


def main() -> None:
    """Print the quiet tenant's latencies in each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--speedup", default="2")
    parser.add_argument("--engine-requests", type=int, default=16)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--router", default="kv")
    args = parser.parse_args()
    rows = [
        replace(row, tenant="flood" if at % SHARE else "quiet")
        for at, row in enumerate(open_trace(args.trace, limit=args.limit))
    ]
    quiet = [row for row in rows if row.tenant == "quiet"]
    print("case                  quiet: TTFT mean  p99 (s)  E2E p99 (s)  waited (s)  reused   flood: TTFT p99 (s)")
    for case, chosen, settings in (
        ("alone", quiet, {}),
        ("fifo", rows, {}),
        ("fair", rows, {"flow": "fair"}),
        ("fair, quiet weighs 4", rows, {"flow": "fair", "tenant_weights": "quiet=4"}),
    ):
        report = kvyard.replay(
            chosen,
            workers=args.workers,
            router=args.router,
            speedup=args.speedup,
            engine_requests=args.engine_requests,
            **settings,
        ).report
        assert isinstance(report.tenants, dict)
        one, other = report.tenants["quiet"], report.tenants.get("flood")
        flood = f"{other.ttft.p99 / 1000:.2f}" if other is not None else "-"
        print(
            f"{case:<20}  {one.ttft.mean / 1000:>16.2f}  {one.ttft.p99 / 1000:>7.2f}  {one.e2e.p99 / 1000:>11.2f}  "
            f"{one.waited_ms / 1000:>10.2f}  {one.reused.value:>6.1%}   {flood:>19}",
            flush=True,
        )


if __name__ == "__main__":
    main()
