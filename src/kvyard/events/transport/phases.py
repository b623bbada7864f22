"""Phases of a stream, what can happen to it, and the format of the transition table. ``recovery`` acts on it."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar


class Phase(Enum):
    """Phase of a stream."""

    FOLLOWING = "following"
    """Everything up to the last batch was applied."""
    WAITING = "waiting"
    """A batch is missing and there is no replay socket to ask: it may be late."""
    PROBE = "probe"
    """Asking whether anything was missed."""
    SUSPECT = "suspect"
    """The sequence went back. Asking: a late repetition, or another publisher?"""
    VERIFY = "verify"
    """The connection broke. Asking: is it the same publisher?"""
    GAP = "gap"
    """Asking for batches that are missing."""
    LOST = "lost"
    """Nothing that was applied can be built upon. Asking for everything."""
    REBUILD = "rebuild"
    """As LOST, and replay from the beginning has begun to arrive."""
    STALE = "stale"
    """As LOST, but there is nothing to ask, or not yet again."""


class BatchKind(Enum):
    """Relation of a live batch to the stream's position."""

    NEXT = "the next one"
    RESTATES = "one that clears everything"
    FIRST = "the publisher's first, where nothing is known"
    EARLY = "beyond a gap, not to be trusted yet, or damaged"
    BACKWARD = "numbered like an old one, with other content"


class Signal(Enum):
    """Other things that can happen to a stream."""

    # batches were applied, and
    DOUBT = "what was applied isn't what was sent"
    HOLE = "one is missing"
    COMPLETE = "none is missing"
    # the answer to a request has ended
    HEAD = "head"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"
    # time and connections
    TIMEOUT = "no answer"
    EXHAUSTED = "nothing is left to ask"
    LATE = "the missing batch didn't come by itself"
    BEHIND = "what the publisher has sent didn't arrive"
    LOOK = "time to ask"
    RECONNECTED = "the connection broke and is back"


FOLLOWING, WAITING, PROBE, SUSPECT, VERIFY, GAP, LOST, REBUILD, STALE = Phase
NOT_WHOLE = frozenset((LOST, STALE))
ASKING = frozenset((PROBE, SUSPECT, VERIFY, GAP, LOST, REBUILD))
UNIDENTIFIED = frozenset((SUSPECT, VERIFY))
"""Until these are over nothing that arrives can be trusted to belong to what came before."""
GAPPED = frozenset((GAP, WAITING, LOST, STALE))
"""Phases that a gap leads to: requesting it, waiting without a replay socket, or stale once requests are used up."""

Cause = TypeVar("Cause", BatchKind, Signal)
Action = TypeVar("Action", bound=Callable[..., None])


class Transition(NamedTuple, Generic[Action]):
    action: Action
    leads_to: frozenset[Phase]
    """The phases that may follow, by this action and the signals that it gives."""


def table(
    *rows: tuple[Cause, Iterable[Phase], Action, Iterable[Phase]],
) -> dict[tuple[Cause, Phase], Transition[Action]]:
    return {(cause, phase): Transition(action, frozenset(to)) for cause, phases, action, to in rows for phase in phases}
