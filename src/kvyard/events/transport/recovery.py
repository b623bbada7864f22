"""Recovery: what a stream does about gaps, damage, restarts and silence, as a state machine. ``BATCHES`` and
``SIGNALS``, at the end of this file, say for every phase what each batch and signal does and which phases may follow.

- A gap: replay from the last batch that was applied. That batch comes along as a witness: where its bytes differ, another
  publisher answers, and nothing it says fits what came before.
- Replay doesn't reach back that far: a snapshot. Neither can be had: stale, until a batch clears everything or one of the
  two succeeds later.
- Nothing known yet, or a restart: a snapshot first, since everything is missing; else replay from the very beginning.
- Silence may hide a loss, so a silent publisher is asked now and then.

It opens no socket and reads no clock. ``Follower`` passes it what comes in.
"""

import msgspec

from kvyard.events.mirror import restates
from kvyard.events.transport.frames import Reply, StreamHead, fingerprint
from kvyard.events.transport.inquiry import Inquiry, RequestKind
from kvyard.events.transport.phases import (
    ASKING,
    FOLLOWING,
    GAP,
    GAPPED,
    LOST,
    NOT_WHOLE,
    PROBE,
    REBUILD,
    STALE,
    SUSPECT,
    UNIDENTIFIED,
    VERIFY,
    WAITING,
    BatchKind,
    Phase,
    Signal,
    table,
)
from kvyard.events.transport.position import ReceivedBatch, StreamPosition, UpdateLog
from kvyard.events.transport.state import Limits, Origin, State
from kvyard.events.types import Cleared
from kvyard.events.wire import Decoder


