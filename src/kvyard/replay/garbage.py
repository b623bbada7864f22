"""Fewer searches for cyclic garbage while a replay runs.

A run makes millions of objects and nearly no cycles (8 objects in 2,500 requests), so searching as often as usual is useless.
Objects that survived two searches aren't searched again: they would be most of a large fleet each time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 4_000_000
"""Growth in objects at which Python collects the young generation, instead of 700."""
_NEVER = 1 << 30


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Look for cycles rarely, until the end of the block, and not among what was there before: a large fleet is."""
    often = gc.get_threshold()
    first = not gc.get_freeze_count()  # else what is frozen is another's to thaw
    gc.set_threshold(OBJECTS, often[1], _NEVER)
    if first:
        gc.freeze()
    try:
        yield
    finally:
        if first:
            gc.freeze()  # what was made here grows old unsearched: usual thresholds would search all of it at once
            gc.unfreeze()
        gc.set_threshold(*often)
