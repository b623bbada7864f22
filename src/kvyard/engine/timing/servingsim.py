"""LLMServingSim's profile of a model on a card, a folder of CSV files, compiled into a pass table.

It measured one layer of each kind with vLLM: ``dense.csv`` by tokens, ``per_sequence.csv`` by sequences, ``attention.csv`` by
(prompt chunk, past, decoding requests, their context), ``moe.csv`` by tokens and activated experts, ``skew_fit.csv`` what the
longest context of a batch adds. Collectives between cards are not in it and are computed from the card's links.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.errors import KvyardError

ONCE = ("embedding", "final_layernorm")
"""Layers that a pass has once, and not once per layer of the model."""
TWICE = ("layernorm",)
HEAD = ("lm_head", "sampler")
NEEDED = ("dense.csv", "per_sequence.csv", "attention.csv")


def read_servingsim(
    folder: Path,
    layers: int,
    *,
    experts: int = 0,
    chosen: int = 0,
    sources: int = 1,
    collective_us: Callable[[int], float] = lambda tokens: 0.0,
) -> PassTable:
    """Compile the tables in ``folder`` (that of one ``tp`` size) for a model of ``layers`` layers.

    ``experts`` and ``chosen`` describe a mixture; ``sources`` is how many data ranks' tokens come to one rank's experts.
    ``collective_us`` says what one layer's collectives take for so many tokens. Raises ``KvyardError`` for a folder that
    lacks a file or rows.
    """
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise KvyardError(f"{folder}: no {', '.join(missing)}; LLMServingSim's profile has {', '.join(NEEDED)}")
    dense = _curves(folder / "dense.csv", "tokens")
    mixture = _mixture(folder, experts)
    axis = sorted({at for curve in dense.values() for at in curve.at})
    tokens = []
    for at in axis:
        layer = sum(curve.value(at) * (2 if name in TWICE else 1) for name, curve in dense.items() if name not in ONCE)
        if mixture is not None:
            called = experts * (1.0 - (1.0 - chosen / experts) ** (at * sources))
            layer += mixture.value(at * sources, called)
        whole = layers * (layer + collective_us(at))
        tokens.append(whole + sum(dense[name].value(at) for name in ONCE if name in dense))
    heads = _curves(folder / "per_sequence.csv", "sequences")
    sequences = sorted({at for name in HEAD if name in heads for at in heads[name].at})
    prompt, decode, together = _attention(folder / "attention.csv", layers)
    return PassTable(
        source=f"LLMServingSim's profile in {folder}",
        coverage="one layer of each kind measured with vLLM; collectives computed" if layers else "",
        tokens=Curve(tuple(axis), tuple(tokens)),
        sequences=Curve(
            tuple(sequences), tuple(sum(heads[name].value(at) for name in HEAD if name in heads) for at in sequences)
        ),
        prompt=prompt,
        decode=decode,
        together=together,
        skew=_skew(folder / "skew_fit.csv"),
    )


def _rows(path: Path, *numbers: str) -> Iterator[tuple[dict[str, Any], list[float]]]:
    with path.open(newline="") as file:
        for at, row in enumerate(csv.DictReader(file), 2):
            try:
                values = [float(row[name]) for name in numbers]
            except (KeyError, TypeError, ValueError):
                raise KvyardError(f"{path}, line {at}: needs numbers in {', '.join(numbers)}") from None
            yield row, values


def _curves(path: Path, axis: str) -> dict[str, Curve]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, (at, us) in _rows(path, axis, "time_us"):
        found[row["layer"]].append((int(at), us))
    return {name: _curve(points) for name, points in found.items()}


def _curve(points: Iterable[tuple[int, float]]) -> Curve:
    ordered = sorted(dict(points).items())
    return Curve(tuple(at for at, _ in ordered), tuple(us for _, us in ordered))


def _mixture(folder: Path, experts: int) -> Plane | None:
    """Time of a layer of experts: rows by tokens, along activated experts."""
    if not experts:
        return None
    path = folder / "moe.csv"
    if not path.is_file():
        path = folder.parent / "tp1" / "moe.csv"  # whole experts are the same whatever the attention's ranks
    if not path.is_file():
        raise KvyardError(f"{folder}: no moe.csv, and the model has {experts} experts")
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for _, (tokens, called, us) in _rows(path, "tokens", "activated_experts", "time_us"):
        found[int(tokens)].append((int(called), us))
    axis = sorted({called for points in found.values() for called, _ in points})
    rows = sorted(found)
    return Plane(tuple(rows), tuple(axis), tuple(tuple(_curve(found[row]).value(at) for at in axis) for row in rows))


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
    axis = sorted({at for row in rows.values() for at in row})
    numbers = sorted(rows)
    curves = [_curve(rows[number].items()) for number in numbers]
    return Plane(tuple(numbers), tuple(axis), tuple(tuple(curve.value(at) for at in axis) for curve in curves))


def _skew(path: Path) -> Curve:
    """What share of the way to the longest context counts: the middle of what was fitted to decode steps of moderate skew."""
    if not path.is_file():
        return Curve((1,), (0.0,))
    found = [
        alpha
        for row, (chunk, alpha) in _rows(path, "pc", "alpha")
        if not chunk and not str(row["skew_rate_label"]).startswith("sr>")
    ]
    return Curve((1,), (max(0.0, median(found)) if found else 0.0,))
