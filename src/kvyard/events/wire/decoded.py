"""Result of decoding: the readable events, problems with the rest, and counts of both.

A stream in production is never perfect, and a consumer that throws a batch away for one odd event is worse off than one that
skips the event and says so. So problems are values, not exceptions, and each names the event it is about.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.events.packed import PackedEvents
from kvyard.events.types import Event


class ProblemKind(StrEnum):
    PAYLOAD = "payload"
    """Nothing of the payload could be read."""
    MALFORMED = "malformed"
    """An event of a known kind whose fields can't be read."""
    HASH = "hash"
    GROUP = "group"
    MEDIUM = "medium"
    """A place we don't know. Copies there aren't credited to anybody, so nothing that is known becomes wrong."""
    UNKNOWN = "unknown"
    """An event of a kind we don't know; skipped."""
    BATCH = "batch"
    """A bad time stamp or rank; the events were read all the same."""
    GAP = "gap"
    """Event ids are missing (TensorRT-LLM numbers events, not batches)."""
    RESTART = "restart"
    """Event ids started again."""


MAX_COUNT = 1 << 31
"""No group, rank, block size or window reaches this."""
MAX_UNKNOWN = 64
MOST_EVENTS = 1 << 18
"""Events of one payload: more than any engine changes in a step."""
MOST_PROBLEMS = 1000
"""Problems of one payload that are kept; one with as many losses isn't read on."""
LARGE = 1 << 18
"""Bytes from which on a payload is read in a thread, event by event, by types alone, and its events are packed: as plain
objects it would take fifty times its size, and the process would stand still meanwhile."""
JSON_STARTS = b"[{ \t\r\n"
"""First bytes of JSON. As msgpack these would be a lone number."""
UNREADABLE = (*DECODE_ERRORS, MemoryError, OverflowError, ValueError, TypeError)
"""Exceptions that msgspec raises for bytes that are no message."""

HARMLESS = frozenset((ProblemKind.UNKNOWN, ProblemKind.BATCH, ProblemKind.MEDIUM))
"""Kinds of problems by which nothing that is known becomes wrong."""


class EventRefused(ValueError):
    """One event can't be used. Never leaves this package."""

    def __init__(self, kind: ProblemKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong with a payload."""

    index: int
    """The position of the event in its batch, -1 for the payload as a whole."""
    reason: str
    kind: ProblemKind


class Problems:
    """What is wrong with a payload: of losses and of what does no harm each the first few."""

    __slots__ = ("kept", "losses")

    def __init__(self) -> None:
        self.kept: list[Problem] = []
        self.losses = 0

    def add(self, problem: Problem) -> bool:
        """Keep a problem, unless there are enough; returns whether it is worth while to read on."""
        lost = problem.kind not in HARMLESS
        self.losses += lost
        if (self.losses if lost else len(self.kept) - min(self.losses, MOST_PROBLEMS) + 1) <= MOST_PROBLEMS:
            self.kept.append(problem)
        return self.losses <= MOST_PROBLEMS


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded content of one payload."""

    ts: float = 0.0
    """Seconds; 0 if the payload has none."""
    rank: int | None = None
    events: Sequence[Event] = msgspec.field(default_factory=list)
    """Packed where the payload is large."""
    problems: list[Problem] = msgspec.field(default_factory=list)
    dialect: str = "none"
    """The encoding seen: ``map``, ``array``, ``mixed``, ``trtllm``, or ``none`` for a payload without a readable event."""
    ranks: list[int | None] | None = None
    """The rank of every event, where events of one payload name different ones (a TensorRT-LLM drain)."""
    parts: "list[Decoded] | None" = None
    """Result of ``by_rank``, where it was made with the events: that of a large payload takes long."""
    capacities: dict[int | None, int] = msgspec.field(default_factory=dict)
    """Blocks of the device per group, if the payload has them."""

    @property
    def lossy(self) -> bool:
        """Return true if part of the payload couldn't be read, so that a mirror may now be wrong."""
        return self.loss is not None

    @property
    def loss(self) -> Problem | None:
        """The first problem by which something was lost."""
        return next((problem for problem in self.problems if problem.kind not in HARMLESS), None)

    def by_rank(self) -> "list[Decoded]":
        """This, split so that each part is of one rank; problems stay with the first part."""
        if self.ranks is None:
            return [self]
        if self.parts is not None:
            return self.parts
        parts: dict[int | None, list[Event] | PackedEvents] = {}
        empty = PackedEvents if isinstance(self.events, PackedEvents) else list
        for rank, event in zip(self.ranks, self.events, strict=True):
            parts.setdefault(rank, empty()).append(event)
        return [
            Decoded(
                ts=self.ts, rank=rank, events=events, problems=[] if number else self.problems, dialect=self.dialect
            )
            for number, (rank, events) in enumerate(parts.items())
        ]


class DecodeStats(msgspec.Struct):
    """Counters of a decoder, besides problems."""

    slow_payloads: int = 0
    """Payloads that weren't as their kind usually is, and were read event by event."""
    partial_blocks: int = 0
    """Blocks that weren't full, which TensorRT-LLM announces and no other request can share; left out."""
    unknown: dict[str, int] = msgspec.field(default_factory=dict)
    """Names of unknown event kinds; those beyond the first few count as "…"."""

    def check_kind(self, tag: object, known: Collection[str]) -> None:
        """Raise ``EventRefused`` unless ``tag`` is a known kind of event; unknown ones are counted by name."""
        if not isinstance(tag, str):
            raise EventRefused(ProblemKind.MALFORMED, "an event without a kind")
        if tag not in known:
            name = tag[:64]
            if name not in self.unknown and len(self.unknown) >= MAX_UNKNOWN:
                name = "…"
            self.unknown[name] = self.unknown.get(name, 0) + 1
            raise EventRefused(ProblemKind.UNKNOWN, f"unknown kind {tag[:40]!r}")


def no_events(reason: str) -> Decoded:
    """Return the result for a payload that can't be read at all."""
    return Decoded(problems=[Problem(-1, reason, ProblemKind.PAYLOAD)])


def read_stamp(ts: object) -> tuple[float, Problem | None]:
    """Return a time stamp off the wire, or 0 and the problem with it."""
    if isinstance(ts, int | float) and not isinstance(ts, bool) and abs(ts) < 1e300:
        return float(ts), None
    return 0.0, Problem(-1, "a time stamp that isn't a number", ProblemKind.BATCH)
