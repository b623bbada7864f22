"""Error ranges by class of run, from published measurements that nothing was fitted to.

    python benchmarks/published_errors.py             # write the data file and RESULTS-ranges.md, print the coverage
    python benchmarks/published_errors.py --coverage  # print the coverage alone

Reads ``results.jsonl`` and ``silicon.jsonl`` in ``benchmarks/data/published`` (``published.py`` and ``silicon.py`` write them),
and takes the cells of half ``test``. A cell counts in each family (throughput, TTFT, TPOT, E2E) with its most central figure
and with its tail (p90 or beyond).

A class is a prefix of (load, kind of model, engine, type of weights, card), and has a range if it has ``CELLS`` cells and not
all of the next wider class. The range is between two quantiles of measured / predicted over the class's sources, each of which
counts the same, however many cells it has, beside the next wider class, which counts as ``WIDER`` sources: a class that few
measured is mostly what the wider one is. A reader's fleet is a source that nobody has published: the quantiles are those at
which, for a figure and load, ranges hold 80 % of the cells whose own source is left out, or else as wide as they can be while
they hold 90 % with it. The coverage is told both ways.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvyard.engine.timing.error_range import (
    LEVEL,
    PublishedErrors,
    PublishedOrder,
    PublishedRange,
    class_words,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "data" / "published" / "results.jsonl"
SILICON = RESULTS.with_name("silicon.jsonl")
DATA = HERE.parent / "src" / "kvyard" / "engine" / "timing" / "published_errors.json"
PAGE = HERE / "RESULTS-ranges.md"
CELLS = 8
WIDER = 4
"""Sources that the next wider class counts as. With fewer, ranges hold less of a source that is left out (64 % with 1); with
more, classes differ more in how often theirs hold (26 of 48 hold 70 to 90 % with 12, 34 with 4)."""
EDGES = tuple(edge / 100 for edge in range(15, 1, -1))
"""Shares below a range, and above it, that are tried, from narrow ranges to wide ones."""
MOST_HELD = 0.9
PAIRS = 12
"""Pairs of arms below which nothing is said of order."""
RIGHT = 0.9
FAMILIES = {
    "throughput": ("output_tok_s", "throughput_tok_s", "req_s", "turns_s"),
    "ttft": ("ttft_", "prefill_ms"),
    "tpot": ("tpot_", "itl_", "ntpot_"),
    "e2e": ("e2e_",),
}
RANKS = ("mean", "p50", "p90", "p95", "p99")
TAIL = RANKS.index("p90")
SHOWN = {"ttft": "TTFT", "tpot": "TPOT, ITL", "e2e": "E2E", "throughput": "throughput"}


class Cell(NamedTuple):
    """One published figure beside ours."""

    source: str
    metric: str
    statistic: str
    of: tuple[str, ...]
    error: float
    """Logarithm of measured / predicted."""


def read_rows(path: Path = RESULTS) -> list[dict[str, Any]]:
    """Rows of half ``test`` that have figures."""
    rows = [json.loads(line) for one in (path, SILICON) for line in one.read_text().splitlines()]
    return [row for row in rows if row["half"] == "test" and row.get("metrics")]


def cells_of(rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The most central figure and the tail of each family of each row."""
    found = []
    for row in rows:
        of = (row["knee"], row["class"], row["engine"], row["dtype"], row["card"])
        for metric, statistic, _, (theirs, ours, resolution) in _figures(row):
            found.append(Cell(row["source"], metric, statistic, of, _error(theirs, ours, resolution)))
    return found


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str, tuple[float, float, float]]]:
    best: dict[tuple[str, str], tuple[int, str]] = {}
    for column in row["metrics"]:
        metric = next((name for name, heads in FAMILIES.items() if column.startswith(heads)), None)
        if metric is None:
            continue
        rank = next((at for at, name in enumerate(RANKS) if f"_{name}_" in column), 0)
        key = metric, "tail" if rank >= TAIL else "central"
        best[key] = min(best.get(key, (rank, column)), (rank, column))
    for (metric, statistic), (_, column) in best.items():
        yield metric, statistic, column, row["metrics"][column]


def _error(theirs: float, ours: float, resolution: float) -> float:
    return 0.0 if abs(ours - theirs) <= resolution / 2 else log(theirs / max(ours, 1e-9))


Points = list[tuple[float, float]]
"""Errors with their weights."""


def weighted(cells: Sequence[Cell]) -> Points:
    """Return the errors, each source counting the same."""
    count = Counter(cell.source for cell in cells)
    return [(cell.error, 1 / count[cell.source]) for cell in cells]


def quantiles(points: Points, shares: Sequence[float]) -> list[float]:
    """Return weighted quantiles, linear between points."""
    errors, weights = np.array(sorted(points)).T
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    return [float(np.interp(share, middles, errors)) for share in shares]


Ranges = dict[tuple[str, ...], tuple[float, float, float]]


