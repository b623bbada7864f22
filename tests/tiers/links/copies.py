"""Measured copies, and what a link says of them. Run it to print the tables of benchmarks/RESULTS-accuracy.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvyard.tiers.links import PRESETS, Direction, LinkConfig, make_link

HERE = Path(__file__).parent
WAYS = {"d2h": Direction.OUT, "h2d": Direction.IN}
H200 = PRESETS["h200"]
LANES = msgspec.structs.replace(H200, discipline="fifo", duplex_bandwidth=None)
"""The best that lanes can do with the constants of the preset."""


class Measured(NamedTuple):
    jobs: list[tuple[str, int]]
    ms: list[float]
    block: int = 2 << 20
    gated: bool = False

    @property
    def kind(self) -> str:
        ways = [way for way, _ in self.jobs]
        if len(ways) == 1:
            return "single"
        return "opposite" if len(set(ways)) == len(ways) else "mix"

    def predict(self, config: LinkConfig) -> list[float]:
        """When each job lands, in milliseconds, if all are submitted at once."""
        link = make_link(config)
        made = [link.submit(0, WAYS[way], n * self.block, pieces=n) for way, n in self.jobs]
        while (then := link.earliest()) is not None:
            link.advance(then)
        return [transfer.ended / 1e6 for transfer in made if transfer.ended is not None]


def load(name: str) -> list[Measured]:
    rows = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return [Measured(row["jobs"], row["ms"], row.get("block", 2 << 20), row.get("gated", False)) for row in rows]


def table() -> list[str]:
    """A row for each job: measured, and what both disciplines say."""
    rows = ["| jobs | job | measured, ms | `fair`, ms | | `fifo`, ms | |", "|---|---|--:|--:|--:|--:|--:|"]
    for row in load("h200_copies.jsonl"):
        jobs = [f"{way} {n}" for way, n in row.jobs]
        for job, ms, fair, fifo in zip(jobs, row.ms, row.predict(H200), row.predict(LANES), strict=False):
            off = [f"{p:.3f} | {100 * (p / ms - 1):+.1f} %" for p in (fair, fifo)]
            rows.append(f"| {' + '.join(jobs)} | {job} | {ms:.3f} | {off[0]} | {off[1]} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
