"""LLMServingSim's profile of a model on a card, a folder of CSV files, compiled into a pass table.

It measured one layer of each kind with vLLM: ``dense.csv`` by tokens, ``per_sequence.csv`` by sequences, ``attention.csv`` by
(prompt chunk, past, decoding requests, their context), ``moe.csv`` by tokens and activated experts, ``skew_fit.csv`` what the
longest context of a batch adds. Collectives between cards are not in it and are computed from the card's links.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.errors import KvyardError

ONCE = ("embedding", "final_layernorm")
"""Layers that a pass has once, and not once per layer of the model."""
TWICE = ("layernorm",)
HEAD = ("lm_head", "sampler")
DENSE_MLP = ("gate_up_proj", "act_fn", "down_proj")
"""Operators of layers without experts, in models that have both."""
NEEDED = ("dense.csv", "per_sequence.csv", "attention.csv")


class Mixture(NamedTuple):
    """The experts of a model, and how ranks share them."""

    layers: int
    """Layers that have experts."""
    experts: int
    chosen: int
    """Experts per token."""
    sources: int = 1
    """Data ranks whose tokens come together before the experts."""
    holders: int = 1
    """Ranks over which whole experts are spread."""
    slices: int = 1
    """Ranks over which every expert is cut."""

    def us(self, measured: Plane, tokens: float) -> float:
        """Return the time of a layer of experts on one rank, for ``tokens`` of all sources: of those, this rank has its
        share of pairs."""
        called = self.experts / self.holders * (1.0 - (1.0 - self.chosen / self.experts) ** tokens)
        return measured.value(tokens / self.holders, called) / self.slices


def read_servingsim(
    folder: Path,
    layers: int,
    *,
    mixture: Mixture | None = None,
    collective_us: Callable[[int], float] = lambda tokens: 0.0,
    exchange_us: Callable[[int], float] = lambda tokens: 0.0,
) -> PassTable:
    """Compile the tables in ``folder`` (that of one ``tp`` size) for a model of ``layers`` layers.

    ``collective_us`` returns the time of one layer's collectives over tensor ranks for a number of tokens, ``exchange_us``
    the time to gather and scatter tokens of all data ranks in a layer of experts. Raises ``KvyardError`` for a folder that
    lacks a file or rows.
    """
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise KvyardError(f"{folder}: no {', '.join(missing)}; LLMServingSim's profile has {', '.join(NEEDED)}")
    dense = _curves(folder / "dense.csv", "layer", "tokens")
    if not dense:
        raise KvyardError(f"{folder / 'dense.csv'} has no rows")
    axis = sorted({point for curve in dense.values() for point in curve.at})
    times = dict.fromkeys(dense, layers) | dict.fromkeys(TWICE, 2 * layers) | dict.fromkeys(ONCE, 1)
    experts: Curve | None = None
    if mixture is not None:
        if mixture.layers < layers:
            times |= dict.fromkeys(DENSE_MLP, layers - mixture.layers)
        experts = _experts(folder, mixture, axis, exchange_us)
    tokens = []
    for point in axis:
        us = sum(times[name] * curve.value(point) for name, curve in dense.items()) + layers * collective_us(point)
        if experts is not None and mixture is not None:
            us += experts.value(point * mixture.sources)
        tokens.append(us)
    heads = _curves(folder / "per_sequence.csv", "layer", "sequences")
    curves = [heads[name] for name in HEAD if name in heads]
    if not curves:
        raise KvyardError(
            f"{folder / 'per_sequence.csv'} has none of {', '.join(HEAD)}; it has {', '.join(heads) or 'no rows'}"
        )
    sequences = sorted({point for curve in curves for point in curve.at})
    prompt, decode, together = _attention(folder / "attention.csv", layers)
    computed = "collectives" if mixture is None or mixture.slices == 1 else "collectives and slices of experts"
    return PassTable(
        source=f"LLMServingSim's profile in {folder}",
        coverage=f"one layer of each kind measured with vLLM; {computed} computed",
        tokens=Curve(tuple(axis), tuple(tokens)),
        sequences=Curve(tuple(sequences), tuple(sum(curve.value(point) for curve in curves) for point in sequences)),
        prompt=prompt,
        decode=decode,
        together=together,
        skew=_skew(folder / "skew_fit.csv"),
        experts=experts if mixture is not None and mixture.sources > 1 else None,
    )


def _experts(folder: Path, mixture: Mixture, axis: Sequence[int], exchange_us: Callable[[int], float]) -> Curve:
    """Return all layers of experts, by tokens of all data ranks together."""
    path, slices = folder / "moe.csv", mixture.slices
    if not path.is_file():
        path = folder.parent / "tp1" / "moe.csv"  # whole experts are the same whatever the attention's ranks
    elif re.fullmatch(r"tp([2-9]|\d\d+)", folder.name):
        slices = max(1, slices // max(1, mixture.slices // mixture.sources))  # measured as slices of tensor ranks
    if not path.is_file():
        raise KvyardError(f"{folder}: no moe.csv, and the model has {mixture.experts} experts")
    by_tokens: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for _, (tokens, called, us) in _rows(path, "tokens", "activated_experts", "time_us"):
        by_tokens[int(tokens)].append((int(called), us))
    if not by_tokens:
        raise KvyardError(f"{path} has no rows")
    numbers = sorted({called for points in by_tokens.values() for called, _ in points})
    rows = sorted(by_tokens)
    measured = Plane(
        tuple(rows),
        tuple(numbers),
        tuple(tuple(_curve(by_tokens[row]).value(point) for point in numbers) for row in rows),
    )
    shared = mixture._replace(slices=slices)
    points = sorted({*axis, *(point * mixture.sources for point in axis)})
    return Curve(
        tuple(points), tuple(mixture.layers * (shared.us(measured, point) + exchange_us(point)) for point in points)
    )


def _rows(path: Path, *numbers: str) -> Iterator[tuple[dict[str, Any], list[float]]]:
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                values = [float(row[name]) for name in numbers]
            except (KeyError, TypeError, ValueError):
                raise KvyardError(f"{path}, line {number}: needs numbers in {', '.join(numbers)}") from None
            yield row, values


def _curves(path: Path, name: str, axis: str) -> dict[str, Curve]:
    by_name: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, (point, us) in _rows(path, axis, "time_us"):
        if name not in row:
            raise KvyardError(f"{path}: no column {name}; it has {', '.join(map(str, row))}")
        by_name[row[name]].append((int(point), us))
    return {name: _curve(points) for name, points in by_name.items()}


def _curve(points: Iterable[tuple[int, float]]) -> Curve:
    ordered = sorted(dict(points).items())
    return Curve(tuple(point for point, _ in ordered), tuple(us for _, us in ordered))


def _attention(path: Path, layers: int) -> tuple[Plane, Plane, tuple[tuple[int, int, Plane], ...]]:
    prompts: dict[int, dict[int, float]] = defaultdict(dict)
    decode: dict[int, dict[int, float]] = defaultdict(dict)
    both: dict[tuple[int, int], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for _, (new, past, batch, context, us) in _rows(path, *names):
        if not batch:
            prompts[int(new)][int(past)] = us * layers
        elif not new:
            decode[int(batch)][int(context)] = us * layers
        else:
            both[int(new), int(past)][int(batch)][int(context)] = us * layers
    if not prompts or not decode:
        raise KvyardError(f"{path}: has no {'decode steps' if prompts else 'prompts'} by themselves")
    return _plane(prompts), _plane(decode), tuple((*key, _plane(rows)) for key, rows in sorted(both.items()))


def _plane(rows: dict[int, dict[int, float]]) -> Plane:
    axis = sorted({point for row in rows.values() for point in row})
    numbers = sorted(rows)
    curves = [_curve(rows[number].items()) for number in numbers]
    return Plane(tuple(numbers), tuple(axis), tuple(tuple(curve.value(point) for point in axis) for curve in curves))


def _skew(path: Path) -> Curve:
    """Return the share of the way to the longest context that counts: the median of fits to decode steps of moderate skew."""
    if not path.is_file():
        return Curve((1,), (0.0,))
    slopes = [
        alpha
        for row, (chunk, alpha) in _rows(path, "pc", "alpha")
        if not chunk and not str(row.get("skew_rate_label", "")).startswith("sr>")
    ]
    return Curve((1,), (max(0.0, median(slopes)) if slopes else 0.0,))
