"""Returns free memory to the system, and collects cyclic garbage while no request waits, or when memory grows.

Python's collector looks at young objects whenever enough were made, and now and then at all objects: an index or a thousand
streams then stand still for tens of milliseconds. Objects that have lived for some seconds mostly stay, so they are frozen
(``gc.freeze``), and few young ones are left to look at.

Frozen objects that become cyclic garbage are freed by a full collection only. Nothing that is made for a request may be part
of a cycle (``tests/server/gateway/test_gateway_garbage.py``; ``transports.untie`` breaks asyncio's). A full collection runs
while no request is in flight, and at once when the process has grown by a tenth since the latest: so full collections are
few, and the garbage that waits for them is bounded.
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvyard.clock import SECOND, WallClock, pause

YOUNG = 5000
"""Allocations between two collections of generation 0."""
ROUNDS = 2
"""Collections of generation 0 between two of generation 1."""
NEVER = 1 << 30
INTERVAL = 5.0
"""Seconds between two freezes, which also return free memory."""
WHOLE = 600 * SECOND
"""Interval between two full collections while no request is in flight."""
SOONEST = 20 * SECOND
"""Shortest interval between two full collections while the process grows."""
GROWTH = 1.1
"""Growth of the process since the latest full collection from which on another is due."""
SPARE = 1.03
"""Growth above its lowest size from which on free memory is returned."""
DRIFT = 0.005
"""Share by which the lowest size follows the present size each time, since a process may stay larger."""
TRIMMED = 60 * SECOND
"""Shortest interval at which memory is returned although the process has hardly grown: fragments add up by less than
``SPARE`` and ``DRIFT`` notice."""
TRIM_SHARE = 1000
"""Multiple of the time that returning memory took, for which it isn't done again unless the process grows: threads that
allocate wait for it."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt``."""
LARGE_BLOCK = 1 << 20
"""Bytes of a block that the system gives and gets back by itself."""


class SearchTimes:
    """Durations of collections, for metrics. The process stands still meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        """Nanoseconds."""
        self.longest = 0
        """Nanoseconds of the longest collection that a request waited for."""
        self.idle = False
        """True if no request waits for a collection."""
        self._clock = WallClock()
        self._began = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Receive a call from ``gc.callbacks``."""
        if phase == "start":
            self._began = self._clock.now()
            return
        took = self._clock.now() - self._began
        self.count += 1
        self.total += took
        if not self.idle:
            self.longest = max(self.longest, took)


TIMES = SearchTimes()
"""Durations in this process, from its first ``settle`` on."""


def settle(idle: bool = True) -> None:
    """Collect all once, and freeze it; from now on, time collections. For a process that begins to serve, or is ``idle``."""
    if TIMES not in gc.callbacks:
        gc.callbacks.append(TIMES)
    TIMES.idle = idle
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    TIMES.idle = False
    gc.set_threshold(YOUNG, ROUNDS, NEVER)


async def stay_settled(idle: Callable[[], bool]) -> None:
    """Freeze new objects every ``INTERVAL``; collect all while the process is ``idle`` or when it has grown."""
    give_back_large_blocks()
    clock = WallClock()
    searched, size = clock.now(), resident_bytes()
    lowest = float(size)
    due = searched + TRIMMED
    while True:
        await pause(INTERVAL)
        gc.collect(1)
        gc.freeze()
        now = resident_bytes()
        began = clock.now()
        if now > SPARE * lowest or began >= due:
            await asyncio.to_thread(trim)
            due = clock.now() + max(TRIMMED, TRIM_SHARE * (clock.now() - began))
            now = resident_bytes()
        since = clock.now() - searched
        if (since >= WHOLE and idle()) or (since >= SOONEST and now > GROWTH * size):
            settle(idle())
            await asyncio.to_thread(trim)
            searched, now = clock.now(), resident_bytes()
            size = now
        size = min(size, now)
        lowest = min(now, lowest + DRIFT * (now - lowest))


def resident_bytes() -> int:
    """Return the bytes of memory that this process has; 0 if that isn't known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError):
        return 0


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def give_back_large_blocks() -> None:
    """Have the system's allocator return large blocks as they are freed. By itself glibc learns from the first one to keep up
    to 32 MiB at the end of each thread's heap, which ``malloc_trim`` doesn't look at.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(M_MMAP_THRESHOLD, LARGE_BLOCK)
        option(M_TRIM_THRESHOLD, 2 * LARGE_BLOCK)


def trim() -> None:
    """Return free memory to the system, fragments included. Other threads continue meanwhile."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)
