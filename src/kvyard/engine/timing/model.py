"""Interface of a timing model for the scheduler, and the arithmetic that all models share.

A model is a pure function from a batch to whole nanoseconds: the same batch takes the same time, whether the pass is asked
for alone or as one of many in a plan. It knows nothing of requests, blocks or the clock.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Durations: TypeAlias = npt.NDArray[np.int64]
Times: TypeAlias = npt.NDArray[np.float64]

SHORT: Final = 16
"""Up to this many passes plain Python is faster than numpy's fixed cost per operation."""

NS_PER_MS: Final = 1e6


class TimingModel(Protocol):
    """Durations of passes. Both verbs agree to the nanosecond."""

    needs_longest: ClassVar[bool]
    """True if ``longest`` matters here. Otherwise it isn't computed and is 0."""

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        """Return the duration of one pass.

        ``prefills`` are the (new, past) tokens of each request that computes prompt tokens. ``decode_batch`` requests
        compute one token each, and ``decode_context`` is the sum of their contexts, the token being computed included;
        ``longest`` is the longest of them.
        """

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        """Return the duration of each of ``passes`` passes that only decode ``batch`` requests, beginning at ``context``.

        Each context grows by one each pass: element i equals ``pass_ns((), batch, context + i * batch, longest + i)``.
        """


@runtime_checkable
class SharedExperts(Protocol):
    """A timing model of ranks that share experts. Its passes suppose that all ranks compute as many tokens."""

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        """Return the extra time of a pass of ``tokens`` on this rank (negative for less) if the ranks compute ``of_all``."""


def scaled(ns: int, ratio: float) -> int:
    """Return ``ns`` divided by ``ratio``, to the nearest nanosecond (a half to the even one)."""
    return ns if ratio == 1.0 else round(ns / ratio)


def scaled_many(ns: npt.NDArray[np.float64], ratio: float) -> Durations:
    """Like ``scaled`` for whole nanoseconds held as floats."""
    return (ns if ratio == 1.0 else np.rint(ns / ratio)).astype(np.int64)


def contexts(batch: int, context: int, passes: int) -> npt.NDArray[np.float64]:
    """Return the summed context of each pass. Exact, since token counts stay far below 2**53."""
    return np.arange(context, context + batch * passes, batch).astype(np.float64)
