"""Error ranges by class of run, from published measurements that nothing was fitted to.

    python benchmarks/published_errors.py             # write the data file and RESULTS-ranges.md, print the coverage
    python benchmarks/published_errors.py --coverage  # print the coverage alone

Reads ``results.jsonl`` and ``silicon.jsonl`` in ``benchmarks/data/published`` (``published.py`` and ``silicon.py`` write them),
and takes the cells of half ``test``. A cell counts in each family (throughput, TTFT, TPOT, E2E) with its most central figure
and with its tail (p90 or beyond).

A class is a prefix of (load, kind of model, engine, type of weights, card). It has a range if it has ``CELLS`` cells of at
least ``SOURCES`` sources, or of the only one that has such a figure at such a load. The range is from the 10 % to the 90 %
quantile of measured / predicted, each source counting the same, however many cells it has, times a factor (``widening``) with
which it holds most cells of a source that is left out. A class whose sources disagree so much that ``WIDEST`` doesn't suffice
has none, and its runs count in the wider class. A kind of model on an engine that one source alone has gets the wider class's
range, if there is one, extended by that source's own.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil, exp, log
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
SOURCES = 2
HELD_OUT, LEAST, MOST = 0.8, 0.7, 0.9
NARROWEST, WIDEST = 0.5, 4.0
"""Factors to which a range is narrowed and widened at most."""
SPREAD = log(1.05)
"""Least width of a side of a range, so that sources that repeat one figure can be compared with others."""
ENGINE = 3
"""Length of a class that ends with the engine."""
EDGES = ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)
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


def quantiles(cells: Sequence[Cell], shares: Sequence[float]) -> list[float]:
    """Quantiles of the errors, each source counting the same."""
    count: dict[str, int] = defaultdict(int)
    for cell in cells:
        count[cell.source] += 1
    ordered = sorted(cells, key=lambda cell: cell.error)
    weights = np.array([1 / count[cell.source] for cell in ordered])
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    return [float(np.interp(share, middles, [cell.error for cell in ordered])) for share in shares]


Ranges = dict[tuple[str, ...], tuple[float, float, float]]


def ranges_of(cells: Sequence[Cell]) -> Ranges:
    """By class, the logarithms of low, median and high, of cells of one metric, statistic and load."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        for length in range(1, len(cell.of) + 1):
            groups[cell.of[:length]].append(cell)
    found: Ranges = {}
    least = min(SOURCES, len({cell.source for cell in cells}))
    for of, some in sorted(groups.items(), key=lambda item: len(item[0])):
        if len(some) < CELLS:
            continue
        sources = len({cell.source for cell in some})
        if sources >= least:
            factor = widening(some)
            if factor is not None:
                low, middle, high = quantiles(some, EDGES)
                found[of] = (
                    middle - factor * max(middle - low, SPREAD),
                    middle,
                    middle + factor * max(high - middle, SPREAD),
                )
        elif len(of) == ENGINE:
            low, middle, high = quantiles(some, EDGES)
            wider = next((found[of[:length]] for length in range(ENGINE - 1, 0, -1) if of[:length] in found), None)
            found[of] = (min(low, wider[0]), middle, max(high, wider[2])) if wider else (low, middle, high)
    return found


def widening(cells: Sequence[Cell]) -> float | None:
    """The factor of a class's width; None if ``WIDEST`` doesn't suffice, 1 for cells of one source.

    It is the least with which ranges of all sources but one hold ``HELD_OUT`` of that one's cells, over all sources; no more
    than what holds ``MOST`` of all cells, unless ``LEAST`` of those left out need it.
    """
    sources = sorted({cell.source for cell in cells})
    if len(sources) == 1:
        return 1.0
    inside = _needed(cells, cells)
    outside: list[float] = []
    for source in sources:
        others = [cell for cell in cells if cell.source != source]
        outside += _needed(others, [cell for cell in cells if cell.source == source])
    wanted = min(_holding(outside, HELD_OUT), _holding(inside, MOST))
    factor = max(NARROWEST, wanted, _holding(outside, LEAST))
    return factor if factor <= WIDEST else None


def _needed(of: Sequence[Cell], cells: Iterable[Cell]) -> list[float]:
    """By cell, the factor with which the range of the first ones reaches it."""
    low, middle, high = quantiles(of, EDGES)
    found = []
    for cell in cells:
        off = cell.error - middle
        width = max(high - middle if off > 0 else middle - low, SPREAD)
        found.append(abs(off) / width)
    return found


