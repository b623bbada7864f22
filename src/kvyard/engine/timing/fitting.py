"""Reads measured passes, fits a profile to them, and says how far off it is on passes it hasn't seen.

What is minimised is the *relative* error, since a decode step of 5 ms matters as much as a prompt of 1 s, and with a loss that
soon stops growing (Cauchy's): measurements have stalls in them, and a few of those mustn't bend the rest. Coefficients are
fitted as logarithms, so none gets negative, and each is held loosely to a first guess, which is what remains of it when
the measurements say nothing about it. Deterministic; needs nothing but numpy.

Measurements are JSON lines:

    {"kind": "prefill", "new": 512, "past": 2048, "ms": 17.34}
    {"kind": "decode", "batch": 32, "ctx": 4096, "ms": 9.09}
    {"kind": "mixed", "prefills": [[512, 0], [64, 2048]], "batch": 32, "ctx": 4096, "ms": 20.9}
    {"kind": "mixed", "prefills": [], "batch": 32, "context": 131072, "longest": 9000, "ms": 9.6}

``ctx`` is each sequence's context, the token being computed included; where they differ, ``context`` is their sum and
``longest`` the longest. Lines of other kinds (``device``, ``copy``) are left
alone; a ``device`` line names the card.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvyard.engine.timing.profile import NAMES, Coefficients, Features, Floats, Form, estimate, form_of
from kvyard.errors import KvyardError

KINDS = ("prefill", "decode", "mixed")
SHOWN = 5
"""Bad rows named in one refusal."""
LEAST = 4
"""Passes with prompts, and passes with decode steps, below which a fit would be guessing."""
FOLDS = 64
MANY = 512
"""Beyond so many measurements ``FEW_FOLDS`` tell as much."""
FEW_FOLDS = 8
SCALE = 0.05
"""Relative errors well above this count as stalls."""
HOLD = 1e-3
"""How firmly a coefficient is held to its first guess, compared with one measurement."""
CURVE_HOLD = 0.3
"""The same for the factors of the curve."""
WORTH = 0.9
"""A curve is kept where errors on unseen passes fall below this share of those without."""
GOOD = 0.01
"""Below this mean error no curve is tried."""
KNOTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
ROUNDS = 200
ENOUGH = 1e-6
"""Gain of a round below which descending stops."""
BLEND = NAMES.index("blend")
SHARPEST = 31.0
"""A blend so far above 1 takes the larger of the two, and its powers are still numbers."""


class Measurement(msgspec.Struct, frozen=True):
    """One measured pass."""

    kind: str
    prefills: tuple[tuple[int, int], ...]
    batch: int
    context: int
    """Summed over the batch."""
    longest: int
    ms: float

    @property
    def shape(self) -> tuple[tuple[tuple[int, int], ...], int, int, int]:
        """As a timing model takes it: prefills, decode batch, summed context, longest context."""
        return self.prefills, self.batch, self.context, self.longest

    def __str__(self) -> str:
        parts = [f"{new} new after {past}" for new, past in self.prefills]
        if self.batch:
            parts.append(f"{self.batch} decoding at {self.context // self.batch}")
        return ", ".join(parts)


class Measurements(msgspec.Struct, frozen=True):
    """A file of them."""

    source: str
    device: str | None
    rows: tuple[Measurement, ...]


def read_measurements(path: str | Path) -> Measurements:
    """Read a file. Raises ``KvyardError`` for one that can't be read, has no measured pass, or has bad rows, by line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvyardError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    rows, faults, device = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
            if not isinstance(value, dict):
                raise KvyardError("not a JSON object")
            if value.get("kind") == "device":
                device = str(value.get("name"))
            elif value.get("kind") in KINDS:
                rows.append(_row(value))
            elif not isinstance(value.get("kind"), str):
                raise KvyardError(f"no kind; {', '.join(KINDS)} are measured passes")
        except msgspec.DecodeError as error:
            faults.append(f"line {number}: not JSON ({error})")
        except KvyardError as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise KvyardError(f"{path}: {'; '.join(faults[:SHOWN])}{more}")
    if not rows:
        raise KvyardError(f"{path}: has no measured pass: lines of kind {', '.join(KINDS)} are needed")
    return Measurements(str(path), device, tuple(rows))


