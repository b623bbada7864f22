"""Fits a profile to measured passes, and reports its error on passes it hasn't seen.

What is minimised is the *relative* error, since a decode step of 5 ms matters as much as a prompt of 1 s, and with a loss that
soon stops growing (Cauchy's): measurements have stalls in them, and a few of those mustn't bend the rest. Coefficients are
fitted as logarithms, so none gets negative, and each is held loosely to a first guess, which is what remains of it when
the measurements say nothing about it. Deterministic; needs nothing but numpy.

An engine's log has thousands of passes that are nearly the same beside a few that aren't, and a sweep has one of each. So
passes that are alike count as a few of them at most: what was measured once, far away, still counts.

Where some passes have the host's time apart from the device's, as an engine's log may, the device's part is fitted to all of
them (a sweep of single passes, timed on the device, has no other), and the host's to those that have it.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import log2

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.engine.timing.measurements import KINDS, Measurement
from kvyard.engine.timing.profile import NAMES, Coefficients, Features, Floats, Form, estimate, form_of
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div

LEAST = 4
"""Passes with prompts, and passes with decode steps, below which a fit would be guessing."""
FOLDS = 64
MANY = 512
"""Number of measurements beyond which ``FEW_FOLDS`` are sufficient."""
FEW_FOLDS = 8
ALIKE = 32
"""Most weight of passes that are alike."""
KEPT = 2 * ALIKE
"""Most passes of a kind that are used."""
SCALE = 0.05
"""Relative errors well above this count as stalls."""
HOLD = 1e-3
"""Weight of a coefficient's first guess, compared with one measurement."""
PINNED = 1e9
"""Weight for a coefficient that isn't fitted."""
NONE = 1e-12
"""Value of that coefficient meanwhile."""
CURVE_HOLD = 0.3
"""Weight of the first guess for the factors of the curve."""
WORTH = 0.9
"""A curve is kept where errors on unseen passes fall below this share of those without."""
GOOD = 0.01
"""Below this mean error no curve is tried."""
KNOTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
ROUNDS = 200
ENOUGH = 1e-4
"""Gain of a round below which descending stops."""
BLEND = NAMES.index("blend")
MIXED_DECODE = NAMES.index("mixed_decode")
SHARPEST = 31.0
"""A blend so far above 1 takes the larger of the two, and its powers are still numbers."""
HOST = ("host", "host_sequence", "host_prompts")
HOST_SCALE = 0.1
"""Milliseconds of host time that are well above the usual scatter."""
HOST_ROUNDS = 20

Marks = npt.NDArray[np.bool_]


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
    """Fit the form to ``rows``, with a curve if that is worth it. Raises ``KvyardError`` when there are too few.

    The unseen errors are by leaving out one measurement or group at a time, or, of many, every 64th; of more than ``MANY``, an
    eighth of the *kinds* of passes with all that are alike, since a log repeats each.
    """
    data = _Rows.of(_enough(rows))
    guess = _first_guess(rows, data.apart)
    plain = _fit(data, guess, ())
    if _mean(plain) < GOOD:
        return plain
    lowest, highest = float(data.features.tokens.min()), float(data.features.tokens.max())
    knots = tuple(knot for knot in KNOTS if lowest / 2 <= knot <= 2 * highest)
    if len(knots) > 2:
        curved = _fit(data, guess, knots)
        if _mean(curved) < WORTH * _mean(plain):
            return curved
    return plain


def rough_fit(rows: Sequence[Measurement]) -> Form:
    """Return the form without a curve, fitted to ``rows`` without a look at unseen ones. Raises as ``fit`` does."""
    data = _Rows.of(_enough(rows))
    guess = _first_guess(rows, data.apart)
    values = _values(_descend(guess, guess, data.only(data.kept), ()))
    return form_of(Coefficients(**{name: float(value) for name, value in zip(NAMES, values, strict=True)}), {})


def _mean(fitted: Fit) -> float:
    return float(np.abs(fitted.unseen_errors).mean())


def _enough(rows: Sequence[Measurement]) -> Sequence[Measurement]:
    prompts, steps = sum(bool(row.prefills) for row in rows), sum(row.batch > 0 for row in rows)
    if prompts < LEAST or steps < LEAST:
        raise KvyardError(
            f"a profile needs at least {LEAST} passes with prompts and {LEAST} with decode steps, got {prompts} and {steps}"
        )
    return rows