def ranges_of(cells: Sequence[Cell], edge: float) -> Ranges:
    """By class, the logarithms of low, median and high, of cells of one metric, statistic and load. ``edge`` is the share
    below the range, and above it.
    """
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        for length in range(1, len(cell.of) + 1):
            groups[cell.of[:length]].append(cell)
    points: dict[tuple[str, ...], Points] = {}
    ranges: Ranges = {}
    for of, some in sorted(groups.items(), key=lambda item: len(item[0])):
        above = next((of[:length] for length in range(len(of) - 1, 0, -1) if of[:length] in points), None)
        if len(some) < CELLS or (above is not None and len(some) == len(groups[above])):
            continue
        wider = points[above] if above is not None else []
        share = WIDER / sum(weight for _, weight in wider) if wider else 0.0
        points[of] = weighted(some) + [(error, weight * share) for error, weight in wider]
        low, middle, high = quantiles(points[of], (edge, 0.5, 1 - edge))
        ranges[of] = low, middle, high
    return ranges


def held(cell: Cell, ranges: Ranges) -> bool | None:
    """Whether the cell lies in the range of its finest class; ``None`` where there is none."""
    for length in range(len(cell.of), 0, -1):
        found = ranges.get(cell.of[:length])
        if found is not None:
            return found[0] - 1e-9 <= cell.error <= found[2] + 1e-9
    return None


def edge_of(cells: Sequence[Cell]) -> float:
    """The edge of the narrowest ranges that hold ``LEVEL`` of the cells with their own source left out, or of the widest that
    hold at most ``MOST_HELD`` with it.
    """
    chosen = EDGES[0]
    for edge in EDGES:
        ranges = ranges_of(cells, edge)
        inside = [is_in for cell in cells if (is_in := held(cell, ranges)) is not None]
        if sum(inside) > MOST_HELD * len(inside):
            break
        chosen, left_out = edge, unseen(cells, edge)
        if left_out and sum(is_in for _, is_in in left_out) >= LEVEL * len(left_out):
            break
    return chosen


def unseen(cells: Sequence[Cell], edge: float) -> list[tuple[Cell, bool]]:
    """Of each cell whether the ranges that the other sources alone give hold it, as far as they have one."""
    found = []
    for source in sorted({cell.source for cell in cells}):
        ranges = ranges_of([cell for cell in cells if cell.source != source], edge)
        for cell in cells:
            if cell.source == source and (inside := held(cell, ranges)) is not None:
                found.append((cell, inside))
    return found


def parts(cells: Iterable[Cell]) -> dict[tuple[str, str, str], list[Cell]]:
    """Cells by metric, statistic and load."""
    found: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.metric, cell.statistic, cell.of[0]].append(cell)
    return dict(sorted(found.items()))


def distil(rows: Sequence[Mapping[str, Any]]) -> PublishedErrors:
    """The package's data."""
    ranges = []
    for (metric, statistic, _), cells in parts(cells_of(rows)).items():
        for of, (low, middle, high) in sorted(ranges_of(cells, edge_of(cells)).items()):
            mine = [cell for cell in cells if cell.of[: len(of)] == of]
            ranges.append(
                PublishedRange(
                    metric=metric,
                    statistic=statistic,
                    of=of,
                    low=_three(exp(low)),
                    median=_three(exp(middle)),
                    high=_three(exp(high)),
                    runs=len(mine),
                    sources=tuple(sorted({cell.source for cell in mine})),
                )
            )
    return PublishedErrors(ranges=tuple(ranges), order=tuple(_order(rows)))


