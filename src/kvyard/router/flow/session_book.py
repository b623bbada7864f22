"""Bounded table of sessions: the longest idle are dropped first, and each after an idle hour."""

from collections import OrderedDict

import msgspec

from kvyard.clock import SECOND

MOST_SESSIONS = 65_536
IDLE = 3600 * SECOND
"""Notes of sessions that were idle for longer are dropped."""


class SessionNotes(msgspec.Struct, gc=False):
    """Record of one session."""

    service: float = 0.0
    """Tokens of service, as of ``at``."""
    at: int = 0
    """End of its latest request, nanoseconds; set by the caller of ``open``."""
    length: int = 0
    """Tokens of its latest prompt and answer."""
    output: float = 0.0
    """Mean tokens of its answers."""
    turns: int = 0
    busy: int = 0
    """Its requests that wait or run, where a policy counts them."""


class SessionBook:
    """Notes by session."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._notes: OrderedDict[str, SessionNotes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def find(self, session: str | None) -> SessionNotes | None:
        """Return the notes of ``session``, if it has any."""
        return None if session is None else self._notes.get(session)

    def open(self, session: str, now: int) -> SessionNotes:
        """Return the notes of ``session``, whose latest request ended now. Creates them, and drops the longest idle beyond the
        limit.
        """
        notes = self._notes.pop(session, None)
        if notes is None or notes.at < now - IDLE:
            notes = SessionNotes(at=now)
        self._notes[session] = notes
        while len(self._notes) > self._most or next(iter(self._notes.values())).at < now - IDLE:
            self._notes.popitem(last=False)
        return notes
