"""ServeGen's clients (Alibaba): how arrivals and lengths of each client are spread. Requests are drawn from that.

A directory has two files a client. ``chunk-N-trace.csv`` says for each window of time how many requests came in a second, and
by which law: window start in seconds, rate, variation of gaps, family, shape, scale. ``chunk-N-dataset.json`` has tables of
lengths, for longer windows. Gaps are drawn by family and shape, with the mean that the rate asks for; lengths independently of
each other. The same directory gives the same requests each time. Nothing is known of what prompts share.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from kvyard.clock import SECOND
from kvyard.replay.traces.errors import UNREADABLE, BadRow, TraceError
from kvyard.replay.traces.files import whole
from kvyard.replay.traces.reading import Reading
from kvyard.replay.traces.registry import Format, Head
from kvyard.replay.traces.request import TraceRequest

TRACE, DATASET = "-trace.csv", "-dataset.json"
WINDOW = 600
"""Seconds of the last window, and of an only one."""
DRAWN = ("_tokens", "_count")
OF_KINDS = ("image", "audio", "video")
FAMILIES = ("", "Gamma", "Weibull", "Exponential")
_PAIR = re.compile(r"(\d+): ([-+.\deE]+)")

LengthTables = dict[str, tuple[list[int], list[float]]]
"""By name: the lengths, and the running sums of their probabilities."""


class RateWindow(NamedTuple):
    """Window of time of one client."""

    start: float
    end: float
    rate: float
    family: str
    shape: float


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield requests of all clients in order of arrival, drawn as the pass goes on."""
    files = [reading.path] if reading.path.is_file() else sorted(reading.path.glob(f"*{TRACE}"), key=_number)
    if not files:
        raise TraceError(reading.path, f"no file in it is called chunk-N{TRACE}")
    clients = []
    for number, file in enumerate(files):
        try:
            windows = _windows(file)
            clients.append(_drawn(number, file.name, windows, _tables(file)))
        except UNREADABLE as bad:
            reading.reject(number + 1, BadRow(f"{file.name}: {bad}"))
    for number, (time, _, input_length, output_length) in enumerate(merge(*clients), 1):
        yield TraceRequest(reading.name(number), reading.arrive(time), input_length, output_length)


def _drawn(
    client: int, name: str, windows: list[RateWindow], tables: list[tuple[float, LengthTables]]
) -> Iterator[tuple[int, int, int, int]]:
    """Time, client, and both lengths of each request."""
    random = Random(name)
    starts = [start for start, _ in tables]
    for window in windows:
        if not window.rate:
            continue
        gap = _gaps(window, random)
        time = window.start + gap() * random.random()
        table = tables[max(0, bisect(starts, window.start) - 1)][1]
        while time < window.end:
            yield round(time * SECOND), client, _input(table, random), _draw(table["output_tokens"], random)
            time += gap()


def _gaps(window: RateWindow, random: Random) -> Callable[[], float]:
    mean, shape = 1 / window.rate, window.shape
    if window.family == "Gamma":
        return lambda: random.gammavariate(shape, mean / shape)
    if window.family == "Weibull":
        scale = mean / math.gamma(1 + 1 / shape)
        return lambda: random.weibullvariate(scale, shape)
    return lambda: random.expovariate(window.rate)


def _input(table: LengthTables, random: Random) -> int:
    if "input_tokens" in table:
        return max(1, _draw(table["input_tokens"], random))
    total = _draw(table["text_tokens"], random)
    for kind in OF_KINDS:
        if f"{kind}_count" in table and f"{kind}_tokens" in table:
            total += sum(_draw(table[f"{kind}_tokens"], random) for _ in range(_draw(table[f"{kind}_count"], random)))
    return max(1, total)


def _draw(table: tuple[list[int], list[float]], random: Random) -> int:
    lengths, sums = table
    return lengths[min(bisect(sums, random.random() * sums[-1]), len(lengths) - 1)]


def _windows(file: Path) -> list[RateWindow]:
    """Raises ``BadRow``."""
    windows: list[tuple[float, float, str, float]] = []
    for number, row in enumerate(csv.reader(whole(file).decode().splitlines()), 1):
        try:
            start, rate, _, family, shape, *_ = row
            windows.append((float(start), float(rate), family, float(shape)))
        except ValueError:
            raise BadRow(f"line {number} isn't start,rate,variation,family,shape,scale") from None
        if not (0 <= windows[-1][0] < 1e9 and 0 <= windows[-1][1] < 1e6 and windows[-1][2] in FAMILIES):
            raise BadRow(f"line {number} has a time, a rate or a family that can't be: {','.join(row)}")
        if family and rate and not 0 < windows[-1][3] < 1e6:
            raise BadRow(f"line {number} has a shape that can't be: {shape}")
    starts = [start for start, *_ in windows]
    if any(after <= before for before, after in pairwise(starts)):
        raise BadRow("windows aren't in order of time")
    ends = [*starts[1:], (starts[-1] if starts else 0) + WINDOW]
    return [
        RateWindow(start, end, rate, family, shape)
        for (start, rate, family, shape), end in zip(windows, ends, strict=False)
    ]


def _tables(file: Path) -> list[tuple[float, LengthTables]]:
    """Raises ``BadRow``."""
    beside = file.with_name(file.name.removesuffix(TRACE) + DATASET)
    tables: list[tuple[float, LengthTables]] = []
    for start, texts in msgspec.json.decode(whole(beside), type=dict[str, dict[str, str]]).items():
        where = f"{beside.name}, at {start}"
        if not start.isdecimal():
            raise BadRow(f"{where}: that is no time")
        table = {name: _table(text, f"{where}: {name}") for name, text in texts.items() if name.endswith(DRAWN)}
        if "output_tokens" not in table or not ("input_tokens" in table or "text_tokens" in table):
            raise BadRow(f"{where}: no table of input_tokens or text_tokens, or none of output_tokens")
        if all(lengths for lengths, _ in table.values()):  # no request came while tables are empty
            tables.append((float(start), table))
    if not tables:
        raise BadRow(f"{beside.name} has no tables")
    return sorted(tables, key=lambda entry: entry[0])


def _table(text: str, where: str) -> tuple[list[int], list[float]]:
    pairs = [(int(length), float(share)) for length, share in _PAIR.findall(text)]
    sums = list(accumulate(share for _, share in pairs))
    if (not pairs and text.strip() != "{}") or (pairs and (min(pairs)[0] < 0 or not 0 < sums[-1] < 2)):
        raise BadRow(f"{where} is no table of probabilities")
    return [length for length, _ in pairs], sums


def _number(file: Path) -> tuple[int, str]:
    digits = re.sub(r"\D", "", file.name)
    return int(digits or 0), file.name


def _is_dataset(head: Head) -> bool:
    first = next(iter(head.value.values()), None)
    return isinstance(first, dict) and isinstance(first.get("output_tokens"), str)


FORMAT = Format(
    name="servegen",
    summary="ServeGen clients, a directory of chunk-N-trace.csv and chunk-N-dataset.json: requests are drawn from them.",
    recognise=_is_dataset,
    read=read,
)