def _holding(needed: Sequence[float], share: float) -> float:
    """The least factor that reaches ``share`` of them."""
    return sorted(needed)[max(0, ceil(share * len(needed) - 1e-9) - 1)]


def held(cell: Cell, ranges: Ranges) -> bool | None:
    """Whether the cell lies in the range of its finest class; ``None`` where there is none."""
    for length in range(len(cell.of), 0, -1):
        found = ranges.get(cell.of[:length])
        if found is not None:
            return found[0] - 1e-9 <= cell.error <= found[2] + 1e-9
    return None


def held_out(cells: Sequence[Cell]) -> list[tuple[Cell, bool]]:
    """Of each cell whether its finest class would hold it without its own source, by that class's factor; classes of one source
    are left out.
    """
    classes, found = ranges_of(cells), []
    for cell in cells:
        of = next((cell.of[:length] for length in range(len(cell.of), 0, -1) if cell.of[:length] in classes), None)
        if of is None:
            continue
        mine = [one for one in cells if one.of[: len(of)] == of]
        others = [one for one in mine if one.source != cell.source]
        if others:
            found.append((cell, _needed(others, [cell])[0] <= (widening(mine) or 0.0) + 1e-9))
    return found


def unseen(cells: Sequence[Cell]) -> list[tuple[Cell, bool]]:
    """Of each cell whether the ranges that the other sources alone give hold it, as far as they have one."""
    found = []
    for source in sorted({cell.source for cell in cells}):
        ranges = ranges_of([cell for cell in cells if cell.source != source])
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
        for of, (low, middle, high) in sorted(ranges_of(cells).items()):
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
    lines = [
        "| metric | runs | cells | in the range | source left out | and from the factor |",
        "|---|---|---|---|---|---|",
    ]
    for (metric, statistic, load), cells in parts(cells_of(rows)).items():
        ranges, out, without = ranges_of(cells), held_out(cells), unseen(cells)
        classes = sorted({cell.of[1:3] for cell in cells})
        for some in [(), *classes]:
            mine = [held(cell, ranges) for cell in cells if not some or cell.of[1:3] == some]
            left, never = (
                [inside for cell, inside in cases if not some or cell.of[1:3] == some] for cases in (out, without)
            )
            known = [inside for inside in mine if inside is not None]
            words = class_words((load, *some)) if some else f"**all, {load} the knee**"
            if some and len({cell.source for cell in cells if cell.of[1:3] == some}) == 1:
                words += " (one source)"
            title = SHOWN[metric] + (" (tail)" if statistic == "tail" else "")
            lines.append(f"| {title} | {words} | {len(mine)} | {_share(known)} | {_share(left)} | {_share(never)} |")
    return "\n".join(lines)


def _share(held: Sequence[bool]) -> str:
    return f"{sum(held) / len(held):.0%} of {len(held)}" if held else "no range"


def _three(value: float) -> float:
    return float(f"{value:.3g}")


TABLES = """# Errors of predictions by class of run

<!-- written by benchmarks/published_errors.py -->

Index: [RESULTS.md](RESULTS.md). How a report uses them: [how sure a prediction is](../docs/explain/how-sure.md).
Measured / predicted of {runs} published measurements that no constant was fitted to, replayed by `benchmarks/published.py` and
`benchmarks/silicon.py`. A class has {cells} runs of {least} sources or more. Its range, {narrowest} to {widest} times what its
runs span, is as wide as it takes for a source that is left out to lie in the range of the others in {held_out} of its runs, but
no wider than to hold {most} of all, unless {rest} of those left out need it. Where that doesn't suffice, the wider class stands
for it. A kind of model on an engine that one source alone has gets the wider class's range, extended by that source's own.

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

Share of the published cells whose measured value lies in the stated range: with the range made from all sources; with the
range of its class made without the cell's own source; and with that source left out of the factor and of the choice of classes,
too, as for a fleet that nobody has published. Classes of one source say nothing with it left out.

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
        least=SOURCES,
        held_out=f"{HELD_OUT:.0%}",
        most=f"{MOST:.0%}",
        rest=f"{LEAST:.0%}",
        narrowest=f"{NARROWEST:g}",
        widest=f"{WIDEST:g}",
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