def errors_by_kind(rows: Sequence[Measurement], errors: Sequence[float]) -> dict[str, KindError]:
    """Return the size of ``errors``, for each kind in ``rows`` and for ``all`` of them."""
    sizes = np.abs(np.array(errors))
    by_kind = {}
    for kind in (*KINDS, "all"):
        chosen = sizes[[kind in (row.kind, "all") for row in rows]]
        if len(chosen):
            by_kind[kind] = KindError(len(chosen), float(chosen.mean()), float(np.median(chosen)), float(chosen.max()))
    return by_kind


def row_errors(form: Form, rows: Sequence[Measurement]) -> list[float]:
    """Return by how much ``form`` is off for each of ``rows``, as shares."""
    data = _Rows.of(rows)
    values = [getattr(form.coefficients, name) for name in NAMES]
    features = data.features
    factors, whole_factors = (
        np.array([form.factor(count) for count in tokens])
        for tokens in (features.tokens, features.tokens + features.cached)
    )
    whole = data.ms + data.host
    off: list[float] = (data.total(estimate(values, features, factors, whole_factors)) / whole - 1.0).tolist()
    return off


class _Rows(msgspec.Struct, frozen=True):
    """Measurements as arrays: an element per measurement, and features per pass of one."""

    features: Features
    part_of: npt.NDArray[np.int64]
    """Measurement of each pass."""
    times: Floats
    """Number of passes of that kind in it."""
    ms: Floats
    host: Floats
    """0 if it isn't known."""
    hosted: Marks
    """Mask of measurements with host time."""
    weight: Floats
    fold: npt.NDArray[np.int64]
    kept: Marks
    """Mask of measurements that a search uses."""

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> "_Rows":
        shapes, part_of, times = [], [], []
        for number, row in enumerate(rows):
            for count, shape in ((1.0, row.shape), *row.others):
                shapes.append(shape)
                part_of.append(number)
                times.append(count)
        kinds = [_kind_of(row) for row in rows]
        counts, seen = Counter(kinds), Counter[Hashable]()
        kept = []
        for kind in kinds:
            step = ceil_div(counts[kind], KEPT)
            kept.append(seen[kind] % step == 0)
            seen[kind] += 1
        return cls(
            Features.of(shapes),
            np.array(part_of, dtype=np.int64),
            np.array(times),
            np.array([row.ms for row in rows]),
            np.array([row.host_ms or 0.0 for row in rows]),
            np.array([row.host_ms is not None for row in rows], dtype=np.bool_),
            np.array([min(1.0, ALIKE / counts[kind]) for kind in kinds]),
            _folds(rows, kinds),
            np.array(kept, dtype=np.bool_),
        )

    @property
    def apart(self) -> bool:
        """Return true if some measurements have host time apart from the device's."""
        return bool(self.hosted.any())

    def only(self, keep: Marks) -> "_Rows":
        """Return the rows that ``keep`` marks."""
        passes = keep[self.part_of]
        number = np.cumsum(keep) - 1
        part_of = number[self.part_of[passes]]
        rest = (getattr(self, name)[keep] for name in self.__struct_fields__[3:])
        return _Rows(self.features.only(passes), part_of, self.times[passes], *rest)

    def total(self, passes: Floats) -> Floats:
        """Sum up the passes of each measurement."""
        if len(passes) == len(self.ms):
            return passes
        summed = np.bincount(self.part_of, weights=passes * self.times, minlength=len(self.ms))
        return summed.astype(np.float64)


def _kind_of(row: Measurement) -> Hashable:
    """Equal for passes that are alike: to about a fifth in prompt tokens, requests and context."""
    sizes = sum(new for new, _ in row.prefills), row.batch, row.context / max(1, row.batch)
    past = sum(past for _, past in row.prefills)
    return (row.kind, *(round(2 * log2(1 + size)) for size in sizes), round(log2(1 + past)))


