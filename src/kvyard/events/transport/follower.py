"""The follower: one stream's batches in, updates in order out, and whatever it takes to close a gap.

It is a state machine without sockets, threads or a clock. It is told what arrived and what time it is; it says what to pass
on (``updates``), what it wants to ask the publisher (``ask``) and when it wants to be woken (``due``).

- A gap: replay from the last batch that was applied. That batch comes along as a witness: where its bytes differ, another
  publisher answers, and nothing it says fits what came before.
- Replay doesn't reach back that far: a snapshot. Neither can be had: stale, until a batch clears everything or one of
  the two works out later.
- Nothing known yet, or a restart: a snapshot first, since all is missing; else replay from the very beginning.
- Silence may hide a loss, so a silent stream is asked now and then.

Whatever comes late is compared with what was applied, and never applied over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

import msgspec

from kvyard.events.transport.frames import Frame, Head, Kind, Reply, fingerprint
from kvyard.events.transport.inquiry import Ask, Inquiry, Purpose, Step
from kvyard.events.transport.ledger import restates
from kvyard.events.transport.position import Arrival, Position
from kvyard.events.transport.state import Limits, Origin, State, StreamStatus, Update
from kvyard.events.transport.voice import Voice
from kvyard.events.types import Cleared
from kvyard.events.wire import Decoder


class Follower:
    """Keeps one stream whole, or says that it isn't."""

    def __init__(
        self,
        stream: str,
        *,
        topic: bytes | None = None,
        source: bool = True,
        limits: Limits | None = None,
        decoder: Decoder | None = None,
        numbers: Iterator[int] | None = None,
        updates: deque[Update] | None = None,
    ) -> None:
        """``source`` says whether there is a replay socket to ask. ``numbers`` numbers requests, across followers."""
        self._limits = limits = limits or Limits()
        self._source = source
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

    @property
    def ask(self) -> Ask | None:
        """What the publisher should be asked."""
        return self._inquiry.ask

    @property
    def state(self) -> State:
        return self._voice.state

    @property
    def topic(self) -> bytes | None:
        """The stream's topic, once known."""
        return self._voice.topic

    def status(self) -> StreamStatus:
        """A look at the stream."""
        return self._voice.status()

    # -- told from outside ------------------------------------------------------------------------------------------

    def start(self, now: int) -> None:
        """Begin: ask for what there is, if somebody can be asked."""
        self._heard = self._probed = now
        if self._source:
            self._lose("nothing is known yet", now)

    def live(self, frame: Frame, now: int) -> None:
        """A live batch arrived."""
        at, counters = self.at, self._voice.counters
        counters.frames += 1
        self._order += 1
        self._heard, self._quiet = now, 0
        if self._voice.topic is None:
            self._voice.topic = frame.topic
        seq, mark = frame.seq, fingerprint(frame.payload)
        before, self._live = self._live, max(self._live, seq)
        if seq <= at.applied and self._is_repetition(seq, mark, rising=seq > before):
            return
        waiting = at.held.get(seq)
        if waiting is not None and waiting.print == mark:
            counters.duplicates += 1
            return
        batch = self._read(seq, mark, frame.payload, Origin.LIVE)
        if batch.decoded.lossy:
            counters.damaged += 1
            if seq <= at.applied or waiting is not None:
                return
        if seq <= at.applied:
            self._went_back(batch, now)
            return
        counters.late += seq < before
        self._accept(batch, now)

    def reply(self, number: int, reply: Reply, now: int) -> None:
        """The publisher answered request ``number``."""
        ask, voice = self._inquiry.ask, self._voice
        if ask is None or ask.number != number:
            voice.counters.late_replies += 1
            return
        if reply.topic is not None and reply.kind != Kind.END:
            if voice.topic is None:
                voice.topic = reply.topic
            elif reply.topic != voice.topic:
                voice.counters.foreign += 1
                return
        self._inquiry.take(reply, now)
        if reply.kind == Kind.BATCH:
            if ask.step in (Step.REPLAY, Step.REBUILD):
                self._replayed(reply, now)
        elif reply.kind == Kind.END:
            ended = {Step.HEAD: self._head_ended, Step.SNAPSHOT: self._snapshot_ended}
            ended.get(ask.step, self._replay_ended)(now)

    def tick(self, now: int) -> None:
        """It is ``now``: does what has become due."""
        due = self.due
        if due is None or now < due:
            return
        if self._inquiry.ask is not None:
            self._voice.counters.timeouts += 1
            self._failed("the publisher doesn't answer", now)
        elif self._patience is not None:
            self._give_up(f"batch {self.at.applied + 1} is missing and there is nobody to ask for it", now)
        elif self._checkpoint is not None and self.at.whole and now >= self._due:
            self._target, self._checkpoint = self._checkpoint.seq, None
            self._gap(now)
        else:
            self.look(now)

    def reconnected(self, now: int) -> None:
        """The connection was broken for a while: whoever is there now may be somebody else."""
        self._inquiry.knows_words = None
        self._no_rebuild = False
        self._broken = True
        if self.at.anchor is None and self.at.applied >= 0:
            self.at.anchor = self.at.applied
        self.look(now)

    def look(self, now: int) -> None:
        """Find out now whether anything was missed."""
        if not self._source or self._inquiry.purpose is not None:
            return
        if self.at.whole:
            self._voice.counters.probes += 1
            self._probed = now
            self._quiet += 1
            self._begin(Purpose.PROBE, [Step.HEAD, Step.REPLAY], now)
        else:
            self._lose(self._voice.reason, now)

    @property
    def due(self) -> int | None:
        """When ``tick`` should be called, ``None`` where nothing is to be waited for."""
        if self._inquiry.ask is not None:
            return self._inquiry.due
        if self._patience is not None:
            return self._patience
        if not self._source:
            return None
        if not self.at.whole:
            return self._due if self._ways_back() else None
        limits, dues = self._limits, []
        if limits.probe:
            idle = min(limits.probe << min(self._quiet, 32), limits.probe_most)
            dues.append(max(self._heard, self._probed) + idle)
            if self._inquiry.knows_words:
                dues.append(self._probed + limits.probe_most)
        if self._checkpoint is not None:
            dues.append(self._due)
        return min(dues, default=None)

    # -- batches ----------------------------------------------------------------------------------------------------

    def _is_repetition(self, seq: int, mark: int, rising: bool) -> bool:
        """Whether an old sequence number is nothing to worry about."""
        known, counters = self.at.print_of(seq), self._voice.counters
        if known == mark:
            counters.duplicates += 1
        elif known is None and rising:
            # Brought by a snapshot already, which says nothing of single batches.
            counters.covered += 1
        elif known is None and self.at.passed_over(seq):
            # Given up before, and what came after it was applied: too late to be of use.
            counters.late += 1
        else:
            return False
        return True

    def _went_back(self, batch: Arrival, now: int) -> None:
        """The sequence went back, and not to anything that was seen before."""
        why = f"the sequence went back from {self.at.applied} to {batch.seq}"
        if not self._source:
            self._restart(why)
            self._accept(batch, now)
        elif not self.at.whole:
            if self._inquiry.purpose is None:
                self._replaced(why, now)
                self._accept(batch, now)
        elif self._inquiry.purpose in (None, Purpose.PROBE):
            self._voice.become(State.CATCHING_UP, why)
            self._begin(Purpose.SUSPECT, [Step.HEAD, Step.REPLAY], now)

    def _accept(self, batch: Arrival, now: int) -> None:
        """Apply ``batch``, or let it wait for what is missing before it."""
        at, readable = self.at, not batch.decoded.lossy
        if at.whole and batch.seq == at.applied + 1 and readable:
            self._apply(batch)
            self._drain(now)
        elif batch.restates and readable:
            # It clears everything: what was missed before it no longer matters.
            self._voice.counters.healed += at.applied >= 0
            self._go_on_from(batch, now)
        elif batch.seq == 0 and at.applied < 0 and not at.whole and readable:
            # Nothing comes before it.
            self._go_on_from(batch, now)
        elif at.whole or self._inquiry.ask is not None:
            self._hold(batch, now)
        else:
            reason = f"batches before {batch.seq} were missed" if at.applied < 0 else self._voice.reason
            self._voice.become(State.STALE, reason)
            self._apply(batch)

    def _go_on_from(self, batch: Arrival, now: int) -> None:
        at = self.at
        if at.whole and self._patience is None and self._inquiry.purpose != Purpose.GAP:
            self._count_gap(batch.seq)
        at.whole = True
        at.digest = 0
        self._inquiry.stop()
        self._patience = None
        self._apply(batch)
        self._drain(now)

    def _hold(self, batch: Arrival, now: int) -> None:
        at, limits = self.at, self._limits
        at.hold(batch)
        if len(at.held) > limits.held_batches or at.held_bytes > limits.held_bytes:
            self._voice.counters.overflows += 1
            self._give_up("too much arrived while something was missing", now)
        elif at.whole and self._patience is None and self._inquiry.purpose in (None, Purpose.PROBE):
            self._gap(now)

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
            if self._patience is None and purpose in (None, Purpose.PROBE):
                self._gap(now)
        elif purpose is None or (purpose == Purpose.GAP and at.applied >= self._target):
            self._finish()

    def _compare_digest(self, head: Head) -> None:
        if self.at.whole and head.digest != self.at.digest:
            self._voice.counters.mismatches += 1
            self._doubt = f"what was received up to batch {head.seq} is not what was sent"

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
        self._no_rebuild = False
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
        elif self.ask is not None and self.ask.step in (Step.REPLAY, Step.REBUILD):
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
        elif purpose in (Purpose.GAP, Purpose.LOST):
            self._give_up(reason, now)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _head_ended(self, now: int) -> None:
        inquiry, voice, at = self._inquiry, self._voice, self.at
        head = inquiry.head
        inquiry.knows_words = head is not None
        inquiry.skip()
        if head is None:
            self._send(now)
            return
        known, voice.publisher_epoch = voice.publisher_epoch, head.epoch
        if (known is not None and known != head.epoch) or head.seq < inquiry.applied:
            self._replaced("the publisher was restarted", now)
            return
        if head.seq > at.applied:
            # What is on its way may still arrive by itself.
            self._checkpoint, self._due = head, now + 2 * self._limits.patience
        elif head.seq == at.applied:
            self._compare_digest(head)
        if known is None and at.witness is not None and not self._doubt:
            self._send(now)
            return
        at.anchor, self._broken = None, False
        self._finish()
        self._drain(now)

    def _replayed(self, reply: Reply, now: int) -> None:
        at, seq, mark = self.at, reply.seq, fingerprint(reply.payload)
        self._proven = True
        if at.whole and seq <= at.applied:
            known = at.print_of(seq)
            if known is not None and known != mark:
                self._replaced("another publisher answers than the one before", now)
            return
        batch = self._read(seq, mark, reply.payload, Origin.REPLAY)
        if not at.whole:
            if seq and not batch.restates:
                return
            at.move(seq - 1, 0, whole=True)
            self._voice.say(Origin.REPLAY, [Cleared()])
        if seq == at.applied + 1 or (batch.restates and not batch.decoded.lossy):
            self._voice.counters.healed += seq > at.applied + 1
            self._apply(batch)
            self._drain(now)
        else:
            # A reply went missing. This one may be of use after the next request.
            at.hold(msgspec.structs.replace(batch, order=self._order + 1))

    def _replay_ended(self, now: int) -> None:
        at, inquiry, counters = self.at, self._inquiry, self._voice.counters
        nothing = not inquiry.batches
        broken, self._broken, at.anchor = self._broken, False, None
        if nothing and not self._proven and not broken and (at.applied >= 0 or at.held):
            # Either it keeps nothing to replay, or what came live was from one before it: no telling.
            self._no_rebuild = True
            if at.whole and not at.held:
                self._lose("the publisher has nothing to replay", now)
            else:
                self._failed("it has nothing to replay", now, final=True)
            return
        if nothing and at.applied >= 0 and (inquiry.witness is not None or not at.whole):
            self._restart(f"the publisher doesn't know of batch {at.applied}")
        counters.impossible += at.drop_impossible(inquiry.furthest, inquiry.order)
        if not at.whole:
            if not nothing or at.held:
                self._no_rebuild = True
                self._failed("replay doesn't reach back far enough", now, final=True)
                return
            at.move(-1, 0, whole=True)  # nothing was published yet
        self._drain(now)
        if inquiry.ask is None or not at.whole:
            return
        if self._doubt:
            self._lose(self._doubt, now)
        elif not at.held and at.applied >= self._target:
            self._finish()
        elif at.applied > inquiry.applied:
            inquiry.tries = 0
            self._send(now)
        else:
            # What replay leaves out twice it doesn't have, and then it hasn't the beginning either.
            self._no_rebuild |= inquiry.tries > 0
            self._failed("replay doesn't reach back far enough", now, final=inquiry.tries > 0)

    def _snapshot_ended(self, now: int) -> None:
        at, inquiry, voice = self.at, self._inquiry, self._voice
        head = inquiry.head
        inquiry.knows_words = head is not None
        if head is None:
            self._failed("it has no snapshots", now, final=True)
            return
        decoded = [self._decoder.decode(part) for part in inquiry.parts]
        if len(decoded) != head.parts or any(part.lossy for part in decoded):
            self._failed("the snapshot was damaged", now)
            return
        voice.counters.snapshots += 1
        known, voice.publisher_epoch = voice.publisher_epoch, head.epoch
        voice.counters.impossible += at.drop_impossible(head.seq, inquiry.order)
        inquiry.stop()
        if at.whole and known == head.epoch and head.seq <= at.applied:
            self._drain(now)  # what was missing came by itself meanwhile
            return
        if known is not None and known != head.epoch:
            voice.counters.restarts += 1
            voice.epoch += 1
            self._live = -1
            self._no_rebuild = False
        self._checkpoint, self._broken = None, False
        at.move(head.seq, head.digest, whole=True)
        voice.say(Origin.SNAPSHOT, [event for part in decoded for event in part.events])
        self._drain(now)

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
