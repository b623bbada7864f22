"""Inquiries: what a follower asks its publisher, one request after the other, and what has been answered so far.

An inquiry has a purpose and a plan, the kinds of request to try in turn. It numbers requests, so that the answers to one
that was given up can be told from those to the next; it counts attempts and knows when patience ends. Whether an answer
helps is for the follower to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum

import msgspec

from kvyard.events.transport.frames import HEAD_WORD, SNAPSHOT_WORD, Head, Kind, Reply
from kvyard.events.transport.position import Position
from kvyard.events.transport.state import Limits


class Step(IntEnum):
    """A kind of request."""

    HEAD = 1
    REPLAY = 2
    SNAPSHOT = 3
    REBUILD = 4
    """Replay from the very beginning."""


class Purpose(Enum):
    """What an inquiry is for."""

    PROBE = "probe"
    """Was anything missed?"""
    SUSPECT = "suspect"
    """The sequence went back: a late repetition, or another publisher?"""
    VERIFY = "verify"
    """The connection broke: still the same publisher?"""
    GAP = "gap"
    LOST = "lost"
    """Nothing that was applied can be built upon."""


UNCONCERNED = (None, Purpose.PROBE)
"""With these nothing is known to be wrong."""
IDENTITY = (Purpose.SUSPECT, Purpose.VERIFY)
"""Until these are settled nothing that arrives can be trusted to belong to what came before."""


class Ask(msgspec.Struct, frozen=True):
    """A request that should be under way. One with another number replaces it; its answers are no longer wanted."""

    number: int
    step: Step
    word: bytes | int


class Inquiry:
    """The requests of one stream. At most one is under way."""

    def __init__(self, limits: Limits, numbers: Iterator[int]) -> None:
        self.ask: Ask | None = None
        self.purpose: Purpose | None = None
        self.due = 0
        """When the request under way has failed."""
        self.knows_words: bool | None = None
        """Whether the publisher knows our words; ``None`` until it was asked."""
        self.applied = -1
        """Where the reader was when it asked."""
        self.order = 0
        """How many batches had arrived by then."""
        self.witness: int | None = None
        """The batch that was asked for only to know the publisher by."""
        self.confirmed = False
        """Whether it came and was the one we know."""
        self.batches = 0
        """Replayed so far."""
        self.furthest = -1
        self.head: Head | None = None
        self.parts: list[bytes] = []
        self.tries = 0
        self.failures: list[str] = []
        """Why what was tried so far didn't help."""
        self._limits = limits
        self._numbers = numbers
        self._plan: list[Step] = []

    def begin(self, purpose: Purpose, plan: list[Step]) -> None:
        """Start over, with nothing asked yet."""
        self.ask, self.purpose, self._plan, self.tries = None, purpose, list(plan), 0
        self.failures = []

    def send(self, at: Position, order: int, now: int) -> bool:
        """Make the plan's first request that makes sense. Returns whether there was one; without one, all is over."""
        plan = self._plan
        while plan and plan[0] in (Step.HEAD, Step.SNAPSHOT) and self.knows_words is False:
            plan.pop(0)
        if not plan:
            self.ask = None
            return False
        step = plan[0]
        self.witness = at.witness if step == Step.REPLAY else None
        word: bytes | int
        if step == Step.REPLAY:
            word = at.applied + 1 if self.witness is None else self.witness
        else:
            word = 0 if step == Step.REBUILD else HEAD_WORD if step == Step.HEAD else SNAPSHOT_WORD
        self.ask = Ask(next(self._numbers), step, word)
        self.applied, self.order = at.applied, order
        self.confirmed = False
        self.batches, self.furthest = 0, -1
        self.head, self.parts = None, []
        self.due = now + self._limits.reply
        return True

    def take(self, reply: Reply, now: int) -> None:
        """Note what an answer to the request under way brings; it has more time now."""
        self.due = now + self._limits.reply
        if reply.kind == Kind.BATCH:
            self.batches += 1
            self.furthest = max(self.furthest, reply.seq)
        elif reply.kind == Kind.HEAD:
            self.head = reply.head
        elif reply.kind == Kind.PART and self.head is not None and len(self.parts) < self.head.parts:
            self.parts.append(reply.payload)

    def failed(self, why: str, final: bool = False) -> None:
        """The request brought nothing. Its kind is done with after some attempts, or at once if that is ``final``."""
        if why not in self.failures:
            self.failures.append(why)
        self.tries += 1
        attempts = 1 if self.purpose == Purpose.PROBE else self._limits.attempts
        if final or self.tries >= attempts:
            self.skip()

    def skip(self) -> None:
        """On to the next kind of request."""
        self.tries = 0
        self._plan.pop(0)

    @property
    def replays(self) -> bool:
        """Whether batches are being asked for."""
        return self.ask is not None and self.ask.step in (Step.REPLAY, Step.REBUILD)

    def stop(self) -> None:
        """Ask nothing more."""
        self.ask = self.purpose = None
        self._plan = []