def _folds(rows: Sequence[Measurement], kinds: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """Return the fold of each row: rows that are left out together."""
    if all(row.group is not None for row in rows):
        named: Sequence[Hashable] = [row.group for row in rows]
    else:
        named = range(len(rows)) if len(rows) <= MANY else kinds
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named))}
    most = min(len(numbers), FOLDS if len(rows) <= MANY else FEW_FOLDS)
    return np.array([numbers[name] % most for name in named], dtype=np.int64)


def _fit(data: _Rows, guess: Floats, knots: tuple[int, ...]) -> Fit:
    start = np.concatenate([guess, np.zeros(len(knots))])
    best = _descend(start, start, data.only(data.kept), knots)
    unseen = np.zeros(len(data.ms))
    whole = data.ms + data.host
    for fold in range(int(data.fold.max()) + 1):
        out = data.fold == fold
        rest, left = data.only(data.kept & ~out), data.only(out)
        without = _descend(best, start, rest, knots)
        estimated = _estimate(without, left, knots) + _host_ms(_host(rest), left)
        unseen[out] = estimated / whole[out] - 1.0
    # Six digits are far more than measurements hold, and make a profile that people can read.
    values = [0.0 if value <= 2 * NONE else float(f"{value:.6g}") for value in _values(best)]
    if not data.features.behind.any():
        values[NAMES.index("skew")] = 0.0
    coefficients = dict(zip(NAMES, values, strict=True))
    if data.apart:
        coefficients |= {name: float(f"{value:.6g}") for name, value in zip(HOST, _host(data), strict=True)}
    factors = [float(f"{value:.6g}") for value in np.exp(_curve(best, knots))]
    curves = [np.exp(spread @ np.log(factors)) for spread in _spreads(data.features, knots)]
    estimated = data.total(estimate(values, data.features, *curves)) + _host_ms(_host(data), data)
    return Fit(
        Coefficients(**coefficients),
        dict(zip(knots, factors, strict=True)),
        tuple((estimated / whole - 1.0).tolist()),
        tuple(unseen.tolist()),
    )


def _host(data: _Rows) -> Floats:
    """Host time of a pass, per sequence of it, and of one with prompts, from the passes that have it apart; none negative."""
    free = np.ones(len(HOST), dtype=np.bool_)
    solution = np.zeros(len(HOST))
    if not data.apart:
        return solution
    known = data.only(data.hosted)
    features, weight, host = known.features, known.weight, known.host
    each = (np.ones(len(features.sequences)), features.sequences, features.launched)
    parts = np.stack([known.total(part) for part in each], axis=1)
    trust = weight.copy()
    for _ in range(HOST_ROUNDS):
        scale = np.sqrt(trust)[:, None]
        solution = np.zeros(len(HOST))
        solution[free] = np.linalg.lstsq(parts[:, free] * scale, host * scale[:, 0], rcond=None)[0]
        if (solution < 0).any():
            free &= solution >= 0
            continue
        trust = weight / (1.0 + ((host - parts @ solution) / HOST_SCALE) ** 2)
    return np.maximum(solution, 0.0)


def _host_ms(host: Floats, data: _Rows) -> Floats:
    """Return the host's addition to each measurement that has its time apart."""
    if not data.apart:
        return np.zeros(len(data.ms))
    features = data.features
    added = data.total(host[0] + host[1] * features.sequences + host[2] * features.launched)
    return np.where(data.hosted, added, 0.0)


def _spreads(features: Features, knots: tuple[int, ...]) -> list[Floats]:
    """For each pass, the shares of the knots that its tokens lie between, as it was and without its cached part."""
    return [_spread(tokens, knots) for tokens in (features.tokens, features.tokens + features.cached) if knots]


def _spread(tokens: Floats, knots: tuple[int, ...]) -> Floats:
    position = np.log2(np.maximum(tokens, 1.0))  # a pass without tokens is at the first knot
    return np.stack([np.interp(position, np.log2(knots), unit) for unit in np.eye(len(knots))], axis=1)


def _values(point: Floats) -> Floats:
    """Return coefficients of a point of the search: logarithms, but for the blend, which stays above 1.

    A prompt beside decode steps never makes these cheaper.
    """
    values: Floats = np.exp(point[: len(NAMES)])
    values[BLEND] = 1.0 + min(values[BLEND], SHARPEST)
    values[MIXED_DECODE] = max(1.0, values[MIXED_DECODE])
    return values


