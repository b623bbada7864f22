"""Client of a run: how it sent requests and what its prompts share, if times and cached tokens show it."""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from kvyard.integers import ceil_div
from kvyard.lab.validate.reading import MeasuredRequest

LEAST_ROUNDS = 2
"""Requests for each slot from which on a cap and a burst are distinguished."""
SOON = 0.2
"""Share of an answer's median time within which nine slots in ten are filled again."""
EVEN = 0.01
"""Share by which gaps between arrivals of a clock differ at most."""
BLOCK = 16
"""Tokens of an id in prefixes that are made up."""
REMEMBERED = 1000
"""Ended requests among which one with the same prefix is looked for."""


class ClosedLoop(NamedTuple):
    """A client with a limit on requests in flight, which sends the next one when another has ended."""

    concurrency: int
    turnaround: int
    """Nanoseconds from the end of a request until the next one, median."""


def find_closed_loop(requests: Sequence[MeasuredRequest]) -> ClosedLoop | None:
    """Return the loop that the times of ``requests``, in order of arrival, show; ``None`` for arrivals of any other kind."""
    concurrency = _most_in_flight(requests)
    if concurrency < 2 or len(requests) < (LEAST_ROUNDS + 1) * concurrency or _evenly_sent(requests):
        return None
    # Never more than the limit in flight: with a limit of n, request n + 1 comes after the first end, and so on.
    ends = sorted(measured.ended for measured in requests)
    delays = sorted(measured.request.arrival - end for measured, end in zip(requests[concurrency:], ends, strict=False))
    took = median(measured.ended - measured.request.arrival for measured in requests)
    if delays[len(delays) * 9 // 10] > SOON * took:
        return None
    return ClosedLoop(concurrency, round(median(delays)))


def _evenly_sent(requests: Sequence[MeasuredRequest]) -> bool:
    """True if a clock sent them: a loop begins with several at once."""
    gaps = [later.request.arrival - earlier.request.arrival for earlier, later in pairwise(requests)]
    return max(gaps) - min(gaps) <= EVEN * max(gaps)


def _most_in_flight(requests: Sequence[MeasuredRequest]) -> int:
    running: list[int] = []
    most = 0
    for measured in requests:
        while running and running[0] <= measured.request.arrival:
            heappop(running)
        heappush(running, measured.ended)
        most = max(most, len(running))
    return most


def with_prefixes(requests: Sequence[MeasuredRequest]) -> list[MeasuredRequest]:
    """Give prompts ids by which each shares its cached tokens with an earlier prompt: the latest to end that is long enough,
    else the longest.
    """
    running: list[tuple[int, tuple[int, ...]]] = []
    ended: deque[tuple[int, ...]] = deque(maxlen=REMEMBERED)
    longest: tuple[int, ...] = ()
    shared_requests, fresh = [], 0
    for measured in requests:
        while running and running[0][0] <= measured.request.arrival:
            ended.append(heappop(running)[1])
        shared = (measured.cached or 0) // BLOCK
        prefix = next((ids for ids in reversed(ended) if len(ids) >= shared), longest)[:shared]
        count = ceil_div(measured.request.input_length, BLOCK) - len(prefix)
        ids = (*prefix, *range(fresh, fresh + count))
        fresh += count
        longest = max(longest, ids, key=len)
        heappush(running, (measured.ended, ids))
        request = msgspec.structs.replace(measured.request, ids=ids, id_block_size=BLOCK)
        shared_requests.append(msgspec.structs.replace(measured, request=request))
    return shared_requests
