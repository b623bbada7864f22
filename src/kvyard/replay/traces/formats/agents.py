"""Dependencies in a recording of agents, from the times at which requests started and ended.

A turn waits for the turn before it in its session. A sub-agent's first request waits for the request of its caller that
came before it. A request waits for those sub-agents of its session that had ended when it started. Everything else ran side
by side in the recording, and may do so again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec


class RecordedTurn(msgspec.Struct):
    """One request as it was recorded; times in nanoseconds on one clock."""

    id: str
    session: str
    start: int
    end: int
    parent: str | None = None
    """The session that called this one."""
    think: int | None = None
    """Recorded time after the turn before; None: the difference of times."""


class Waits(msgspec.Struct):
    """Requests that a request waits for besides the turn before it, and the delay after all of them. None: no other."""

    after: tuple[str, ...]
    delay: int | None


def weave(recorded: Iterable[RecordedTurn], slack: int = 0) -> Iterator[tuple[RecordedTurn, Waits]]:
    """Yield the requests in order of their start, and what each waits for. ``slack`` is how far times may be off."""
    ordered = sorted(recorded, key=lambda recorded_turn: recorded_turn.start)
    last: dict[str, RecordedTurn] = {turn.session: turn for turn in ordered}
    children: dict[str, list[str]] = defaultdict(list)
    for turn in ordered:
        if turn.parent is not None and turn.session not in children[turn.parent]:
            children[turn.parent].append(turn.session)
    latest: dict[str, RecordedTurn] = {}
    for turn in ordered:
        before = latest.get(turn.session)
        after: list[RecordedTurn] = []
        if before is None and turn.parent in latest:
            after.append(latest[turn.parent])
        running = []
        for child in children.get(turn.session, ()):
            if child in latest and last[child] is latest[child] and last[child].end <= turn.start + slack:
                after.append(last[child])
            else:
                running.append(child)
        if turn.session in children:
            children[turn.session] = running
        latest[turn.session] = turn
        if before is not None and not after and turn.think is not None:
            delay: int | None = turn.think
        elif before is not None or after:
            ended = max(other.end for other in (*after, *(() if before is None else (before,))))
            delay = max(0, turn.start - ended)
        else:
            delay = None
        yield turn, Waits(tuple(other.id for other in after), delay)
