"""Speed of a worker, as a router sees it: time to compute, load and decode there, in milliseconds.

A replay knows, since it has the worker's own timing model (``ModelPace``). A gateway begins with one number, prompt tokens
per second, and learns the rest from the times to first token that it sees (``LearntPace``), and which workers differ from
the others (``RelativePace``).
"""

from collections.abc import Sequence
from math import exp, log
from typing import ClassVar, Protocol

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import make_timing
from kvyard.engine.timing.model import NS_PER_MS, TimingModel
from kvyard.engine.timing.polynomial_model import PolynomialModel
from kvyard.index.bits import bits
from kvyard.integers import ceil_div

PEAK_TOKENS_PER_S = 15_928.0
"""Prompt tokens per second that llm-d's router assumes of an engine before it was measured."""
_STEP = 256


class Pace(Protocol):
    """Speed of one worker for a policy. Estimates, cheap to compute; they don't describe a single pass."""

    capacity: int | None
    """Blocks on the device; ``None`` if that isn't known."""

    @property
    def least_per_token(self) -> float:
        """Lower bound of the milliseconds per prompt token in any pass; 0 if unknown."""

    @property
    def least_step(self) -> float:
        """Milliseconds that no pass that decodes takes less than; 0 if that isn't known."""

    def prefill(self, tokens: int) -> float:
        """Return the time to compute ``tokens`` prompt tokens, in as few passes as they need; 0 for none."""

    def past(self, tokens: int, cached: int) -> float:
        """Return the time added by attention to ``cached`` tokens before those that are computed, and to each other over
        several passes.
        """

    def passes(self, tokens: int) -> int:
        """Return the number of passes that compute ``tokens`` prompt tokens."""

    def load(self, blocks: Sequence[int]) -> float:
        """Return the time to load ``blocks``, per tier below the device, closest first."""

    def step(self, requests: int, context: int) -> float:
        """Return the time of one pass that decodes ``requests`` requests with ``context`` tokens of context in all."""

    def observe(self, tokens: int, ms: float, pairs: int = 0) -> None:
        """A prompt's first token came ``ms`` after its turn had begun, with ``tokens`` to compute that attend to others
        ``pairs`` times in all.
        """


