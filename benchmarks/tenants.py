"""A tenant with ten times the load of another: what the other one sees alone, and with flow control and quotas or without.

One in eleven conversations of a trace is the quiet tenant's, the others flood the fleet; with ``--hostile`` no prompt of theirs
has anything in common with another, so that all they do is push others out of the cache.

    python benchmarks/tenants.py TRACE [--workers 4] [--speedup 1,2] [--engine-requests 16] [--limit 4000] [--hostile]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from msgspec.structs import replace

import kvyard
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.replay.traces.conversations import conversations

SHARE = 11
FAIR: dict[str, Any] = {"flow": "fair", "cache_quota": "borrowed"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("alone", {}),
    ("nothing", {}),
    ("fair", {"flow": "fair"}),
    ("borrowed", {"cache_quota": "borrowed"}),
    ("fair, borrowed", {"flow": "fair", "cache_quota": "borrowed"}),
    ("fair, hard", {"flow": "fair", "cache_quota": "hard", "tenant_quotas": "*=0.5"}),
    ("fair, isolated", {"flow": "fair", "cache_quota": "isolated", "tenant_quotas": "*=0.5"}),
    ("fair, borrowed, capped", FAIR | {"tenant_requests": 0.5}),
    ("fair, borrowed, two each", FAIR | {"tenant_requests": 2}),
    ("greedy 2", FAIR | {"greedy_requests": 2}),
    ("greedy 1", FAIR | {"greedy_requests": 1}),
    ("and quiet first", FAIR | {"tenant_requests": 0.5, "scheduling_policy": "priority"}),
)
"""A cap below 1 is a share of all places, here that of the cache; above, it is for each worker. In the last case engines run
the quiet tenant's requests first."""


def owned(rows: Sequence[TraceRequest], hostile: bool, first: bool) -> list[TraceRequest]:
    """``rows`` with a tenant each, by conversation; ``first``: with a priority that engines heed."""
    made: list[TraceRequest] = []
    for row, name in zip(rows, conversations(rows), strict=True):
        quiet = not crc32(name.encode()) % SHARE
        row = replace(row, tenant="quiet" if quiet else "flood", priority=int(first and not quiet))
        made.append(replace(row, ids=None, tokens=None) if hostile and not quiet else row)
    return made


def main() -> None:
    """Print the quiet tenant's latencies in each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--speedup", default="1,2")
    parser.add_argument("--engine-requests", type=int, default=16)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--blocks", default="8192", help="blocks of 64 tokens on each device")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--host-blocks", default="0")
    parser.add_argument("--router", default="kv")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--cases", default="", help="those to run, as 'nothing;greedy 2'; alone always")
    args = parser.parse_args()
    rows = list(open_trace(args.trace, limit=args.limit))
    print("speedup  case                   quiet: TTFT mean  p99 (s)  of alone  E2E p99 (s)  waited (s)  reused  of cache  "
          "lost (ktokens)   flood: TTFT p99 (s)  reused   CPU s")  # fmt: skip
    for speedup in args.speedup.split(","):
        alone = 0.0
        for case, settings in CASES:
            if args.cases and case not in ("alone", *args.cases.split(";")):
                continue
            began = time.process_time()
            if "tenant_requests" in settings:
                cap = settings["tenant_requests"] * (1 if settings["tenant_requests"] > 1 else args.engine_requests)
                settings = settings | {"tenant_requests": int(args.workers * cap)}
            requests = owned(rows, args.hostile, case.endswith("first"))
            report = kvyard.replay(
                [row for row in requests if row.tenant == "quiet"] if case == "alone" else requests,
                workers=args.workers,
                router=args.router,
                speedup=speedup,
                engine_requests=args.engine_requests,
                num_gpu_blocks=args.blocks,
                max_num_batched_tokens=args.batched_tokens,
                host_blocks=args.host_blocks,
                **settings,
            ).report
            assert isinstance(report.tenants, dict) and isinstance(report.cache_time, dict)
            one, other = report.tenants["quiet"], report.tenants.get("flood")
            alone = alone or one.ttft.p99
            pool = sum(tier.pool_token_s for tier in report.cache_time.values())
            flood = f"{other.ttft.p99 / 1000:>19.2f}  {other.reused.value:>6.1%}" if other is not None else f"{'':>27}"
            print(
                f"{speedup:>7}  {case:<21}  {one.ttft.mean / 1000:>16.2f}  {one.ttft.p99 / 1000:>7.2f}  "
                f"{one.ttft.p99 / alone:>7.2f}x  {one.e2e.p99 / 1000:>11.2f}  {one.waited_ms / 1000:>10.2f}  "
                f"{one.reused.value:>6.1%}  {sum(one.resident_token_s.values()) / pool:>8.1%}  "
                f"{sum(one.lost_tokens.values()) / 1000:>14,.0f}   {flood}  {time.process_time() - began:>6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
