"""Answers: what a publisher's replies mean for a stream. Heads, replayed batches and snapshots, and their ends."""

from __future__ import annotations

import msgspec

from kvyard.events.transport.frames import Reply, fingerprint
from kvyard.events.transport.inquiry import IDENTITY, Purpose
from kvyard.events.transport.mending import Mending
from kvyard.events.transport.state import Origin, State
from kvyard.events.types import Cleared


class Answers(Mending):
    """The part of a follower that listens to replies. A method per kind of request, called when its answer has ended."""

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
        at, inquiry, seq, mark = self.at, self._inquiry, reply.seq, fingerprint(reply.payload)
        self._proven = True
        if at.whole and seq <= at.applied:
            known = at.print_of(seq)
            if known is not None and known != mark:
                self._replaced("another publisher answers than the one before", now)
            elif seq == inquiry.witness:
                inquiry.confirmed = True
            return
        if at.whole and self._unproven:
            return  # it may be somebody else's
        batch = self._read(seq, mark, reply.payload, Origin.REPLAY)
        if not at.whole:
            if seq and not batch.restates:
                return
            at.move(seq - 1, 0, whole=True)
            self._broken = False
            self._voice.say(Origin.REPLAY, [Cleared()])
        if seq == at.applied + 1:
            self._apply(batch)
            self._drain(now)
        elif batch.restates and not batch.decoded.lossy:
            self._voice.counters.healed += 1
            self._start_over(batch)
            self._drain(now)
        elif self._has_room(len(reply.payload)):
            # A reply went missing. This one may be of use after the next request.
            self._voice.become(State.CATCHING_UP, f"batch {at.applied + 1} is missing")
            at.hold(msgspec.structs.replace(batch, order=self._order + 1))

    @property
    def _unproven(self) -> bool:
        """Whether the publisher has yet to show that it is the one whose batches were applied."""
        inquiry = self._inquiry
        doubtful = self._broken or inquiry.purpose in IDENTITY
        return doubtful and not inquiry.confirmed and self.at.applied >= 0

    def _replay_ended(self, now: int) -> None:
        at, inquiry, counters = self.at, self._inquiry, self._voice.counters
        nothing = not inquiry.batches
        if at.whole and self._unproven and not nothing:
            why = f"replay no longer has batch {at.applied if inquiry.witness is None else inquiry.witness}"
            why = f"the publisher may be another: {why}"
            if inquiry.purpose == Purpose.SUSPECT:
                self._restart(why)
            self._lose(why, now)
            return
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
        voice.rank = decoded[0].rank if decoded else None
        voice.say(Origin.SNAPSHOT, [event for part in decoded for event in part.events])
        self._drain(now)