class ModelPace:
    """By a timing model: that of the worker itself."""

    def __init__(
        self, timing: TimingModel, tokens_per_pass: int, capacity: int, loads: Sequence[tuple[float, float]] = ()
    ) -> None:
        """``loads`` has, per tier below the device, the milliseconds until a first block comes and those of each block."""
        self.capacity: int | None = capacity
        self._timing = timing
        self._loads = loads
        steps = max(1, ceil_div(tokens_per_pass, _STEP))
        self._step = tokens_per_pass / steps
        self._times = [0.0] + [
            timing.pass_ns([(round(number * self._step), 0)], 0, 0, 0) / NS_PER_MS for number in range(1, steps + 1)
        ]
        """Duration of one pass, by its tokens in steps. The line from no tokens to the first step begins at a pass's fixed
        cost."""
        self._fixed = max(0.0, 2 * self._times[1] - self._times[2]) if steps > 1 else 0.0
        self._full = self._times[-1]
        slopes = [(after - before) / self._step for before, after in zip(self._times[1:], self._times[2:])]
        self.least_per_token = max(0.0, min([(self._times[1] - self._fixed) / self._step, *slopes]))
        """No token takes less, whatever it is computed with."""
        # A longer context never makes a pass of the polynomial shorter; of other models that isn't certain.
        self.least_step = timing.pass_ns((), 1, 0, 0) / NS_PER_MS if isinstance(timing, PolynomialModel) else 0.0
        """No pass that decodes takes less."""
        self._per_pass = tokens_per_pass
        far = timing.pass_ns([(tokens_per_pass, 8 * tokens_per_pass)], 0, 0, 0) / NS_PER_MS
        self._past: dict[tuple[int, int], float] | None = {} if far > self._full else None
        """By tokens and cached ones in steps, as far as it was asked for; ``None`` if nothing is added."""

    @property
    def per_token(self) -> float:
        """Return the time per token of a full pass."""
        return self._full / self._per_pass

    def prefill(self, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        passes, rest = divmod(tokens, self._per_pass)
        ms = passes * self._full
        if rest:
            index, part = divmod(rest, self._step)
            low = int(index)
            before = self._times[low] if low else self._fixed
            ms += before + (self._times[low + 1] - before) * part / self._step
        return ms

    def past(self, tokens: int, cached: int) -> float:
        known = self._past
        if known is None or tokens <= 0:
            return 0.0
        rounded = (ceil_div(tokens, _STEP) * _STEP, cached // _STEP * _STEP)
        ms = known.get(rounded)
        if ms is None:
            left, done, ms = rounded[0], rounded[1], 0.0
            while left:
                part = min(left, self._per_pass)
                ns = self._timing.pass_ns([(part, done)], 0, 0, 0) - self._timing.pass_ns([(part, 0)], 0, 0, 0)
                ms += ns / NS_PER_MS
                left, done = left - part, done + part
            known[rounded] = ms
        return ms

    def passes(self, tokens: int) -> int:
        return ceil_div(tokens, self._per_pass)

    def load(self, blocks: Sequence[int]) -> float:
        return sum((first + each * count for (first, each), count in zip(self._loads, blocks) if count), 0.0)

    def step(self, requests: int, context: int) -> float:
        if not requests:
            return 0.0
        return self._timing.pass_ns((), requests, context, context // requests) / NS_PER_MS

    def observe(self, tokens: int, ms: float, pairs: int = 0) -> None:
        """Learn nothing: the model is the worker's own."""


def engine_pace(config: EngineConfig) -> ModelPace:
    """Return the pace of an engine, from its own configuration."""
    block_bytes = config.bytes_per_block or 0
    loads = []
    for _, tier in config.tiers.levels if config.tiers is not None else ():
        lane = tier.link.inward
        limits = [limit for limit in (lane.bandwidth, lane.client_bandwidth, tier.link.duplex_bandwidth) if limit]
        each = (block_bytes + lane.piece_overhead) / min(limits) * 1e3 if limits else 0.0
        loads.append((lane.first_byte_ns / NS_PER_MS, each))
    timing = make_timing(config.timing, config.capacity_tokens)
    return ModelPace(timing, config.tokens_per_pass, config.num_gpu_blocks, loads)


def pairs_of(tokens: int, cached: int) -> int:
    """Return the number of token pairs: ``tokens`` attend to the ``cached`` ones before them, and to each other."""
    return tokens * cached + tokens * tokens // 2


class LearntPace:
    """Pace learned from observed times to first token: a fixed part, a part per computed token, and a part per pair of
    tokens that attends; newer observations count more.

    It starts as ``PEAK_TOKENS_PER_S``, which weighs as much as a few requests of that speed. A time far beyond the expected
    one, such as a stall, counts as ``OUTLIER`` times the expectation.
    """

    OUTLIER = 8.0
    _KEPT = 0.98
    _MOST_MS = 600_000.0
    _FAR = 8192.0
    """Unit in which pairs are counted, so that all figures are of similar size."""

    def __init__(self, tokens_per_s: float = PEAK_TOKENS_PER_S) -> None:
        self.capacity: int | None = None
        self.fixed = 0.0
        """Milliseconds of a prompt however short."""
        self.per_token = 1e3 / tokens_per_s
        self.least_per_token = 0.0
        """Set by the ``PaceBook``, which sees to it that it holds."""
        self.least_step = 0.0
        self.per_pair = 0.0
        # Weighted sums of 1, x, p, y, xx, xp, pp, xy, py: made-up requests of the speed that it starts with.
        self._sums = [0.0] * 9
        for tokens, cached in ((256, 0), (2048, 0), (256, 8192)):
            self._add(float(tokens), pairs_of(tokens, cached) / self._FAR, self.per_token * tokens)

    def prefill(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens > 0 else 0.0

    def past(self, tokens: int, cached: int) -> float:
        return self.per_pair * pairs_of(tokens, cached) if tokens > 0 else 0.0

    def passes(self, tokens: int) -> int:
        """Unknown to a gateway: observed times include these passes."""
        return 1

    def load(self, blocks: Sequence[int]) -> float:
        """Unknown to a gateway: observed times include loads."""
        return 0.0

    def step(self, requests: int, context: int) -> float:
        """Unknown from here."""
        return 0.0

    def observe(self, tokens: int, ms: float, pairs: int = 0) -> None:
        if tokens <= 0 or not 0 <= ms <= self._MOST_MS:
            return
        self._sums = [self._KEPT * part for part in self._sums]
        expected = self.prefill(tokens) + self.per_pair * pairs
        self._add(float(tokens), pairs / self._FAR, min(ms, self.OUTLIER * expected))
        fixed, slope, bend = self._plane()
        self.fixed, self.per_token, self.per_pair = fixed, slope, bend / self._FAR

    def copy(self) -> "LearntPace":
        """Return a copy that learns on its own from now on."""
        copied = LearntPace()
        copied.fixed, copied.per_token, copied.per_pair, copied._sums = (
            self.fixed,
            self.per_token,
            self.per_pair,
            self._sums[:],
        )
        return copied

    def _plane(self) -> tuple[float, float, float]:
        """Least squares without negative coefficients: those are left out."""
        weight, x, p, y, xx, xp, pp, xy, py = self._sums
        # About their means; then through the origin.
        centred = (
            weight * xx - x * x,
            weight * xp - x * p,
            weight * pp - p * p,
            weight * xy - x * y,
            weight * py - p * y,
        )
        slope, bend = _solved(*centred)
        fixed = (y - slope * x - bend * p) / weight
        if slope > 0 and fixed >= 0:
            return fixed, slope, bend
        slope, bend = _solved(xx, xp, pp, xy, py)
        return 0.0, slope, bend

    def _add(self, tokens: float, pairs: float, ms: float) -> None:
        x, p, y = tokens, pairs, ms
        for index, part in enumerate((1.0, x, p, y, x * x, x * p, p * p, x * y, p * y)):
            self._sums[index] += part


def _solved(xx: float, xp: float, pp: float, xy: float, py: float) -> tuple[float, float]:
    """Return the two factors of least squares; of one alone where the two can't be separated or one would be negative."""
    apart = xx * pp - xp * xp
    if apart > 1e-6 * xx * pp:
        slope, bend = (pp * xy - xp * py) / apart, (xx * py - xp * xy) / apart
        if slope > 0 and bend >= 0:
            return slope, bend
    return (xy / xx if xx > 0 else 0.0), 0.0


class RelativePace:
    """Usual pace of a fleet, times a factor for a worker that is clearly slower or faster.

    One worker's times to first token are few and noisy, and engines of one fleet are mostly alike: by its own times alone a
    worker would seem slow whenever the machine was held up, and others would compute what it had cached. So a difference
    counts as far as it exceeds what chance does: two standard errors, of logarithms, so that one stall doesn't weigh more
    than many usual times.
    """

    _KEPT = 0.98
    _FEWEST = 8.0
    """Times that have to be seen before any difference counts."""
    TRIAL: ClassVar[int] = 8
    """First tokens of the fleet after which a worker that seemed slow is tried again; twice as many after a trial in vain."""
    FORGOTTEN: ClassVar[int] = 200
    """Most of these first tokens. After as many, all other observations of a worker are discarded."""

    def __init__(self, usual: LearntPace) -> None:
        self.capacity: int | None = None
        self.least_step = 0.0
        self._usual = usual
        self.reset()

    def reset(self) -> None:
        """Discard all differences."""
        self.factor = 1.0
        self._patience = self.TRIAL
        """First tokens of the fleet after which it is tried again, if it wasn't seen since."""
        self._like: RelativePace | None = None
        """The worker that it counts as while it is tried,"""
        self._doubt = 0.0
        """and the logarithm of the factor from which on it still seems slow."""
        self._weight = 0.0
        self._sum = 0.0
        self._squares = 0.0

    @property
    def least_per_token(self) -> float:
        """The usual worker's: it holds while this one doesn't differ."""
        return self._usual.least_per_token

    def prefill(self, tokens: int) -> float:
        return self.factor * self._usual.prefill(tokens)

    def past(self, tokens: int, cached: int) -> float:
        return self.factor * self._usual.past(tokens, cached)

    def passes(self, tokens: int) -> int:
        return self._usual.passes(tokens)

    def load(self, blocks: Sequence[int]) -> float:
        return self._usual.load(blocks)

    def step(self, requests: int, context: int) -> float:
        return self._usual.step(requests, context)

    def observe(self, tokens: int, ms: float, pairs: int = 0) -> None:
        """By ``compared``: a time says little without the fleet's."""

    def is_due(self, unseen: int) -> bool:
        """True if the fleet had enough first tokens without this worker, ``unseen``, for it to be tried again."""
        return unseen > (self._patience if self.factor > 1.0 else self.FORGOTTEN)

    def try_like(self, other: "RelativePace") -> None:
        """Count as ``other`` until the next first token, which decides whether it still seems slow."""
        self._doubt = (log(self.factor) + log(other.factor)) / 2
        self._patience = min(2 * self._patience, self.FORGOTTEN)
        self._like = other
        self.factor = other.factor

    def _end_trial(self, like: "RelativePace", difference: float) -> None:
        self._like = None
        if difference < self._doubt:
            self._weight, self._sum, self._squares = like._weight, like._sum, like._squares
            self._patience = self.TRIAL

    def compared(self, difference: float) -> None:
        """A first token took ``exp(difference)`` times as long as is usual at this time."""
        if self._like is not None:
            self._end_trial(self._like, difference)
        self._weight = self._KEPT * self._weight + 1.0
        self._sum = self._KEPT * self._sum + difference
        self._squares = self._KEPT * self._squares + difference * difference
        if self._weight < self._FEWEST:
            self.factor = 1.0
            return
        mean = self._sum / self._weight
        chance = 4.0 * max(0.0, self._squares / self._weight - mean * mean) / self._weight
        self.factor = exp(mean * (1.0 - chance / (mean * mean))) if mean * mean > chance else 1.0


class PaceBook:
    """The paces of all workers, by slot. Those that aren't given are learnt.

    A worker that once seemed slow would get no requests as long as others are idle, and so could never show that it isn't.
    So one that wasn't seen for some first tokens of the fleet is tried again.
    """

    _KEPT = 0.98
    _SLOWER = 2.0

    def __init__(self) -> None:
        self.all: list[Pace] = []
        self._usual = LearntPace()
        """By what was seen of all that are learnt."""
        self._learnt: dict[int, RelativePace] = {}
        """By slot."""
        self._level = 0.0
        """Recent ratio of observed to expected times to first token, as a logarithm: common to all workers."""
        self._seen: list[int] = []
        """By slot, at which first token of the fleet it was seen last; -1 where the pace was given."""
        self._count = 0
        self._alike = 0
        """Slots, as bits, that are learnt and as fast as the usual one,"""
        self._apart = 0
        """and those that differ from it."""
        self._given: list[tuple[Pace, int]] | None = None
        self._speeds: list[tuple[Pace, int]] | None = None

    def put(self, slot: int, pace: Pace | None) -> None:
        """A worker takes ``slot``, the next one or one that is free; without a pace it starts as the usual one."""
        if slot == len(self.all):
            self.all.append(self._usual)
            self._seen.append(-1)
        known, bit = self._learnt.get(slot), 1 << slot
        self._alike ^= self._alike & bit
        self._apart ^= self._apart & bit
        if pace is None:
            self.all[slot] = self._learnt[slot] = RelativePace(self._usual)
            self._seen[slot] = self._count
            self._alike |= bit
            if known is None:
                self._given = None
        else:
            self.all[slot] = pace
            self._learnt.pop(slot, None)
            self._seen[slot] = -1
            self._given = None
        self._speeds = None

    @property
    def speeds(self) -> list[tuple[Pace, int]]:
        """Slots, as bits, by their pace. One that is learnt and doesn't clearly differ has the usual pace, to the bit."""
        if self._speeds is None:
            if self._given is None:
                self._given = self._by_pace()
            self._speeds = [*self._given, *[(self.all[slot], 1 << slot) for slot in bits(self._apart)]]
            if self._alike:
                self._speeds.append((self._usual, self._alike))
        return self._speeds

    def _by_pace(self) -> list[tuple[Pace, int]]:
        """Slots, as bits, by the pace that they were given."""
        paces: list[tuple[Pace, int]] = []
        places: dict[int, int] = {}
        for slot, pace in enumerate(self.all):
            if slot not in self._learnt:
                place = places.setdefault(id(pace), len(paces))
                if place == len(paces):
                    paces.append((pace, 0))
                paces[place] = (pace, paces[place][1] | 1 << slot)
        return paces

    def set_floor(self) -> None:
        """Set ``least_per_token`` of the learnt paces from their current values."""
        self._usual.least_per_token = self._usual.per_token / self._SLOWER

    @property
    def is_above_floor(self) -> bool:
        """True if ``least_per_token`` of the learnt paces still holds: they may turn out to be faster."""
        return not self._alike or self._usual.per_token >= self._usual.least_per_token

    def observe(self, slot: int, tokens: int, ms: float, pairs: int) -> None:
        """``Pace.observe`` of that worker."""
        own = self._learnt.get(slot)
        if own is None:
            self.all[slot].observe(tokens, ms, pairs)
            return
        usual = self._usual
        expected = usual.prefill(tokens) + usual.per_pair * pairs
        if expected > 0 and ms > 0:
            most = usual.OUTLIER
            x = log(max(1.0 / most, min(most, ms / expected)))
            was = own.factor == 1.0
            own.compared(x - self._level)
            if was != (own.factor == 1.0):
                self._alike ^= 1 << slot
                self._apart ^= 1 << slot
                self._speeds = None
            self._level = self._KEPT * self._level + (1.0 - self._KEPT) * x
        usual.observe(tokens, ms, pairs)
        self._count += 1
        self._seen[slot] = self._count
        other = self._count % len(self.all)  # each in its turn
        if self._seen[other] >= 0 and self._learnt[other].is_due(self._count - self._seen[other]):
            self._try_again(other)

    def _try_again(self, slot: int) -> None:
        """The worker wasn't seen for long: count it as the fastest one if it seemed slow, else as the usual one."""
        own = self._learnt[slot]
        if own.factor > 1.0:
            own.try_like(min(self._learnt.values(), key=lambda pace: pace.factor))
        else:
            own.reset()
        self._seen[slot] = self._count
        differs = own.factor != 1.0
        if differs != (self._apart >> slot & 1):
            self._alike ^= 1 << slot
            self._apart ^= 1 << slot
            self._speeds = None