def _curve(point: Floats, knots: tuple[int, ...]) -> Floats:
    """Return logarithms of the curve's factors of a point of the search: none so far below the last that more
    tokens take less.
    """
    factors = point[len(NAMES) :].copy()
    if knots:
        values = _values(point)
        weights, token, blend = (float(values[NAMES.index(name)]) for name in ("weights", "token", "blend"))
        for place, (low, high) in enumerate(pairwise(knots)):
            # By how many percent the work without the curve grows with one percent of tokens: least at the lower end.
            growth = 1.0 / (1.0 + (weights / (token * low)) ** blend)
            factors[place + 1] = max(factors[place + 1], factors[place] - growth * float(np.log(high / low)))
    return factors


def _estimate(point: Floats, data: _Rows, knots: tuple[int, ...], spreads: Sequence[Floats] | None = None) -> Floats:
    if not knots:
        return data.total(estimate(_values(point), data.features))
    spreads = _spreads(data.features, knots) if spreads is None else spreads
    factors = _curve(point, knots)
    return data.total(estimate(_values(point), data.features, *(np.exp(spread @ factors) for spread in spreads)))


def _first_guess(rows: Sequence[Measurement], apart: bool) -> Floats:
    """Return a point of the search with rough values, by what each kind of pass shows at its extremes."""
    prompts = [row for row in rows if row.prefills]
    steps = [row for row in rows if row.batch]
    each = {id(row): row.ms / (1.0 + sum(count for count, _ in row.others)) for row in rows}
    weights = min(each[id(row)] for row in steps)
    token = min(row.ms / (sum(new for new, _ in row.prefills) + row.batch) for row in prompts)
    largest = max(steps, key=lambda row: row.context)
    context = max(each[id(largest)] - weights, 0.1 * each[id(largest)]) / largest.context
    guess = {
        "weights": weights,
        "token": token,
        "blend": 1.0,  # above 1
        "sequence": 0.05 * token,
        "attention": token / 30_000,
        "past_attention": token / 30_000,
        "past_read": 4 * context,
        "past_copy": 4 * context,
        "launch": 0.8 * min(each[id(row)] for row in prompts),
        "past_launch": 0.1 * weights,
        "context": context,
        "mixed_launch": 0.1 * weights,
        "mixed_decode": 1.0,
        "skew": 0.02,
        "host": NONE if apart else 0.02 * weights,
        "host_sequence": NONE,
        "host_prompts": NONE,
    }
    return np.log([guess[name] for name in NAMES])


def _descend(start: Floats, guess: Floats, data: _Rows, knots: tuple[int, ...]) -> Floats:
    """Levenberg and Marquardt's method, reweighted each round for the loss."""
    hold = np.where(np.arange(len(start)) < len(NAMES), HOLD, CURVE_HOLD)
    hold[guess <= np.log(2 * NONE)] = PINNED
    free = np.flatnonzero(hold < PINNED)
    spreads = _spreads(data.features, knots)
    weight, logs = data.weight, np.log(data.ms)

    def errors(point: Floats) -> Floats:
        return np.asarray(np.log(_estimate(point, data, knots, spreads)) - logs)

    def loss(off: Floats, point: Floats) -> float:
        return float((weight * np.log1p((off / SCALE) ** 2)).sum() + (hold * (point - guess) ** 2).sum())

    point, damping, step = start.copy(), 1e-2, 1e-5
    off = errors(point)
    now = loss(off, point)
    for _ in range(ROUNDS):
        slope = np.zeros((len(off), len(point)))
        for column in free:
            moved = point.copy()
            moved[column] += step
            slope[:, column] = (errors(moved) - off) / step
        trust = weight / (SCALE**2 + off**2)
        curve = slope.T @ (trust[:, None] * slope) + np.diag(hold)
        down = -(slope.T @ (trust * off)) - hold * (point - guess)
        for _ in range(12):
            move = np.clip(np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down), -0.7, 0.7)
            next_off = errors(point + move)
            then = loss(next_off, point + move)
            if then < now:
                break
            damping *= 4.0
        else:
            break
        gained, now = now - then, then
        point, off, damping = point + move, next_off, max(damping / 3.0, 1e-9)
        if gained < ENOUGH:
            break
    return point
