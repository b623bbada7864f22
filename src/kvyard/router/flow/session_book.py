"""Bounded record of sessions: those that were quiet the longest are evicted first."""

from collections import OrderedDict

import msgspec

MOST_SESSIONS = 65_536


class SessionNotes(msgspec.Struct, gc=False):
    """Record of one session."""

    service: float = 0.0
    """Tokens of service, as of ``at``."""
    at: int = 0
    """End of its latest request, nanoseconds."""
    length: int = 0
    """Tokens of its latest prompt and answer."""
    output: float = 0.0
    """Mean tokens of its answers."""
    turns: int = 0


class SessionBook:
    """Notes by session."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._notes: OrderedDict[str, SessionNotes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def find(self, session: str | None) -> SessionNotes | None:
        """The notes of ``session``, if there are any."""
        return None if session is None else self._notes.get(session)

    def open(self, session: str) -> SessionNotes:
        """The notes of ``session``, made now if need be; the quietest session makes room."""
        notes = self._notes.get(session)
        if notes is None:
            notes = self._notes[session] = SessionNotes()
            if len(self._notes) > self._most:
                self._notes.popitem(last=False)
        else:
            self._notes.move_to_end(session)
        return notes
