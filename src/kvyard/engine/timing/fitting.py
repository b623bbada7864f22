"""Fits a profile to measured passes, and says how far off it is on passes it hasn't seen.

What is minimised is the *relative* error, since a decode step of 5 ms matters as much as a prompt of 1 s, and with a loss that
soon stops growing (Cauchy's): measurements have stalls in them, and a few of those mustn't bend the rest. Coefficients are
fitted as logarithms, so none gets negative, and each is held loosely to a first guess, which is what remains of it when
the measurements say nothing about it. Deterministic; needs nothing but numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvyard.engine.timing.measurements import KINDS, Measurement
from kvyard.engine.timing.profile import NAMES, Coefficients, Features, Floats, estimate
from kvyard.errors import KvyardError

LEAST = {"prefill": 4, "decode": 4}
"""Measurements of each kind below which a fit would be guessing."""
FOLDS = 64
SCALE = 0.05
"""Relative errors well above this count as stalls."""
HOLD = 1e-3
"""How firmly a coefficient is held to its first guess, compared with one measurement."""
ROUNDS = 200
ENOUGH = 1e-6
"""Gain of a round below which descending stops."""


class Fit(msgspec.Struct, frozen=True):
    """Coefficients, and for each measurement the relative error: of the fit, and of one made without that measurement."""

    coefficients: Coefficients
    errors: tuple[float, ...]
    unseen_errors: tuple[float, ...]


class KindError(msgspec.Struct, frozen=True):
    """Errors of one kind of pass, as shares (0.05 is 5 %)."""

    points: int
    mean: float
    median: float
    largest: float


def fit(rows: Sequence[Measurement]) -> Fit:
    """Fit the formula to ``rows``. Raises ``KvyardError`` when there are too few of a kind.

    The unseen errors are by leaving out one measurement at a time, or, beyond 64 of them, every 64th.
    """
    for kind, least in LEAST.items():
        found = sum(row.kind == kind for row in rows)
        if found < least:
            raise KvyardError(f"a profile needs at least {least} measurements of kind {kind}, got {found}")
    features = Features.of([row.shape for row in rows])
    ms = np.array([row.ms for row in rows])
    guess = _first_guess(rows)
    best = _descend(guess, guess, features, ms)
    unseen = np.zeros(len(rows))
    folds = np.arange(len(rows)) % min(len(rows), FOLDS)
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        without = _descend(best, guess, features.only(~out), ms[~out])
        unseen[out] = estimate(np.exp(without), features.only(out)) / ms[out] - 1.0
    # Six digits are far more than measurements hold, and make a profile that people can read.
    values = [float(f"{value:.6g}") for value in np.exp(best)]
    errors = estimate(values, features) / ms - 1.0
    return Fit(Coefficients(**dict(zip(NAMES, values))), tuple(errors.tolist()), tuple(unseen.tolist()))


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
    """Logarithms of rough values, by what each kind of pass shows at its extremes."""
    prompts = [row for row in rows if row.kind == "prefill"]
    steps = [row for row in rows if row.kind == "decode"]
    weights = min(row.ms for row in steps)
    token = min(row.ms / row.prefills[0][0] for row in prompts)
    largest = max(steps, key=lambda row: row.batch * row.ctx)
    context = max(largest.ms - weights, 0.1 * largest.ms) / (largest.batch * largest.ctx)
    guess = {
        "weights": weights,
        "token": token,
        "blend": 2.0,
        "sequence": 0.05 * token,
        "attention": token / 30_000,
        "past_attention": token / 30_000,
        "past_read": 4 * context,
        "past_copy": 4 * context,
        "launch": 0.8 * min(row.ms for row in prompts),
        "past_launch": 0.1 * weights,
        "context": context,
    }
    return np.log([guess[name] for name in NAMES])


def _descend(start: Floats, guess: Floats, features: Features, ms: Floats) -> Floats:
    """Levenberg and Marquardt's method, reweighted each round for the loss. Returns logarithms."""

    def errors(at: Floats) -> Floats:
        return np.asarray(np.log(estimate(np.exp(at), features) / ms))

    def loss(off: Floats, at: Floats) -> float:
        return float(np.log1p((off / SCALE) ** 2).sum() + HOLD * ((at - guess) ** 2).sum())

    at, damping, step = start.copy(), 1e-2, 1e-5
    off = errors(at)
    now = loss(off, at)
    for _ in range(ROUNDS):
        slope = np.stack([(errors(at + step * unit) - off) / step for unit in np.eye(len(at))], axis=1)
        trust = 1.0 / (SCALE**2 + off**2)
        curve = slope.T @ (trust[:, None] * slope) + HOLD * np.eye(len(at))
        down = -(slope.T @ (trust * off)) - HOLD * (at - guess)
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