def _row(value: dict[str, Any]) -> Measurement:
    kind = value["kind"]
    ms = value.get("ms")
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not (math.isfinite(ms) and ms > 0):
        raise KvyardError(f"ms must be a number above 0, got {ms!r}")
    if kind == "prefill":
        return Measurement(kind, ((_count(value, "new", 1), _count(value, "past", 0)),), 0, 0, 0, float(ms))
    if kind == "decode":
        return Measurement(kind, (), *_decoding(value, _count(value, "batch", 1)), float(ms))
    pairs = value.get("prefills")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise KvyardError(f"prefills must be a list of [new, past] pairs, got {pairs!r}")
    prefills = tuple((_count({"new": new}, "new", 1), _count({"past": past}, "past", 0)) for new, past in pairs)
    batch = _count(value, "batch", 0)
    if not prefills and not batch:
        raise KvyardError("a mixed pass computes something: prefills or a batch above 0")
    if not prefills:
        kind = "decode"
    elif not batch:
        kind = "prefill" if len(prefills) == 1 else kind
    return Measurement(kind, prefills, *_decoding(value, batch), float(ms))


def _decoding(value: dict[str, Any], batch: int) -> tuple[int, int, int]:
    """Batch, summed context, longest context."""
    if not batch:
        return 0, 0, 0
    if "context" in value:
        context = _count(value, "context", batch)
        return batch, context, _count(value, "longest", 0) if "longest" in value else 0
    each = _count(value, "ctx", 1)
    return batch, batch * each, each


def _count(value: dict[str, Any], name: str, least: int) -> int:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise KvyardError(f"{name} must be a whole number of at least {least}, got {found!r}")
    return found


class Fit(msgspec.Struct, frozen=True):
    """Coefficients, and for each measurement the relative error: of the fit, and of one made without that measurement."""

    coefficients: Coefficients
    curve: dict[int, float]
    errors: tuple[float, ...]
    unseen_errors: tuple[float, ...]

    @property
    def form(self) -> Form:
        """The formula and its curve."""
        return form_of(self.coefficients, self.curve)


class KindError(msgspec.Struct, frozen=True):
    """Errors of one kind of pass, as shares (0.05 is 5 %)."""

    points: int
    mean: float
    median: float
    largest: float


def fit(rows: Sequence[Measurement]) -> Fit:
    """Fit the form to ``rows``, with a curve where that is worth it. Raises ``KvyardError`` when there are too few.

    The unseen errors are by leaving out one measurement at a time, or, of many, every 64th or 8th together.
    """
    prompts, steps = sum(bool(row.prefills) for row in rows), sum(row.batch > 0 for row in rows)
    if prompts < LEAST or steps < LEAST:
        raise KvyardError(
            f"a profile needs at least {LEAST} passes with prompts and {LEAST} with decode steps, got {prompts} and {steps}"
        )
    features = Features.of([row.shape for row in rows])
    ms = np.array([row.ms for row in rows])
    guess = _first_guess(rows)
    plain = _fit(features, ms, guess, ())
    if np.abs(plain.unseen_errors).mean() < GOOD:
        return plain
    lowest, highest = float(features.tokens.min()), float(features.tokens.max())
    knots = tuple(at for at in KNOTS if lowest / 2 <= at <= 2 * highest)
    if len(knots) > 2:
        curved = _fit(features, ms, guess, knots)
        if np.abs(curved.unseen_errors).mean() < WORTH * np.abs(plain.unseen_errors).mean():
            return curved
    return plain


def _fit(features: Features, ms: Floats, guess: Floats, knots: tuple[int, ...]) -> Fit:
    start = np.concatenate([guess, np.zeros(len(knots))])
    spread = _spread(features, knots)
    best = _descend(start, start, features, spread, ms)
    unseen = np.zeros(len(ms))
    folds = np.arange(len(ms)) % min(len(ms), FOLDS if len(ms) <= MANY else FEW_FOLDS)
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        without = _descend(best, start, features.only(~out), spread[~out], ms[~out])
        unseen[out] = _estimate(without, features.only(out), spread[out]) / ms[out] - 1.0
    # Six digits are far more than measurements hold, and make a profile that people can read.
    values = [float(f"{value:.6g}") for value in _values(best)]
    if not features.behind.any():
        values[NAMES.index("skew")] = 0.0
    factors = [float(f"{value:.6g}") for value in np.exp(best[len(NAMES) :])]
    errors = estimate(values, features, np.exp(spread @ np.log(factors)) if knots else 1.0) / ms - 1.0
    return Fit(
        Coefficients(**dict(zip(NAMES, values))),
        dict(zip(knots, factors)),
        tuple(errors.tolist()),
        tuple(unseen.tolist()),
    )


