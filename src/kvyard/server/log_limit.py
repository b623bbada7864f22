"""A limit of repeated log lines: a kind of line is written a few times, then counted; the next one has the count.

Failures repeat: a process without file descriptors fails thousands of times a second, and its log would fill the disk. A kind
is a logger, a level and a message without its arguments.
"""

import logging

from kvyard.clock import SECOND, Clock, WallClock

MOST = 5
"""Lines of one kind within a window."""
WINDOW = 10 * SECOND
KINDS = 1000
"""Kinds that are kept apart; beyond that the oldest are evicted."""


class LogLimit(logging.Filter):
    """For a handler, so that every logger is limited by it, those of libraries too."""

    def __init__(self, most: int = MOST, window: int = WINDOW, clock: Clock | None = None) -> None:
        super().__init__()
        self._most = most
        self._window = window
        self._clock = clock or WallClock()
        self._seen: dict[tuple[str, int, str], list[int]] = {}
        """Per kind: when its window began, lines written in it, lines left out since the last that was written."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return true if the line is to be written; adds the number of similar lines that were not."""
        now = self._clock.now()
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0][:200])
        seen = self._seen.get(kind)
        if seen is None:
            if len(self._seen) >= KINDS:
                del self._seen[next(iter(self._seen))]
            self._seen[kind] = [now, 1, 0]
            return True
        if now - seen[0] >= self._window:
            seen[0], seen[1] = now, 0
        if seen[1] >= self._most:
            seen[2] += 1
            return False
        seen[1] += 1
        if seen[2]:
            record.msg, record.args = f"{record.getMessage()} ({seen[2]} more like this were left out)", ()
            seen[2] = 0
        return True
