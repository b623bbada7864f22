"""The block manager at work on a real trace: how many prompt blocks it finds cached, over time, by capacity.

    python examples/demo_blocks.py [--blocks 10000]

Replays 12,031 requests of the Mooncake conversation trace, one after another, through pools of different size. Nothing is
simulated but the cache: no engine, no time. For those see demo.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.hashing import TraceChain

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz"
BLOCK = 512
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, 200_000)
PUBLISHED = {1_000: 0.0445, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637}
"""Shares for the same trace by a plain LRU over block ids; see the closing note."""
BARS = " ▁▂▃▄▅▆▇█"
NOTE = """Share = prompt blocks found cached / all prompt blocks, partial ones included; the curve's full height is 50 %.

"plain LRU" is what the trace's notes give for an LRU over block ids. Its rules differ a little. It touches a prompt from
front to back, so heads are evicted first; vLLM's order, which is ours, gives blocks back last first, so tails are. It finds
partial last blocks again, which no engine can, and it evicts from a request that still runs, which none may."""


class Row(NamedTuple):
    minute: int
    input_length: int
    hash_ids: list[int]


class Share(NamedTuple):
    """Hit blocks of all prompt blocks: in total, and minute by minute."""

    hits: int
    blocks: int
    by_minute: list[float]


def read(path: Path) -> Iterator[Row]:
    with lzma.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            yield Row(row["timestamp"] // 60_000, row["input_length"], row["hash_ids"])


def replay(rows: list[Row], capacity: int) -> Share:
    """Admit and release every request in turn; count the prompt blocks that were cached."""
    manager = BlockManager(capacity + 1, [GroupSpec(block_size=BLOCK)])  # one block is the null block
    minutes = [[0, 0] for _ in range(rows[-1].minute + 1)]
    for number, row in enumerate(rows):
        request = Request(str(number), TraceChain(row.hash_ids, BLOCK, row.input_length, BLOCK, own=number))
        hit = manager.lookup(request)
        minutes[row.minute][1] += len(row.hash_ids)
        if manager.allocate(request, row.input_length - hit.tokens, hit) is not None:
            minutes[row.minute][0] += hit.tokens // BLOCK
            manager.free(request)
    manager.check_integrity()
    hits, blocks = (sum(column) for column in zip(*minutes, strict=True))
    return Share(hits, blocks, [hit / max(1, total) for hit, total in minutes])


def spark(values: list[float], width: int = 20) -> str:
    """A small curve of the values, scaled to one half."""
    step = max(1, -(-len(values) // width))
    means = [sum(values[at : at + step]) / len(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(BARS[min(len(BARS) - 1, round(mean / 0.5 * (len(BARS) - 1)))] for mean in means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=CAPACITIES, help="capacities, in blocks of 512 tokens")
    capacities = parser.parse_args().blocks
    if min(capacities) < 1:
        parser.error("a capacity is at least 1 block")
    console = Console()
    rows = list(read(TRACE))
    console.print(f"[bold]{len(rows):,} requests[/bold] of the Mooncake conversation trace, blocks of {BLOCK} tokens\n")
    table = Table(box=None, pad_edge=False)
    for title, align in (("capacity", "right"), ("hit blocks", "right"), ("of blocks", "right"), ("share", "right")):
        table.add_column(title, justify=align)  # type: ignore[arg-type]
    table.add_column("plain LRU", justify="right")
    table.add_column("over the hour")
    began = time.process_time()
    for capacity in track(capacities, description="replaying", console=console, transient=True):
        share = replay(rows, capacity)
        known = PUBLISHED.get(capacity)
        table.add_row(
            f"{capacity:,}",
            f"{share.hits:,}",
            f"{share.blocks:,}",
            f"{share.hits / share.blocks:.4f}",
            f"{known:.4f}" if known else "",
            spark(share.by_minute),
        )
    spent = time.process_time() - began
    console.print(table)
    console.print(f"\n{len(capacities) * len(rows):,} admissions in {spent:.1f} s of CPU.\n")
    console.print(NOTE, soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
