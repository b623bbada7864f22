"""How fast a worker is, as a router sees it: what computing, loading and decoding take there, in milliseconds.

A replay knows, since it has the worker's own timing model (``ModelPace``). A gateway begins with one number, prompt tokens
per second, and learns the rest from the times to first token that it sees (``LearntPace``).
"""

from collections.abc import Sequence
from typing import Protocol

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import make_timing
from kvyard.engine.timing.model import NS_PER_MS, TimingModel

PEAK_TOKENS_PER_S = 15_928.0
"""What llm-d's router assumes of an engine before it was measured: prompt tokens per second."""
_STEP = 256


class Pace(Protocol):
    """What a policy may ask of one worker. Estimates: they say nothing of one pass, and cost little to ask."""

    capacity: int | None
    """Blocks on the device; ``None`` where that isn't known."""

    def prefill(self, tokens: int) -> float:
        """Computing so many prompt tokens, in as few passes as they need; 0 for none."""

    def past(self, tokens: int, cached: int) -> float:
        """What is added by attention to ``cached`` tokens before those that are computed, and to each other over several
        passes.
        """

    def passes(self, tokens: int) -> int:
        """In how many passes so many prompt tokens are computed."""

    def load(self, blocks: Sequence[int]) -> float:
        """Loading so many blocks, per tier below the device, closest first."""

    def step(self, requests: int, context: int) -> float:
        """One pass that decodes so many requests with so many tokens of context in all."""

    def observe(self, tokens: int, ms: float) -> None:
        """A first token came ``ms`` after it was asked for, with ``tokens`` to compute until then, those before it included."""


class ModelPace:
    """By a timing model: that of the worker itself."""

    def __init__(
        self, timing: TimingModel, tokens_per_pass: int, capacity: int, loads: Sequence[tuple[float, float]] = ()
    ) -> None:
        """``loads`` has, per tier below the device, the milliseconds until a first block comes and those of each block."""
        self.capacity: int | None = capacity
        self._timing = timing
        self._loads = loads
        steps = max(1, -(-tokens_per_pass // _STEP))
        self._step = tokens_per_pass / steps
        self._times = [0.0] + [
            timing.pass_ns([(round(at * self._step), 0)], 0, 0, 0) / NS_PER_MS for at in range(1, steps + 1)
        ]
        """Of one pass, by its tokens in steps. The line from no tokens to the first step begins at a pass's fixed cost."""
        self._fixed = max(0.0, 2 * self._times[1] - self._times[2]) if steps > 1 else 0.0
        self._full = self._times[-1]
        self._per_pass = tokens_per_pass
        far = timing.pass_ns([(tokens_per_pass, 8 * tokens_per_pass)], 0, 0, 0) / NS_PER_MS
        self._past: dict[tuple[int, int], float] | None = {} if far > self._full else None
        """By tokens and cached ones in steps, as far as it was asked for; ``None`` where nothing is added."""

    @property
    def per_token(self) -> float:
        """What a token of a full pass takes."""
        return self._full / self._per_pass

    def prefill(self, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        passes, rest = divmod(tokens, self._per_pass)
        ms = passes * self._full
        if rest:
            at, part = divmod(rest, self._step)
            low = int(at)
            before = self._times[low] if low else self._fixed
            ms += before + (self._times[low + 1] - before) * part / self._step
        return ms

    def past(self, tokens: int, cached: int) -> float:
        known = self._past
        if known is None or tokens <= 0:
            return 0.0
        at = (-(-tokens // _STEP) * _STEP, cached // _STEP * _STEP)
        ms = known.get(at)
        if ms is None:
            left, done, ms = at[0], at[1], 0.0
            while left:
                part = min(left, self._per_pass)
                ns = self._timing.pass_ns([(part, done)], 0, 0, 0) - self._timing.pass_ns([(part, 0)], 0, 0, 0)
                ms += ns / NS_PER_MS
                left, done = left - part, done + part
            known[at] = ms
        return ms

    def passes(self, tokens: int) -> int:
        return -(-tokens // self._per_pass)

    def load(self, blocks: Sequence[int]) -> float:
        return sum((first + each * count for (first, each), count in zip(self._loads, blocks) if count), 0.0)

    def step(self, requests: int, context: int) -> float:
        if not requests:
            return 0.0
        return self._timing.pass_ns((), requests, context, context // requests) / NS_PER_MS

    def observe(self, tokens: int, ms: float) -> None:
        """Nothing to learn: the model is the worker's own."""


def engine_pace(config: EngineConfig) -> ModelPace:
    """The pace of an engine, from its own configuration."""
    block_bytes = config.bytes_per_block or 0
    loads = []
    for _, tier in config.tiers.levels if config.tiers is not None else ():
        lane = tier.link.inward
        limits = [limit for limit in (lane.bandwidth, lane.client_bandwidth, tier.link.duplex_bandwidth) if limit]
        each = (block_bytes + lane.piece_overhead) / min(limits) * 1e3 if limits else 0.0
        loads.append((lane.first_byte_ns / NS_PER_MS, each))
    timing = make_timing(config.timing, config.capacity_tokens)
    return ModelPace(timing, config.tokens_per_pass, config.num_gpu_blocks, loads)


class LearntPace:
    """By what was seen: a line through times to first token by tokens to compute, newer ones counting more.

    It starts as ``PEAK_TOKENS_PER_S`` and holds on to that as if it had seen a few requests of that speed. What is far beyond
    the line, a stall say, counts as if it had been ``OUTLIER`` times what was expected.
    """

    OUTLIER = 8.0
    _KEPT = 0.98
    _MOST_MS = 600_000.0

    def __init__(self, tokens_per_s: float = PEAK_TOKENS_PER_S) -> None:
        self.capacity: int | None = None
        self.fixed = 0.0
        """Milliseconds of a prompt however short."""
        self.per_token = 1e3 / tokens_per_s
        # Weighted sums of 1, x, y, xx, xy: two made-up requests on the line that it starts with.
        self._sums = [0.0] * 5
        for tokens in (512.0, 8192.0):
            self._add(tokens, self.per_token * tokens)

    def prefill(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens > 0 else 0.0

    def past(self, tokens: int, cached: int) -> float:
        """Unknown from here."""
        return 0.0

    def passes(self, tokens: int) -> int:
        """Unknown from here: what passes add is in what was seen."""
        return 1

    def load(self, blocks: Sequence[int]) -> float:
        """Unknown from here: loads are in what was seen."""
        return 0.0

    def step(self, requests: int, context: int) -> float:
        """Unknown from here."""
        return 0.0

    def observe(self, tokens: int, ms: float) -> None:
        if tokens <= 0 or not 0 <= ms <= self._MOST_MS:
            return
        self._sums = [self._KEPT * one for one in self._sums]
        self._add(float(tokens), min(ms, self.OUTLIER * self.prefill(tokens)))
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * xx * weight else 0.0
        if slope <= 0:  # all of one length, or noise: a line through nothing
            slope = y / x
        fixed = (y - slope * x) / weight
        self.fixed, self.per_token = (fixed, slope) if fixed > 0 else (0.0, xy / xx)

    def _add(self, tokens: float, ms: float) -> None:
        for at, part in enumerate((1.0, tokens, ms, tokens * tokens, tokens * ms)):
            self._sums[at] += part