class Recovery:
    """One stream's phase and all that its actions need. ``handle`` and ``accept`` are the ways in."""

    def __init__(
        self, position: StreamPosition, log: UpdateLog, inquiry: Inquiry, decoder: Decoder, limits: Limits, source: bool
    ) -> None:
        """``source`` says whether there is a replay socket to ask."""
        self.phase = STALE
        self.highest = -1
        """The highest sequence that came live."""
        self.order = 0
        """Live batches so far."""
        self.heard = self.probed = self.quiet = 0
        """Times of the latest message and of the latest request, and the number of probes that found nothing since."""
        self._at = position
        self._log = log
        self._inquiry = inquiry
        self._decoder = decoder
        self._limits = limits
        self._source = source
        self._proven = False
        """True once a replay brought anything: only then an empty answer is meaningful."""
        self._broken = False
        """True if the connection broke since the publisher was last identified."""
        self._no_rebuild = False
        """True if a replay from the beginning can't succeed: the beginning is missing or unreadable."""
        self._doubt = ""
        """Why what was just applied may be wrong."""
        self._checkpoint: StreamHead | None = None
        """Head that the publisher reported last, until the reader has reached it."""
        self._target = -1
        """Sequence that closes the gap, besides the held batches."""
        self._due = 0
        """End of WAITING, STALE or the checkpoint."""

    def handle(self, signal: Signal, now: int) -> None:
        """Do what ``SIGNALS`` says; nothing if it has no entry."""
        row = self.SIGNALS.get((signal, self.phase))
        if row is not None:
            row.action(self, now)

    def accept(self, batch: ReceivedBatch, now: int) -> None:
        """A live batch that is no repetition: do what ``BATCHES`` says; nothing if it has no entry."""
        row = self.BATCHES.get((self._kind_of(batch), self.phase))
        if row is not None:
            row.action(self, now, batch)

    def _kind_of(self, batch: ReceivedBatch) -> BatchKind:
        position = self._at
        if batch.seq <= position.applied:
            return BatchKind.BACKWARD
        if not batch.decoded.lossy:
            if self.whole and self.phase not in UNIDENTIFIED and batch.seq == position.applied + 1:
                return BatchKind.NEXT
            if batch.restates:
                return BatchKind.RESTATES
            if batch.seq == 0 and position.applied < 0 and not self.whole and not (self._broken and self._source):
                return BatchKind.FIRST
        return BatchKind.EARLY

    def read(self, seq: int, mark: int, payload: bytes, origin: Origin) -> ReceivedBatch:
        decoded = self._decoder.decode(payload)
        return ReceivedBatch(
            seq=seq,
            print=mark,
            decoded=decoded,
            origin=origin,
            order=self.order,
            size=len(payload),
            restates=restates(decoded.events),
        )

    def resume(self, now: int) -> None:
        """Go on from the position: another reader applied everything up to it."""
        self._enter(FOLLOWING)
        self._log.set_state(State.FRESH)
        self.handle(Signal.LOOK, now)

    @property
    def whole(self) -> bool:
        """Return true if everything up to the last applied batch was applied."""
        return self.phase not in NOT_WHOLE

    @property
    def due(self) -> int | None:
        """Return the time at which ``tick`` should be called, ``None`` if there is nothing to wait for."""
        if self.phase in ASKING:
            return self._inquiry.due
        if self.phase == WAITING:
            return self._due
        if not self._source:
            return None
        if self.phase == STALE:
            return self._due
        limits, dues = self._limits, []
        if limits.probe:
            idle = min(limits.probe << min(self.quiet, 32), limits.probe_most)
            dues.append(max(self.heard, self.probed) + idle)
            if self._inquiry.knows_words:
                dues.append(self.probed + limits.probe_most)
        if self._checkpoint is not None:
            dues.append(self._due)
        return min(dues, default=None)

    def tick(self, now: int) -> None:
        """Do what has become due."""
        due = self.due
        if due is None or now < due:
            return
        if self.phase in ASKING:
            self.handle(Signal.TIMEOUT, now)
        elif self.phase == WAITING:
            self.handle(Signal.LATE, now)
        elif self.phase == FOLLOWING and self._checkpoint is not None and now >= self._due:
            self.handle(Signal.BEHIND, now)
        else:
            self.handle(Signal.LOOK, now)

    # -- actions on batches -----------------------------------------------------------------------------------------

    def _next(self, now: int, batch: ReceivedBatch) -> None:
        self._apply(batch)
        self._settle(now)

    def _heal(self, now: int, batch: ReceivedBatch) -> None:
        """Continue from a batch that clears everything: missed batches before it no longer matter."""
        self._log.counters.healed += self._at.applied >= 0
        self._go_on_from(now, batch)

    def _go_on_from(self, now: int, batch: ReceivedBatch) -> None:
        position = self._at
        if self.whole and self.phase not in (WAITING, GAP):
            self._count_gap(batch.seq)
        position.digest = 0
        self._start_over(batch)
        self._enter(FOLLOWING)
        if self._broken and self._source:
            # It may have been in flight since before the connection broke.
            position.anchor = batch.seq
            position.drop_covered()
            self._verify(now)
        else:
            self._settle(now)

    def _hold(self, now: int, batch: ReceivedBatch) -> None:
        room = self._has_room(batch.size)
        self._at.hold(batch)
        if room:
            self.handle(Signal.HOLE, now)
        else:
            self._log.counters.overflows += 1
            self._give_up("too much arrived while something was missing", now)

    def _pass_on_stale(self, now: int, batch: ReceivedBatch) -> None:
        reason = f"batches before {batch.seq} were missed" if self._at.applied < 0 else self._log.reason
        self._log.set_state(State.STALE, reason)
        self._apply(batch)

    def _suspect(self, now: int, batch: ReceivedBatch) -> None:
        if not self._source:
            self._assume_restart(now, batch)
            return
        self._log.set_state(State.CATCHING_UP, self._went_back(batch))
        self._begin(SUSPECT, [RequestKind.HEAD, RequestKind.REPLAY], now)

    def _assume_restart(self, now: int, batch: ReceivedBatch) -> None:
        why = self._went_back(batch)
        self._restart(why)
        if self._source:
            self._lose(why, now)
        self.accept(batch, now)

    def _went_back(self, batch: ReceivedBatch) -> str:
        return f"the sequence went back from {self._at.applied} to {batch.seq}"

    def _note_break(self, now: int, batch: ReceivedBatch) -> None:
        """Identify the publisher before any more of its batches are trusted, by the request in flight."""
        self._broken = True

    # -- actions once batches were applied --------------------------------------------------------------------------

    def _lose_to_doubt(self, now: int) -> None:
        self._lose(self._doubt, now)

    def _gap(self, now: int) -> None:
        position = self._at
        self._count_gap(min(position.held, default=self._target + 1))
        self._log.set_state(State.CATCHING_UP, f"batch {position.applied + 1} is missing")
        if not self._source:
            self._enter(WAITING)
            self._due = now + self._limits.patience
            return
        plan = [RequestKind.REPLAY, RequestKind.SNAPSHOT]
        if self._inquiry.knows_words and position.witness is None:
            # Right after a snapshot no batch is remembered that could identify the publisher.
            plan.reverse()
        self._begin(GAP, plan, now)

    def _close_gap(self, now: int) -> None:
        if self._at.applied >= self._target:
            self._finish()

    def _complete(self, now: int) -> None:
        self._finish()

    # -- actions on answers -----------------------------------------------------------------------------------------

    def replayed(self, reply: Reply, now: int) -> None:
        """Handle one batch of a replay; the request's end is a signal."""
        position, inquiry, seq, mark = self._at, self._inquiry, reply.seq, fingerprint(reply.payload)
        self._proven = True
        if self.whole and seq <= position.applied:
            known = position.prints.get(seq)
            if known is not None and known != mark:
                self._replace("another publisher answers than the one before", now)
            elif seq == inquiry.witness:
                inquiry.confirmed = True
            return
        if self.whole and self._unproven:
            return  # it may be another publisher's
        batch = self.read(seq, mark, reply.payload, Origin.REPLAY)
        if not self.whole:
            if seq and not batch.restates:
                return
            position.move(seq - 1, 0)
            self.phase, self._broken = REBUILD, False
            self._log.add(Origin.REPLAY, [Cleared()])
        if seq == position.applied + 1:
            self._apply(batch)
            self._settle(now)
        elif batch.restates and not batch.decoded.lossy:
            self._log.counters.healed += 1
            self._start_over(batch)
            self._settle(now)
        elif self._has_room(len(reply.payload)):
            # A reply went missing. This one may be of use after the next request.
            self._log.set_state(State.CATCHING_UP, f"batch {position.applied + 1} is missing")
            position.hold(msgspec.structs.replace(batch, order=self.order + 1))

    def _head_ended(self, now: int) -> None:
        inquiry, log, position = self._inquiry, self._log, self._at
        head = inquiry.head
        inquiry.knows_words = head is not None
        inquiry.skip()
        if head is None:
            self._send(now)
            return
        known, log.publisher_epoch = log.publisher_epoch, head.epoch
        if (known is not None and known != head.epoch) or head.seq < inquiry.applied:
            self._replace("the publisher was restarted", now)
            return
        if head.seq > position.applied:
            # Messages in flight may still arrive.
            self._checkpoint, self._due = head, now + 2 * self._limits.patience
        elif head.seq == position.applied:
            self._compare_digest(head)
        if known is None and position.witness is not None and not self._doubt:
            self._send(now)
            return
        position.anchor, self._broken = None, False
        self._finish()
        self._settle(now)

    def _replay_ended(self, now: int) -> None:
        position, inquiry = self._at, self._inquiry
        nothing = not inquiry.batches
        if self.whole and self._unproven and not nothing:
            why = f"replay no longer has batch {position.applied if inquiry.witness is None else inquiry.witness}"
            why = f"the publisher may be another: {why}"
            if self.phase == SUSPECT:
                self._restart(why)
            self._lose(why, now)
            return
        broken, self._broken, position.anchor = self._broken, False, None
        if nothing and not self._proven and not broken and (position.applied >= 0 or position.held):
            # Either it keeps nothing to replay, or the live batches were those of an earlier publisher: both look alike.
            self._no_rebuild = True
            if self.whole and not position.held:
                self._lose("the publisher has nothing to replay", now)
            else:
                self._failed("it has nothing to replay", now, final=True)
            return
        if nothing and position.applied >= 0 and (inquiry.witness is not None or not self.whole):
            # A new publisher that has sent nothing yet.
            self._restart(f"the publisher doesn't know of batch {position.applied}")
            self._finish()
            return
        self._log.counters.impossible += position.drop_impossible(inquiry.furthest, inquiry.order)
        if not self.whole:
            if not nothing or position.held:
                self._no_rebuild = True
                self._failed("replay doesn't reach back far enough", now, final=True)
                return
            position.move(-1, 0)  # nothing was published yet
            self.phase = REBUILD
        self._settle(now)
        if inquiry.request is None or not self.whole:
            return
        if self._doubt:
            self._lose(self._doubt, now)
        elif not position.held and position.applied >= self._target:
            self._finish()
        elif position.applied > inquiry.applied:
            inquiry.tries = 0
            self._send(now)
        else:
            # What replay leaves out twice it doesn't have, and then it hasn't the beginning either.
            self._no_rebuild |= inquiry.tries > 0
            self._failed("replay doesn't reach back far enough", now, final=inquiry.tries > 0)

    def _snapshot_ended(self, now: int) -> None:
        position, inquiry, log = self._at, self._inquiry, self._log
        head = inquiry.head
        inquiry.knows_words = head is not None
        if head is None:
            self._failed("it has no snapshots", now, final=True)
            return
        snapshot = inquiry.take_snapshot()
        if snapshot.bytes > self._limits.snapshot_bytes:
            why = f"the snapshot has more than {self._limits.snapshot_bytes} bytes"
            self._failed(why, now, final=True)
            return
        if snapshot.parts != head.parts or snapshot.lossy:
            self._failed("the snapshot was damaged", now)
            return
        log.counters.snapshots += 1
        known, log.publisher_epoch = log.publisher_epoch, head.epoch
        log.counters.impossible += position.drop_impossible(head.seq, inquiry.order)
        covered = self.whole and known == head.epoch and head.seq <= position.applied
        self._enter(FOLLOWING)
        if covered:
            self._settle(now)  # what was missing came by itself meanwhile
            return
        if known is not None and known != head.epoch:
            log.counters.restarts += 1
            log.epoch += 1
            self.highest = -1
            self._no_rebuild = False
        self._checkpoint, self._broken = None, False
        position.move(head.seq, head.digest)
        log.rank = snapshot.rank
        log.add(Origin.SNAPSHOT, snapshot.events)
        self._settle(now)

    # -- actions on time and connections ----------------------------------------------------------------------------

    def _timed_out(self, now: int) -> None:
        self._log.counters.timeouts += 1
        self._failed("the publisher doesn't answer", now)

    def _end_probe(self, now: int) -> None:
        self._enter(FOLLOWING)

    def _end_suspicion(self, now: int) -> None:
        self._replace(self._why_exhausted(), now)

    def _end_inquiry(self, now: int) -> None:
        self._give_up(self._why_exhausted(), now)

    def _stop_waiting(self, now: int) -> None:
        self._give_up(f"batch {self._at.applied + 1} is missing and there is no replay endpoint to ask for it", now)

    def _fetch_to_checkpoint(self, now: int) -> None:
        assert self._checkpoint is not None
        self._target, self._checkpoint = self._checkpoint.seq, None
        self._gap(now)

    def _probe(self, now: int) -> None:
        if not self._source:
            return
        self._log.counters.probes += 1
        self.probed = now
        self.quiet += 1
        self._inquiry.knows_words = self._inquiry.knows_words or None  # a "no" may have been a lost "yes"
        self._begin(PROBE, [RequestKind.HEAD, RequestKind.REPLAY], now)

    def _retry(self, now: int) -> None:
        if self._source:
            self._inquiry.knows_words = self._inquiry.knows_words or None  # as above
            self._lose(self._log.reason, now)

    def _reconnected(self, now: int) -> None:
        """Prepare for another publisher after a new connection."""
        position = self._at
        self._inquiry.knows_words = None
        self._no_rebuild = False
        self._broken = True
        if position.anchor is None and position.applied >= 0:
            position.anchor = position.applied
        if not self._source:
            # It can't be asked who it is: numbers that were passed already are another publisher's from now on.
            self.highest = max(self.highest, position.applied)
        elif position.anchor is not None and self.phase in (FOLLOWING, PROBE):
            self._verify(now)
            return
        self.handle(Signal.LOOK, now)

    # -- what actions are made of -----------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase not in ASKING:
            self._inquiry.stop()

    def _apply(self, batch: ReceivedBatch) -> None:
        """Pass ``batch`` on as the next one."""
        position = self._at
        position.release(batch.seq)
        position.advance(batch)
        self._log.add_batch(batch)
        loss = batch.decoded.loss
        if loss is not None:
            self._no_rebuild |= batch.origin == Origin.REPLAY  # a live one may have been damaged in flight
            self._doubt = f"batch {batch.seq} can't be read in full: {loss.reason}"
        checkpoint = self._checkpoint
        if checkpoint is not None and position.applied >= checkpoint.seq:
            self._checkpoint = None
            if position.applied == checkpoint.seq:
                self._compare_digest(checkpoint)

    def _start_over(self, batch: ReceivedBatch) -> None:
        """Apply a batch that clears everything. Where others before it are missing, those may have been about any tier."""
        position = self._at
        if position.applied >= 0 and not (self.whole and batch.seq == position.applied + 1):
            self._log.add(batch.origin, [Cleared()])
        self._apply(batch)

    def _settle(self, now: int) -> None:
        """Apply held batches that are next now, and signal where that leaves the stream."""
        position = self._at
        while (batch := position.next()) is not None:
            self._apply(batch)
        position.drop_covered()
        self.handle(Signal.DOUBT if self._doubt else Signal.HOLE if position.held else Signal.COMPLETE, now)

    def _has_room(self, size: int) -> bool:
        limits, position = self._limits, self._at
        return (
            len(position.held) < limits.held_batches
            and position.held_bytes + size <= limits.held_bytes
            and position.waiting.total + size <= limits.held_in_all
        )

    def _compare_digest(self, head: StreamHead) -> None:
        if self.whole and head.digest != self._at.digest:
            self._log.counters.mismatches += 1
            self._doubt = f"what was received up to batch {head.seq} is not what was sent"

    @property
    def _unproven(self) -> bool:
        """Return true if the publisher hasn't yet proved to be the one whose batches were applied."""
        doubtful = self._broken or self.phase in UNIDENTIFIED
        return doubtful and not self._inquiry.confirmed and self._at.applied >= 0

    def _count_gap(self, first: int) -> None:
        self._log.counters.gaps += 1
        self._log.counters.missed += max(0, first - self._at.applied - 1)

    def _verify(self, now: int) -> None:
        self._log.set_state(State.CATCHING_UP, "the connection broke")
        self._begin(VERIFY, [RequestKind.HEAD, RequestKind.REPLAY], now)

    def _lose(self, why: str, now: int) -> None:
        """Discard the applied state as a base for further batches, and plan a recovery."""
        self._doubt = ""
        self._checkpoint = None
        plan = self._ways_back()
        if not plan:
            self._give_up(why, now)
            return
        self._log.set_state(State.CATCHING_UP, why)
        self._begin(LOST, plan, now)

    def _ways_back(self) -> list[RequestKind]:
        """Return the requests worth making when everything is lost."""
        if not self._source:
            return []
        ways = [] if self._inquiry.knows_words is False else [RequestKind.SNAPSHOT]
        return ways if self._no_rebuild else [*ways, RequestKind.REBUILD]

    def _restart(self, why: str) -> None:
        """Start over with a new publisher: everything that the old one held is discarded."""
        log = self._log
        log.counters.restarts += 1
        log.epoch += 1
        log.publisher_epoch = self._inquiry.knows_words = self._checkpoint = None
        self.highest = self._target = -1
        self._doubt = ""
        self._no_rebuild = self._broken = False
        self._at.drop_all()
        self._at.move(-1, 0)
        self._enter(STALE)
        log.add(Origin.RESET, [Cleared()], reason=why)

    def _replace(self, why: str, now: int) -> None:
        self._restart(why)
        self._lose(why, now)

    def _give_up(self, why: str, now: int) -> None:
        position = self._at
        self._log.counters.gave_up += 1
        self._enter(STALE)
        self._due = now + self._limits.cooldown
        self._log.set_state(State.STALE, why)
        for seq in sorted(position.held):
            self._apply(position.held[seq])
        self._doubt = ""

    def _finish(self) -> None:
        """Return to following: no batch is missing."""
        self._enter(FOLLOWING)
        self._target = -1
        self._log.set_state(State.FRESH)

    def _begin(self, phase: Phase, plan: list[RequestKind], now: int) -> None:
        self._enter(phase)
        self._inquiry.begin(plan, attempts=1 if phase == PROBE else self._limits.attempts)
        self._send(now)

    def _send(self, now: int) -> None:
        """Make the next request of the plan."""
        if not self._inquiry.send(self._at, self.order, now):
            self.handle(Signal.EXHAUSTED, now)
        elif self._inquiry.replays:
            self._log.counters.replays += 1

    def _failed(self, why: str, now: int, final: bool = False) -> None:
        """Retry a request that failed, or go on to the next kind."""
        self._inquiry.failed(why, final)
        self._send(now)

    def _why_exhausted(self) -> str:
        failures = self._inquiry.failures
        return ": ".join([self._log.reason.partition(": ")[0], *([", ".join(failures)] if failures else [])])

    # -- the tables ---------------------------------------------------------------------------------------------------

    BATCHES = table(
        # a batch that is, in these phases, does this, and leads to one of these
        (BatchKind.NEXT, (FOLLOWING, PROBE, GAP), _next, (FOLLOWING, PROBE, *GAPPED)),
        (BatchKind.NEXT, (WAITING,), _next, (FOLLOWING, WAITING, STALE)),
        (BatchKind.NEXT, (REBUILD,), _next, (REBUILD,)),
        (BatchKind.RESTATES, tuple(Phase), _heal, (FOLLOWING, VERIFY, *GAPPED)),
        (BatchKind.FIRST, (LOST, STALE), _go_on_from, (FOLLOWING, VERIFY, *GAPPED)),
        (BatchKind.EARLY, (FOLLOWING, PROBE), _hold, GAPPED),
        (BatchKind.EARLY, (WAITING, *ASKING - {PROBE}), _hold, (WAITING, *ASKING - {PROBE}, STALE)),
        (BatchKind.EARLY, (STALE,), _pass_on_stale, (STALE,)),
        (BatchKind.BACKWARD, (FOLLOWING, PROBE, VERIFY), _suspect, (FOLLOWING, SUSPECT, LOST, STALE)),
        (BatchKind.BACKWARD, (WAITING, STALE), _assume_restart, (FOLLOWING, LOST, STALE)),
        (BatchKind.BACKWARD, (SUSPECT, GAP, REBUILD), _note_break, (SUSPECT, GAP, REBUILD)),
    )
    SIGNALS = table(
        # a signal, in these phases, does this, and leads to one of these
        (Signal.DOUBT, (FOLLOWING, WAITING, PROBE, SUSPECT, VERIFY, GAP), _lose_to_doubt, (LOST, STALE)),
        (Signal.HOLE, (FOLLOWING, PROBE), _gap, GAPPED),
        (Signal.COMPLETE, (FOLLOWING, WAITING), _complete, (FOLLOWING,)),
        (Signal.COMPLETE, (GAP,), _close_gap, (FOLLOWING, GAP)),
        (Signal.HEAD, ASKING, _head_ended, tuple(Phase)),
        (Signal.REPLAY, ASKING, _replay_ended, tuple(Phase)),
        (Signal.SNAPSHOT, ASKING, _snapshot_ended, tuple(Phase)),
        (Signal.TIMEOUT, (PROBE,), _timed_out, (PROBE, FOLLOWING)),
        (Signal.TIMEOUT, (SUSPECT,), _timed_out, (SUSPECT, LOST, STALE)),
        (Signal.TIMEOUT, (VERIFY, GAP, LOST, REBUILD), _timed_out, (VERIFY, GAP, LOST, REBUILD, STALE)),
        (Signal.EXHAUSTED, (PROBE,), _end_probe, (FOLLOWING,)),
        (Signal.EXHAUSTED, (SUSPECT,), _end_suspicion, (LOST, STALE)),
        (Signal.EXHAUSTED, (VERIFY, GAP, LOST, REBUILD), _end_inquiry, (STALE,)),
        (Signal.LATE, (WAITING,), _stop_waiting, (STALE,)),
        (Signal.BEHIND, (FOLLOWING,), _fetch_to_checkpoint, GAPPED),
        (Signal.LOOK, (FOLLOWING,), _probe, (PROBE, FOLLOWING)),
        (Signal.LOOK, (STALE,), _retry, (LOST, STALE)),
        (Signal.RECONNECTED, tuple(set(Phase) - NOT_WHOLE), _reconnected, tuple(set(Phase) - NOT_WHOLE)),
        (Signal.RECONNECTED, NOT_WHOLE, _reconnected, (LOST, STALE)),
    )
