"""Searches for cyclic garbage that nobody waits for: what stays is set aside, and all is searched only while nothing is under
way.

Python looks for cycles whenever enough objects were made, among the young ones, and now and then among all: an index or a
thousand streams then stand still for tens of milliseconds. What has lived for some seconds is mostly here to stay, so it is set
aside (``gc.freeze``), and young ones are few.

What is set aside and then becomes garbage in a circle waits for a search of all. So nothing that comes and goes with requests
may be in one (``tests/server/gateway/test_garbage.py``): ``transports.untie`` is for what asyncio leaves.
"""

import gc
from collections.abc import Callable

from kvyard.clock import SECOND, WallClock, pause

YOUNG = 5000
"""So many more objects than before make Python look among the youngest."""
ROUNDS = 2
"""So often before it looks among those that were young a moment ago too."""
NEVER = 1 << 30
INTERVAL = 5.0
"""Seconds after which what is there is set aside."""
WHOLE = 600 * SECOND
"""How often all is searched at most."""
LONGEST = 36 * WHOLE
"""And at least, though something is under way: what is set aside isn't searched by itself."""


class SearchTimes:
    """How long searches took, for metrics. The process stands still meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        """Nanoseconds."""
        self.longest = 0
        """The same of one, but for those that nothing waited for."""
        self.idle = False
        """Whether nothing waits for searches just now."""
        self._clock = WallClock()
        self._began = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """For ``gc.callbacks``."""
        if phase == "start":
            self._began = self._clock.now()
            return
        took = self._clock.now() - self._began
        self.count += 1
        self.total += took
        if not self.idle:
            self.longest = max(self.longest, took)


TIMES = SearchTimes()
"""Of this process, from its first ``settle`` on."""


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
    """Set aside what has come since, again and again; search all of it now and then, while it is ``idle``."""
    clock = WallClock()
    searched = clock.now()
    while True:
        await pause(INTERVAL)
        gc.collect(1)
        gc.freeze()
        since = clock.now() - searched
        if since >= LONGEST or (since >= WHOLE and idle()):
            searched = clock.now()
            settle(idle())
