"""Demand of a trace on a fleet, before any replay: lengths, rate, and prompt tokens that no cache can save."""

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces.changes import TOGETHER
from kvyard.replay.traces.identity import prefix_ids
from kvyard.replay.traces.request import TraceRequest

SHARED = 2
"""Requests with an arrival of their own for each stamp, on average, from which on arrivals are bunched ..."""
LEAST_TICK = 10 * TOGETHER / SECOND
"""... if stamps are at least this many seconds apart; closer stamps are a high rate."""
Tokens = npt.NDArray[np.int64]


class Traffic(msgspec.Struct, frozen=True):
    """Requests of a trace, as arrays in its order."""

    inputs: Tokens
    outputs: Tokens
    new: Tokens
    """Tokens of each prompt that no earlier prompt had: an endless cache that all workers share computes these alone."""
    seconds: float
    """From the first arrival to the last; 0 if they aren't on one clock."""
    stamped: int = 0
    """Requests with an arrival of their own; others start after others end."""
    stamps: int = 0
    """Arrivals that are apart, as ``--jitter`` takes them; 0 if they aren't on one clock."""
    tick: float = 0.0
    """Seconds of the trace between two of these: the median."""
    arrivals: Tokens | None = None
    """Nanoseconds since the trace began; ``None`` if they aren't on one clock."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.inputs)

    @property
    def rate(self) -> float:
        """Requests per second; 0 if unknown."""
        return self.requests / self.seconds if self.seconds else 0.0

    def too_long(self, longest: int) -> int:
        """Return the number of prompts that leave no room for an answer in ``longest`` tokens."""
        return int((self.inputs >= longest).sum())

    @property
    def bunched(self) -> bool:
        """True if the arrivals share few stamps: the recorder's clock may have made bursts."""
        return 0 < self.stamps <= self.stamped / SHARED and self.tick >= LEAST_TICK

    def busiest(self, count: int) -> int:
        """Return the place of the first of the ``count`` requests in a row with the most tokens to compute a second; the
        first ones if arrivals aren't on one clock.
        """
        if self.arrivals is None or count >= self.requests:
            return 0
        work = np.concatenate(([0], np.cumsum(self.new + self.outputs)))
        times = np.maximum.accumulate(self.arrivals)
        took = np.maximum(times[count - 1 :] - times[: len(times) - count + 1], 1)
        return int(np.argmax((work[count:] - work[:-count]) / took))

    def __str__(self) -> str:
        return self.text(f"{self.requests:,} requests")

    def text(self, which: str) -> str:
        """Return a description for people; ``which`` names the requests."""
        rate = f", {self.rate:,.2f} a second" if self.rate else ""
        p50, p99 = np.percentile(self.inputs, [50, 99])
        shared = 1 - self.new.sum() / self.inputs.sum()
        return (
            f"{which}{rate}; prompts of {p50:,.0f} tokens (p50) to {p99:,.0f} (p99), answers of "
            f"{self.outputs.mean():,.0f} on average; {shared:.0%} of prompt tokens were in an earlier prompt"
        )


def read_traffic(requests: Iterable[TraceRequest], *, speedup: float = 1.0, closed: bool = False) -> Traffic:
    """Read ``requests`` once. ``closed`` means that clients wait for answers, so that arrivals aren't a load.

    Raises ``KvyardError`` as reading the trace does, and for a trace without a request.
    """
    inputs, outputs, new, arrivals = [], [], [], []
    seen: set[int] = set()
    starts: list[int] = []
    first = last = stamp = stamped = 0
    for number, request in enumerate(requests):
        first = request.arrival if number == 0 else min(first, request.arrival)
        if request.delay is None:
            stamped += 1
            if not starts or request.arrival - stamp > TOGETHER:
                starts.append(request.arrival)
            stamp = request.arrival
        last = max(last, request.arrival)
        ids, size = prefix_ids(request)
        known = 0
        for known, prefix in enumerate(ids or (), 1):
            if prefix not in seen:
                known -= 1
                break
        seen.update((ids or ())[known:])
        arrivals.append(request.arrival)
        inputs.append(request.input_length)
        outputs.append(max(1, request.output_length))
        # The last token of a prompt is always computed: its logits make the first token of the answer.
        new.append(max(1, request.input_length - known * size))
    if not inputs:
        raise KvyardError("the trace has no requests: there is nothing to plan for")
    seconds = 0.0 if closed else (last - first) / SECOND / speedup
    stamps = 0 if closed else len(starts)
    tick = float(np.median(np.diff(starts))) / SECOND if stamps > 1 else 0.0
    times = None if closed else np.array(arrivals)
    return Traffic(np.array(inputs), np.array(outputs), np.array(new), seconds, stamped, stamps, tick, times)
