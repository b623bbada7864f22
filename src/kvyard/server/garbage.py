"""Searches for cyclic garbage that nobody waits for: what stays is set aside, and all is searched only while nothing is under
way.

Python looks for cycles whenever enough objects were made, among the young ones, and now and then among all: an index or a
thousand streams then stand still for tens of milliseconds. What has lived for some seconds is mostly here to stay, so it is set
aside (``gc.freeze``), and young ones are few.
"""

import gc
from collections.abc import Callable

from kvyard.clock import SECOND, WallClock, pause

YOUNG = 10_000
"""So many more objects than before make Python look among the youngest."""
ROUNDS = 5
"""So often before it looks among those that were young a moment ago too."""
NEVER = 1 << 30
INTERVAL = 5.0
"""Seconds after which what is there is set aside."""
WHOLE = 600 * SECOND
"""How often all is searched at most."""
LONGEST = 3 * WHOLE
"""And at least, though something is under way: what is set aside isn't searched by itself."""


def settle() -> None:
    """Search all once, and set it aside. For a process, when it begins to serve."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
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
            settle()
