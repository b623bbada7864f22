"""Mending: applying batches in order, and what follows when one is missing, can't be read, or isn't what was sent.

It decides what to do about a hole: whom to ask for what, in which order, when to give up, and when all is well again. What
the answers bring is in ``answers``, what comes live in ``follower``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from kvyard.events.transport.frames import Head
from kvyard.events.transport.inquiry import UNCONCERNED, Inquiry, Purpose, Step
from kvyard.events.transport.ledger import restates
from kvyard.events.transport.position import Arrival, Position
from kvyard.events.transport.state import Limits, Origin, State, Update
from kvyard.events.transport.voice import Voice
from kvyard.events.types import Cleared
from kvyard.events.wire import Decoder


class Mending:
    """One stream as far as it was applied, and how to get on. The part of a follower that knows consequences."""

    def __init__(
        self,
        stream: str,
        *,
        topic: bytes | None = None,
        prefix: bytes = b"",
        source: bool = True,
        limits: Limits | None = None,
        decoder: Decoder | None = None,
        numbers: Iterator[int] | None = None,
        updates: deque[Update] | None = None,
    ) -> None:
        """``topic`` is learned if not given; one that doesn't begin with ``prefix`` is none of ours.

        ``source`` says whether there is a replay socket to ask. ``numbers`` numbers requests, across followers.
        """
        self._limits = limits = limits or Limits()
        self._source = source
        self._prefix = prefix
        self._decoder = decoder or Decoder()
        self.at = Position(limits.remembered)
        self.updates: deque[Update] = deque() if updates is None else updates
        self._voice = Voice(stream, topic, self.at, self.updates)
        self._inquiry = Inquiry(limits, numbers or count(1))
        self._order = 0
        self._live = -1
        """The highest sequence that came live."""
        self._proven = False
        """Whether replay ever brought anything: only then an empty answer means something."""
        self._broken = False
        """Whether the connection broke since the publisher last showed that it is the one we know."""
        self._no_rebuild = False
        """Whether replay from the beginning can't succeed: it lacks the beginning, or has what can't be read."""
        self._doubt = ""
        """Why what was just applied may not be the truth."""
        self._checkpoint: Head | None = None
        """Where the publisher was when last asked, until we get there."""
        self._target = -1
        """What a gap must reach to be closed, besides what waits."""
        self._heard = self._probed = self._quiet = 0
        self._patience: int | None = None
        """Until when a missing batch may come by itself."""
        self._due = 0

    # -- batches ----------------------------------------------------------------------------------------------------

    def _apply(self, batch: Arrival) -> None:
        """Pass ``batch`` on as the next one."""
        at = self.at
        at.release(batch.seq)
        at.advance(batch)
        self._voice.pass_on(batch)
        if batch.decoded.lossy:
            self._no_rebuild |= batch.origin == Origin.REPLAY  # a live one may have been damaged on its way
            self._doubt = f"batch {batch.seq} can't be read in full"
        checkpoint = self._checkpoint
        if checkpoint is not None and at.applied >= checkpoint.seq:
            self._checkpoint = None
            if at.applied == checkpoint.seq:
                self._compare_digest(checkpoint)

    def _start_over(self, batch: Arrival) -> None:
        """Apply a batch that clears everything. Where others before it are missing, those may have been about any tier."""
        at = self.at
        if at.applied >= 0 and not (at.whole and batch.seq == at.applied + 1):
            self._voice.say(batch.origin, [Cleared()])
        at.whole = True
        self._apply(batch)

    def _drain(self, now: int) -> None:
        """Apply what waited for this, then see where that leaves the stream."""
        at, purpose = self.at, self._inquiry.purpose
        while (batch := at.next()) is not None:
            self._apply(batch)
        at.drop_covered()
        if purpose == Purpose.LOST:
            return  # there is more to come
        if self._doubt:
            self._lose(self._doubt, now)
        elif at.held:
            if self._patience is None and purpose in UNCONCERNED:
                self._gap(now)
        elif purpose is None or (purpose == Purpose.GAP and at.applied >= self._target):
            self._finish()

    def _has_room(self, size: int) -> bool:
        """Whether one more batch of ``size`` bytes may wait."""
        limits = self._limits
        return len(self.at.held) < limits.held_batches and self.at.held_bytes + size <= limits.held_bytes

    def _compare_digest(self, head: Head) -> None:
        if self.at.whole and head.digest != self.at.digest:
            self._voice.counters.mismatches += 1
            self._doubt = f"what was received up to batch {head.seq} is not what was sent"

    def _read(self, seq: int, mark: int, payload: bytes, origin: Origin) -> Arrival:
        decoded = self._decoder.decode(payload)
        return Arrival(
            seq=seq,
            print=mark,
            decoded=decoded,
            origin=origin,
            order=self._order,
            size=len(payload),
            restates=restates(decoded.events),
        )

    # -- recovery ---------------------------------------------------------------------------------------------------

    def _gap(self, now: int) -> None:
        at = self.at
        self._count_gap(min(at.held, default=self._target + 1))
        self._voice.become(State.CATCHING_UP, f"batch {at.applied + 1} is missing")
        if not self._source:
            self._patience = now + self._limits.patience
        elif self._inquiry.knows_words and at.witness is None:
            # Right after a snapshot there is nothing yet to know the publisher by.
            self._begin(Purpose.GAP, [Step.SNAPSHOT, Step.REPLAY], now)
        else:
            self._begin(Purpose.GAP, [Step.REPLAY, Step.SNAPSHOT], now)

    def _count_gap(self, first: int) -> None:
        self._voice.counters.gaps += 1
        self._voice.counters.missed += max(0, first - self.at.applied - 1)

    def _lose(self, why: str, now: int) -> None:
        """What was applied can't be built upon."""
        self.at.whole = False
        self._doubt = ""
        self._checkpoint = None
        plan = self._ways_back()
        if not plan:
            self._give_up(why, now)
            return
        self._voice.become(State.CATCHING_UP, why)
        self._begin(Purpose.LOST, plan, now)

    def _ways_back(self) -> list[Step]:
        """What is worth asking for when all is lost."""
        if not self._source:
            return []
        ways = [] if self._inquiry.knows_words is False else [Step.SNAPSHOT]
        return ways if self._no_rebuild else [*ways, Step.REBUILD]

    def _restart(self, why: str) -> None:
        """The publisher is a new one: what the old one held is gone."""
        voice = self._voice
        voice.counters.restarts += 1
        voice.epoch += 1
        voice.publisher_epoch = self._inquiry.knows_words = self._checkpoint = None
        self._live = self._target = -1
        self._doubt = ""
        self._no_rebuild = self._broken = False
        self.at.drop_all()
        self.at.move(-1, 0, whole=False)
        voice.say(Origin.RESET, [Cleared()], reason=why)

    def _replaced(self, why: str, now: int) -> None:
        self._restart(why)
        self._lose(why, now)

    def _give_up(self, why: str, now: int) -> None:
        at = self.at
        self._voice.counters.gave_up += 1
        self._inquiry.stop()
        self._patience = None
        self._due = now + self._limits.cooldown
        at.whole = False
        self._voice.become(State.STALE, why)
        for seq in sorted(at.held):
            self._apply(at.held[seq])
        self._doubt = ""

    def _finish(self) -> None:
        """Nothing is missing."""
        self._inquiry.stop()
        self._patience = None
        self._target = -1
        self._voice.become(State.FRESH)

    def _begin(self, purpose: Purpose, plan: list[Step], now: int) -> None:
        self._patience = None
        self._inquiry.begin(purpose, plan)
        self._send(now)

    def _send(self, now: int) -> None:
        """Make the next request of the inquiry; without one, draw the consequences."""
        if not self._inquiry.send(self.at, self._order, now):
            self._exhausted(now)
        elif self._inquiry.replays:
            self._voice.counters.replays += 1

    def _failed(self, why: str, now: int, final: bool = False) -> None:
        """The request brought nothing: once more, or on to the next kind."""
        self._inquiry.failed(why, final)
        self._send(now)

    def _exhausted(self, now: int) -> None:
        """Nothing is left to ask."""
        purpose, failures = self._inquiry.purpose, self._inquiry.failures
        reason = ": ".join([self._voice.reason.partition(": ")[0], *([", ".join(failures)] if failures else [])])
        self._inquiry.stop()
        if purpose == Purpose.SUSPECT:
            self._replaced(reason, now)
        elif purpose is not None and purpose != Purpose.PROBE:
            self._give_up(reason, now)