def _order(rows: Sequence[Mapping[str, Any]]) -> Iterator[PublishedOrder]:
    """By metric and load, how far ratios of two arms of one table are off."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if not row["source"].startswith("silicon"):  # those differ in cards and splits
            groups[row["source"], row["load"]].append(row)
    pairs: dict[tuple[str, str], list[tuple[str, float, float]]] = defaultdict(list)
    for (source, _), same_load in sorted(groups.items()):
        for one, other in combinations(same_load, 2):
            figures = {
                (metric, column): (one["metrics"][column], other["metrics"][column])
                for metric, statistic, column, _ in _figures(one)
                if statistic == "central" and column in other["metrics"]
            }
            for (metric, _), ((theirs, ours, _), (theirs_other, ours_other, _)) in figures.items():
                load = "above" if "above" in (one["knee"], other["knee"]) else "below"
                pairs[metric, load].append((source, log(theirs / theirs_other), log(ours / ours_other)))
    for (metric, load), found in sorted(pairs.items()):
        if len(found) < PAIRS:
            continue
        off = sorted(abs(theirs - ours) for _, theirs, ours in found)
        yield PublishedOrder(
            metric=metric,
            load=load,
            factor=_three(exp(float(np.quantile(off, LEVEL)))),
            safe=_three(exp(_safe(found))),
            pairs=len(found),
            sources=tuple(sorted({source for source, *_ in found})),
        )


def _safe(pairs: Sequence[tuple[str, float, float]]) -> float:
    """The least difference of ours from which on ``RIGHT`` of the pairs are in the measured order."""
    ordered = sorted(((abs(ours), theirs * ours > 0) for _, theirs, ours in pairs), reverse=True)
    safe, right = ordered[0][0], 0
    for count, (difference, agrees) in enumerate(ordered, 1):
        right += agrees
        if right >= RIGHT * count:
            safe = difference
    return safe


def coverage(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of how often ranges hold the measured value: made from all sources, and without the cell's own."""
    lines = ["| metric | runs | cells | in the range | source left out |", "|---|---|---|---|---|"]
    inside: list[bool] = []
    left_out: list[bool] = []
    for (metric, statistic, load), cells in parts(cells_of(rows)).items():
        edge = edge_of(cells)
        ranges, without = ranges_of(cells, edge), unseen(cells, edge)
        title = SHOWN[metric] + (" (tail)" if statistic == "tail" else "")
        for some in [(), *sorted({cell.of[1:3] for cell in cells})]:
            mine = [cell for cell in cells if not some or cell.of[1:3] == some]
            known = [is_in for cell in mine if (is_in := held(cell, ranges)) is not None]
            left = [is_in for cell, is_in in without if not some or cell.of[1:3] == some]
            words = class_words((load, *some)) if some else f"**all, {load} the knee**"
            if some and len({cell.source for cell in mine}) == 1:
                words += " (one source)"
            lines.append(f"| {title} | {words} | {len(mine)} | {_share(known)} | {_share(left)} |")
            if not some:
                inside, left_out = inside + known, left_out + left
    return "\n".join([*lines, f"| **all** |  | {len(inside)} | {_share(inside)} | {_share(left_out)} |"])


def _share(held: Sequence[bool]) -> str:
    return f"{sum(held) / len(held):.0%} of {len(held)}" if held else "no range"


def _three(value: float) -> float:
    return float(f"{value:.3g}")


TABLES = """# Errors of predictions by class of run

<!-- written by benchmarks/published_errors.py -->

Index: [RESULTS.md](RESULTS.md). How a report uses them: [how sure a prediction is](../docs/explain/how-sure.md).
Measured / predicted of {runs} published measurements that no constant was fitted to, replayed by `benchmarks/published.py` and
`benchmarks/silicon.py`. A class has {cells} runs or more, and fewer than the next wider one. Its range is of measured /
predicted over its sources, each of which counts the same, beside the wider class, which counts as {wider} sources. Where
100 ms were predicted, a range of 0.8–1.5 means 80 to 150 ms measured. For each figure and load, ranges are as wide as it takes
to hold 80 % of the runs whose own source is left out, unless they would then hold more than 90 % with it.

Sources: {sources}.

## Ranges by class

| figure | class | range | median | runs | sources |
|---|---|---|---|---|---|
{ranges}

## The order of two choices

| figure | load | order is safe beyond | 80 % of ratios within | pairs | sources |
|---|---|---|---|---|---|
{order}

## Do the ranges hold?

Share of the published cells whose measured value lies in the stated range: with the range made from all sources, and with
ranges and classes made without the cell's own source, as for a fleet that nobody has published. A class of one source is then
what the wider class is.

{coverage}
"""


def tables(errors: PublishedErrors, rows: Sequence[Mapping[str, Any]]) -> str:
    """``benchmarks/RESULTS-ranges.md``."""
    ranges = [
        (
            SHOWN[one.metric] + (", p90 and beyond" if one.statistic == "tail" else ""),
            class_words(one.of),
            f"{one.low:g}–{one.high:g}",
            f"{one.median:g}",
            str(one.runs),
            str(len(one.sources)),
        )
        for one in errors.ranges
    ]
    order = [
        (
            SHOWN[pair.metric],
            f"{pair.load} the knee",
            f"{pair.safe:g}×",
            f"{pair.factor:g}×",
            str(pair.pairs),
            str(len(pair.sources)),
        )
        for pair in errors.order
    ]
    return TABLES.format(
        runs=len(rows),
        cells=CELLS,
        wider=WIDER,
        sources=", ".join(sorted({row["source"] for row in rows})),
        ranges="\n".join(f"| {' | '.join(line)} |" for line in ranges),
        order="\n".join(f"| {' | '.join(line)} |" for line in order),
        coverage=coverage(rows),
    )


def write(results: Path = RESULTS) -> None:
    """Write the package's data file and the tables from the results."""
    rows = read_rows(results)
    errors = distil(rows)
    DATA.write_bytes(msgspec.json.format(msgspec.json.encode(errors), indent=1) + b"\n")
    PAGE.write_text(tables(errors, rows))


def main() -> None:
    """Write the files and print the coverage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", action="store_true", help="print the coverage, and write nothing")
    if not parser.parse_args().coverage:
        write()
    print(coverage(read_rows()))


if __name__ == "__main__":
    main()