def _spread(features: Features, knots: tuple[int, ...]) -> Floats:
    """For each pass, the shares of the knots that its tokens lie between."""
    if not knots:
        return np.zeros((len(features.tokens), 0))
    at = np.log2(features.tokens)
    return np.stack([np.interp(at, np.log2(knots), unit) for unit in np.eye(len(knots))], axis=1)


def _values(at: Floats) -> Floats:
    """Coefficients of a point of the search: logarithms, but for the blend, which stays above 1."""
    values: Floats = np.exp(at[: len(NAMES)])
    values[BLEND] = 1.0 + min(values[BLEND], SHARPEST)
    return values


def _estimate(at: Floats, features: Features, spread: Floats) -> Floats:
    return estimate(_values(at), features, np.exp(spread @ at[len(NAMES) :]) if spread.shape[1] else 1.0)


def errors_by_kind(rows: Sequence[Measurement], errors: Sequence[float]) -> dict[str, KindError]:
    """How large ``errors`` are, for each kind in ``rows`` and for ``all`` of them."""
    sizes = np.abs(np.array(errors))
    found = {}
    for kind in (*KINDS, "all"):
        chosen = sizes[[kind in (row.kind, "all") for row in rows]]
        if len(chosen):
            found[kind] = KindError(len(chosen), float(chosen.mean()), float(np.median(chosen)), float(chosen.max()))
    return found


def _first_guess(rows: Sequence[Measurement]) -> Floats:
    """A point of the search with rough values, by what each kind of pass shows at its extremes."""
    prompts = [row for row in rows if row.prefills]
    steps = [row for row in rows if row.batch]
    weights = min(row.ms for row in steps)
    token = min(row.ms / (sum(new for new, _ in row.prefills) + row.batch) for row in prompts)
    largest = max(steps, key=lambda row: row.context)
    context = max(largest.ms - weights, 0.1 * largest.ms) / largest.context
    guess = {
        "weights": weights,
        "token": token,
        "blend": 1.0,  # above 1
        "sequence": 0.05 * token,
        "attention": token / 30_000,
        "past_attention": token / 30_000,
        "past_read": 4 * context,
        "past_copy": 4 * context,
        "launch": 0.8 * min(row.ms for row in prompts),
        "past_launch": 0.1 * weights,
        "context": context,
        "mixed_launch": 0.1 * weights,
        "mixed_decode": 1.0,
        "skew": 0.02,
        "host": 0.02 * weights,
    }
    return np.log([guess[name] for name in NAMES])


def _descend(start: Floats, guess: Floats, features: Features, spread: Floats, ms: Floats) -> Floats:
    """Levenberg and Marquardt's method, reweighted each round for the loss."""
    hold = np.where(np.arange(len(start)) < len(NAMES), HOLD, CURVE_HOLD)

    def errors(at: Floats) -> Floats:
        return np.asarray(np.log(_estimate(at, features, spread) / ms))

    def loss(off: Floats, at: Floats) -> float:
        return float(np.log1p((off / SCALE) ** 2).sum() + (hold * (at - guess) ** 2).sum())

    at, damping, step = start.copy(), 1e-2, 1e-5
    off = errors(at)
    now = loss(off, at)
    for _ in range(ROUNDS):
        slope = np.stack([(errors(at + step * unit) - off) / step for unit in np.eye(len(at))], axis=1)
        trust = 1.0 / (SCALE**2 + off**2)
        curve = slope.T @ (trust[:, None] * slope) + np.diag(hold)
        down = -(slope.T @ (trust * off)) - hold * (at - guess)
        for _ in range(12):
            move = np.clip(np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down), -0.7, 0.7)
            next_off = errors(at + move)
            then = loss(next_off, at + move)
            if then < now:
                break
            damping *= 4.0
        else:
            break
        gained, now = now - then, then
        at, off, damping = at + move, next_off, max(damping / 3.0, 1e-9)
        if gained < ENOUGH:
            break
    return at
