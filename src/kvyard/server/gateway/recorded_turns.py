"""Turns of sessions in a recording: whose turn a request is, and how long after the last one it came. Names are made here."""

from __future__ import annotations

from typing import Any

from kvyard.clock import US

SESSIONS = 1 << 16
"""How many are remembered."""


class Turns:
    """The sessions of one file."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[str, int]] = {}
        """Per session its name in the file, and when its last turn ended; in order of use."""
        self._named = 0

    def take(self, session: str, arrived: int, ended: int) -> dict[str, Any]:
        """What a row says of a turn."""
        known = self._sessions.pop(session, None)
        if known is None:
            self._named += 1
            self._sessions[session] = (f"s{self._named}", ended)
            if len(self._sessions) > SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            return {"session_id": f"s{self._named}"}
        name, before = known
        self._sessions[session] = (name, max(before, ended))
        if arrived < before:
            return {}  # beside the last turn rather than after it: it keeps its time and waits for nobody
        return {"session_id": name, "delay": milliseconds(arrived - before)}

    def forget(self) -> None:
        """Begin a new file, which must not refer to turns in another one. Names aren't used again."""
        self._sessions.clear()


def milliseconds(ns: int) -> int | float:
    """To the microsecond: finer than anybody's clocks, and short."""
    us = ns // US
    return us // 1000 if us % 1000 == 0 else us / 1000
