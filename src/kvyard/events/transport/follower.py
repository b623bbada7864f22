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

from kvyard.events.transport.answers import Answers
from kvyard.events.transport.frames import Frame, Kind, Reply, fingerprint
from kvyard.events.transport.inquiry import IDENTITY, UNCONCERNED, Ask, Purpose, Step
from kvyard.events.transport.position import Arrival
from kvyard.events.transport.state import Origin, State, StreamStatus


class Follower(Answers):
    """Keeps one stream whole, or says that it isn't."""

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

    def resume(self, topic: bytes, seq: int, digest: int, publisher_epoch: int | None, now: int) -> None:
        """Go on after batch ``seq``: somebody else applied everything up to there, and what came of it was taken over."""
        self._inquiry.stop()
        self._heard = self._probed = now
        self._voice.topic, self._voice.publisher_epoch = topic, publisher_epoch
        self.at.move(seq, digest, whole=True)
        self._voice.become(State.FRESH)
        self.look(now)

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
            if reply.topic != voice.topic and (voice.topic is not None or not reply.topic.startswith(self._prefix)):
                voice.counters.foreign += 1
                return
            voice.topic = reply.topic
        self._inquiry.take(reply, now)
        if reply.kind == Kind.BATCH:
            if self._inquiry.replays:
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
        if not self._source:
            # Nobody can be asked who it is: numbers that were passed already are another publisher's from now on.
            self._live = max(self._live, self.at.applied)
        if self._source and self.at.whole and self.at.anchor is not None and self._inquiry.purpose in UNCONCERNED:
            self._verify(now)
        else:
            self.look(now)

    def _verify(self, now: int) -> None:
        self._voice.become(State.CATCHING_UP, "the connection broke")
        self._begin(Purpose.VERIFY, [Step.HEAD, Step.REPLAY], now)

    def look(self, now: int) -> None:
        """Find out now whether anything was missed."""
        if not self._source or self._inquiry.purpose is not None:
            return
        if self.at.whole:
            self._voice.counters.probes += 1
            self._probed = now
            self._quiet += 1
            self._inquiry.knows_words = self._inquiry.knows_words or None  # a "no" may have been a lost "yes"
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
        elif self._inquiry.purpose in (*UNCONCERNED, Purpose.VERIFY):
            self._voice.become(State.CATCHING_UP, why)
            self._begin(Purpose.SUSPECT, [Step.HEAD, Step.REPLAY], now)
        else:
            self._broken = True

    def _accept(self, batch: Arrival, now: int) -> None:
        """Apply ``batch``, or let it wait for what is missing before it."""
        at, readable = self.at, not batch.decoded.lossy
        trusted = at.whole and self._inquiry.purpose not in IDENTITY
        if trusted and batch.seq == at.applied + 1 and readable:
            self._apply(batch)
            self._drain(now)
        elif batch.restates and readable:
            # It clears everything: what was missed before it no longer matters.
            self._voice.counters.healed += at.applied >= 0
            self._go_on_from(batch, now)
        elif batch.seq == 0 and at.applied < 0 and not at.whole and readable and not (self._broken and self._source):
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
        at.digest = 0
        self._inquiry.stop()
        self._patience = None
        self._start_over(batch)
        if self._broken and self._source:
            # It may have been on its way since before the connection broke.
            at.anchor = batch.seq
            at.drop_covered()
            self._verify(now)
        else:
            self._drain(now)

    def _hold(self, batch: Arrival, now: int) -> None:
        at = self.at
        room = self._has_room(batch.size)
        at.hold(batch)
        if not room:
            self._voice.counters.overflows += 1
            self._give_up("too much arrived while something was missing", now)
        elif at.whole and self._patience is None and self._inquiry.purpose in UNCONCERNED:
            self._gap(now)
