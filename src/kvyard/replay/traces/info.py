"""Contents of a trace: number of requests, lengths, rate, and the reuse that a cache could have. One pass over it."""

from array import array
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from kvyard.blocks import NO_HINTS
from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.replay.traces.bounds import Accesses, belady, infinite, lru
from kvyard.replay.traces.hinting import count_hints
from kvyard.replay.traces.identity import TOKEN_BLOCK, prefix_ids
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
"""Cache sizes in blocks that are looked at if no others are named."""
CURVE_POINTS = 60
BEST_POINTS = 15
WINDOWS = 120
"""Number of windows in which the rate is counted."""


class LengthSpread(msgspec.Struct, frozen=True):
    """Distribution of a number over requests."""

    total: int
    mean: float
    min: int
    p50: float
    p90: float
    p95: float
    p99: float
    max: int
    std: float


class Capacity(msgspec.Struct, frozen=True):
    """Hits of a cache of a given size. Shares are of all prompt blocks."""

    blocks: int
    lru: float
    belady: float


class Reuse(msgspec.Struct, frozen=True):
    """Shared parts of prompts, by the clockless model of ``bounds``."""

    block_size: int
    """Tokens to a block."""
    blocks: int
    """Prompt blocks looked up, the denominator of shares of blocks."""
    unique: int
    infinite_blocks: float
    """Blocks hit of all blocks, with room for everything."""
    infinite_tokens: float
    """Prompt tokens in blocks hit, of all prompt tokens."""
    capacities: list[Capacity]
    curve: list[tuple[int, float]]
    """LRU's share of hits by cache size in blocks, up to where it gains nothing more."""
    best: list[tuple[int, float]]
    """Best possible shares, for fewer sizes."""
    distances: list[tuple[int, float]]
    """Share of the blocks used again with at most this many different blocks touched in between."""
    median_session_tokens: float | None = None
    """The middle session's share of prompt tokens hit, where there are sessions."""
    unknown: int = 0
    """Requests of which nothing is known; they are left out of all this."""


class Info(msgspec.Struct, frozen=True):
    """A trace in numbers."""

    name: str
    format: str
    requests: int
    input: LengthSpread
    output: LengthSpread
    duration: float
    """Seconds from the first arrival to the last, of requests that have one of their own."""
    rate: float | None
    """Requests that arrive by themselves, per second of that."""
    peak: float | None
    """The most of them in any of the windows, per second."""
    burstiness: float | None
    """Standard deviation of their gaps over the mean: 1 for Poisson, more for bursts."""
    window: float
    """Seconds."""
    arrivals: list[int]
    """Requests that arrive by themselves, by window."""
    arriving_tokens: list[int]
    """Their prompt tokens."""
    sessions: int = 0
    """With sub-agents as part of those that called them."""
    tool_calls: int = 0
    """Requests whose answer called a tool, as far as the trace says it."""
    hints: dict[str, int] = {}
    """Requests with hints, by what those say."""
    waiting: int = 0
    """Requests that start a while after others end, whatever the clock says."""
    think: LengthSpread | None = None
    """Think time, in milliseconds."""
    reuse: Reuse | None = None
    """None where the trace doesn't say what prompts share."""
    skipped: int = 0
    skipped_examples: list[str] = []
    left_out: dict[str, int] = {}
    lengths: dict[str, list[tuple[float, int]]] = {}
    """Requests by length, in steps that double every four: upper ends and counts."""


def describe(
    trace: Trace, capacities: Iterable[int] = CAPACITIES, *, token_block: int = TOKEN_BLOCK, bounds: bool = True
) -> Info:
    """Return a trace in numbers. ``capacities`` are cache sizes in blocks; without ``bounds`` reuse isn't looked at.

    Raises ``KvyardError`` at a bad row, at ids that aren't cumulative, and where ids stand for different numbers of tokens.
    """
    counts = _TraceCounts(trace.name)
    for request in trace:
        counts.add(request)
        if bounds:
            counts.look_up(request, token_block)
    return counts.info(trace, list(capacities))


