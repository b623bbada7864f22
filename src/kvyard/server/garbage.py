"""Returns free memory to the system, and collects cyclic garbage while no request waits, or where memory is wasted.

Python looks for cycles whenever enough objects were made, among the young ones, and now and then among all: an index or a
thousand streams then stand still for tens of milliseconds. What has lived for some seconds is mostly here to stay, so it is
set aside (``gc.freeze``), and young ones are few.

What is set aside and then becomes garbage in a circle waits for a search of all. Nothing that comes and goes with requests
may be in one (``tests/server/gateway/test_gateway_garbage.py``; ``transports.untie`` is for what asyncio leaves). All is
searched while no request is in flight, and at once where the process has grown by a tenth since the latest search: so
searches are few, and what they might find is bounded.
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
"""Objects that are made before Python looks among the youngest."""
ROUNDS = 2
"""Looks among the youngest before it looks among those that were young a moment ago too."""
NEVER = 1 << 30
INTERVAL = 5.0
"""Seconds after which what is there is set aside, and free memory given back."""
WHOLE = 600 * SECOND
"""Interval between two full collections while no request is in flight."""
SOONEST = 20 * SECOND
"""Between two searches of all while the process grows."""
GROWTH = 1.1
"""Growth of the process since the latest search of all that makes another one due."""
SPARE = 1.03
"""Growth above its lowest size that makes it give memory back."""
DRIFT = 0.005
"""Share by which the lowest size follows the present one each time: a process may grow for good."""
TRIMMED = 60 * SECOND
"""Least time between two times at which memory is given back though the process has hardly grown: free pieces between used
ones add up by less than ``SPARE`` and ``DRIFT`` notice."""
TRIM_SHARE = 1000
"""Multiple of the time that giving memory back took, for which it isn't done again unless the process grows: threads that
allocate wait for it."""


class SearchTimes:
    """Durations of collections, for metrics. The process stands still meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        """Nanoseconds."""
        self.longest = 0
        """Nanoseconds of the longest search that something waited for."""
        self.idle = False
        """True if nothing waits for searches just now."""
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
    """Search all once, and set it aside; from now on, count how long searches take. For a process that begins to serve, or is
    ``idle``.
    """
    if TIMES not in gc.callbacks:
        gc.callbacks.append(TIMES)
    TIMES.idle = idle
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    TIMES.idle = False
    gc.set_threshold(YOUNG, ROUNDS, NEVER)


async def stay_settled(idle: Callable[[], bool]) -> None:
    """Set aside what has come since, again and again; search all of it while it is ``idle`` or where the process has grown."""
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
    """Return memory that this process has; 0 if that isn't known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError):
        return 0


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def trim() -> None:
    """Give free memory back to the system, from between used memory too. Other threads go on meanwhile."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)
