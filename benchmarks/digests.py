"""What it costs a router to know caches by digests: stale by up to T, and wrong about a share p of blocks.

    .venv/bin/python benchmarks/digests.py [--router least-time] [--limit 6000] [--points 0,0/0.01,0/0,10/0.01,10,10]

The Mooncake conversation trace on 8 workers of 16,384 blocks of 64 tokens, replayed. A point is p,T or p,T,seconds: the last is
how long the router believes in what it sent by itself (``predicted_ttl_s``, 2 s where it isn't said). Bytes are those of a full
worker's digest as it would be sent, by the blocks it holds.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from kvyard.index.digests import encode, fingerprint, span_of
from kvyard.replay import replay

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
BLOCKS = 16_384
POINTS = (
    "0,0/0.001,0/0.01,0/0.05,0/0.1,0/0,1/0,10/0,60/0,10,10/0,60,60/0.01,10,10/0.1,10,10/0,300/0,300,300/0.1,60,60/0.5,0"
)


def size(error: float) -> float:
    """Bytes a block of a full worker's digest."""
    span, rng = span_of(BLOCKS, error), random.Random(0)
    return len(encode([fingerprint(rng.getrandbits(64), span) for _ in range(BLOCKS)], span)) / BLOCKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="least-time")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--points", default=POINTS)
    given = parser.parse_args()
    print(
        f"{'p':>7}{'T, s':>7}{'believed, s':>13}{'bytes/block':>13}{'reuse':>9}{'TTFT ms':>9}{'p99':>9}{'ITL p99':>9}"
        f"{'believed found':>16}{'CPU s':>7}"
    )
    for point in given.points.split("/"):
        error, every, *believed = (float(part) for part in point.split(","))
        before = time.process_time()
        report = replay(
            DATA,
            workers=given.workers,
            router=given.router,
            limit=given.limit,
            digest_error=error,
            digest_every=f"{every:g}s",
            predicted_ttl_s=believed[0] if believed else 2.0,
        ).report
        ttft, itl = report.latency["ttft"], report.latency["itl"]
        found = report.router.belief.value if report.router is not None else 0.0
        print(
            f"{error:>7.1%}{every:>7g}{believed[0] if believed else 2.0:>13g}{size(error) if error else 8.0:>13.2f}"
            f"{report.reuse['all'].value:>9.2%}{ttft.mean:>9.1f}{ttft.p99:>9.0f}{itl.p99:>9.2f}"
            f"{found:>16.2%}{time.process_time() - before:>7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