class _TraceCounts:
    """Everything that ``describe`` counts, gathered in one pass."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs, self._outputs, self._thinks = array("q"), array("q"), array("q")
        self._arrivals, self._arriving = array("q"), array("q")
        """Of requests that wait for no other: when they come, and their prompts' tokens."""
        self._sessions: dict[str, int] = {}
        """Their numbers."""
        self._session_hits, self._session_tokens = array("q"), array("q")
        self._accesses = Accesses()
        self._size = self._unknown = self._tool_calls = 0
        self._hints: dict[str, int] = {}

    def add(self, request: TraceRequest) -> None:
        self._inputs.append(request.input_length)
        self._outputs.append(request.output_length)
        if request.delay is None:
            self._arrivals.append(request.arrival)
            self._arriving.append(request.input_length)
        else:
            self._thinks.append(request.delay // 1_000_000)
        self._tool_calls += request.tool_call
        if request.hints is not NO_HINTS:
            count_hints(request.hints, self._hints)
        if self._session_of(request) == len(self._session_hits):
            self._session_hits.append(0)
            self._session_tokens.append(0)

    def look_up(self, request: TraceRequest, token_block: int) -> None:
        """Look up an added request's prompt in a cache without end."""
        ids, per_id = prefix_ids(request, token_block)
        if ids is None:
            self._unknown += 1
            return
        self._size = self._size or per_id
        if per_id != self._size:
            raise KvyardError(
                f"{self._name}: ids stand for {per_id} tokens in request {request.id}, for {self._size} before"
            )
        hit = self._accesses.add(ids, request.input_length, per_id)
        session = self._session_of(request)
        if session is not None:
            self._session_hits[session] += min(hit * per_id, request.input_length)
            self._session_tokens[session] += request.input_length

    def _session_of(self, request: TraceRequest) -> int | None:
        root = request.root or request.session
        return None if root is None else self._sessions.setdefault(root, len(self._sessions))

    def info(self, trace: Trace, capacities: list[int]) -> Info:
        """Return the description of ``trace``, once all of it was added."""
        reuse = None
        if self._accesses.prompts:
            pairs = zip(self._session_hits, self._session_tokens, strict=True)
            shares = [hit / tokens for hit, tokens in pairs if tokens]
            reuse = _reuse(self._accesses, self._size, capacities, median(shares) if shares else None, self._unknown)
        tally, arrivals = trace.tally, self._arrivals
        duration = arrivals[-1] if arrivals else 0
        window, counts, tokens = _windows(arrivals, self._arriving, duration)
        return Info(
            name=trace.name,
            format=trace.format,
            requests=len(self._inputs),
            input=spread(self._inputs),
            output=spread(self._outputs),
            duration=duration / SECOND,
            rate=len(arrivals) * SECOND / duration if duration else None,
            peak=max(counts) / window if counts else None,
            burstiness=_burstiness(arrivals),
            window=window,
            arrivals=counts,
            arriving_tokens=tokens,
            sessions=len(self._sessions),
            tool_calls=self._tool_calls,
            hints=self._hints,
            waiting=len(self._thinks),
            think=spread(self._thinks) if self._thinks else None,
            reuse=reuse,
            skipped=tally.skipped,
            skipped_examples=tally.examples,
            left_out=dict(tally.left_out),
            lengths={"input": _histogram(self._inputs), "output": _histogram(self._outputs)},
        )


def spread(values: Sequence[int]) -> LengthSpread:
    """Return the distribution of numbers. Percentiles are interpolated between neighbours. Raises ``ValueError`` for none."""
    import numpy

    numbers = numpy.asarray(values, dtype=numpy.int64)
    p50, p90, p95, p99 = (float(p) for p in numpy.percentile(numbers, (50, 90, 95, 99)))
    total = int(numbers.sum())
    return LengthSpread(
        total=total,
        mean=total / len(numbers),
        min=int(numbers.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=int(numbers.max()),
        std=float(numbers.std()),
    )


def _reuse(accesses: Accesses, size: int, capacities: list[int], session: float | None, unknown: int) -> Reuse:
    everything = infinite(accesses)
    blocks = accesses.blocks
    farthest = max(accesses.distance, default=0) + 1
    points, fewer = _steps(farthest, CURVE_POINTS), _steps(farthest, BEST_POINTS)
    curve = [(point, hits.share) for point, hits in zip(points, lru(accesses, points), strict=True)]
    return Reuse(
        block_size=size,
        blocks=blocks,
        unique=accesses.unique,
        infinite_blocks=everything.share,
        infinite_tokens=everything.token_share,
        capacities=[
            Capacity(capacity, hits.share, best / blocks)
            for capacity, hits, best in zip(
                capacities, lru(accesses, capacities), belady(accesses, capacities), strict=True
            )
        ],
        curve=curve,
        best=[(point, hits / blocks) for point, hits in zip(fewer, belady(accesses, fewer), strict=True)],
        distances=[(point - 1, share / everything.share) for point, share in curve] if everything.blocks else [],
        median_session_tokens=session,
        unknown=unknown,
    )


def _steps(farthest: int, count: int) -> list[int]:
    """Cache sizes from 1 to ``farthest``, in equal ratios."""
    return sorted({round(farthest ** (step / count)) for step in range(count + 1)})


def _windows(arrivals: Sequence[int], tokens: Sequence[int], duration: int) -> tuple[float, list[int], list[int]]:
    if not duration:
        return 0.0, [], []
    width = ceil_div(duration + 1, WINDOWS)
    counts, sums = [0] * WINDOWS, [0] * WINDOWS
    for arrival, length in zip(arrivals, tokens, strict=True):
        counts[arrival // width] += 1
        sums[arrival // width] += length
    used = duration // width + 1
    return width / SECOND, counts[:used], sums[:used]


def _burstiness(arrivals: Sequence[int]) -> float | None:
    import numpy

    gaps = numpy.diff(numpy.asarray(arrivals, dtype=numpy.int64))
    if len(gaps) < 2 or not gaps.any():
        return None
    return float(gaps.std() / gaps.mean())


def _histogram(lengths: Sequence[int]) -> list[tuple[float, int]]:
    import numpy

    sizes = numpy.maximum(numpy.asarray(lengths, dtype=numpy.int64), 1)
    steps = numpy.ceil(numpy.log2(sizes) * 4).astype(int)
    return [(float(2 ** (step / 4)), int(count)) for step, count in enumerate(numpy.bincount(steps)) if count]
