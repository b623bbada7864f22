"""Faults: what can happen to a stream between its publisher and its reader, on purpose and repeatable.

An ``Injector`` takes frames one by one and gives back what arrives instead. The same seed and the same frames give the same
faults, wherever they run: over an iterator, in a replayed recording, or in a proxy between two sockets. It never waits and
reads no clock; a stall of the consumer is counted in frames, since that is what decides which of them are lost.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Annotated

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport.frames import Frame
from kvyard.settings import Setting


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Fault rates, as probabilities per batch."""

    drop: Annotated[float, Setting("Probability that a batch is lost.", flag=True)] = 0.0
    duplicate: Annotated[float, Setting("Probability that a batch is sent twice.", flag=True)] = 0.0
    reorder: Annotated[float, Setting("Probability that up to reorder_by other batches overtake it.", flag=True)] = 0.0
    truncate: Annotated[float, Setting("Probability that the payload of a batch is cut short.", flag=True)] = 0.0
    corrupt: Annotated[float, Setting("Probability that bytes of the payload are changed.", flag=True)] = 0.0
    restart: Annotated[
        float, Setting("Probability that the publisher restarts: sequence 0, empty cache.", flag=True)
    ] = 0.0
    stall: Annotated[float, Setting("Probability that the consumer stops reading for a while.", flag=True)] = 0.0
    reorder_by: int = 4
    stall_frames: int = 50
    """Length of a stall, in frames."""
    stall_room: int = 10
    """Frames of a stall that fit into the consumer's queue; the others are lost."""
    seed: Annotated[int, Setting("Seed of the faults.", flag=True)] = 0

    def __post_init__(self) -> None:
        """Raises ``KvyardError`` for what isn't a probability or a count."""
        for name in RATES:
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise KvyardError(f"{name} is a probability from 0 to 1, got {rate}")
        for name in ("reorder_by", "stall_frames", "stall_room"):
            if getattr(self, name) < 0:
                raise KvyardError(f"{name} can't be negative, got {getattr(self, name)}")

    @property
    def any(self) -> bool:
        """Return true if any fault is possible."""
        return any(getattr(self, name) for name in RATES)


RATES = ("drop", "duplicate", "reorder", "truncate", "corrupt", "restart", "stall")


class FaultCounters(msgspec.Struct):
    """Counters of an injector."""

    frames: int = 0
    passed: int = 0
    """Frames given back, whatever their condition."""
    dropped: int = 0
    duplicated: int = 0
    reordered: int = 0
    truncated: int = 0
    corrupted: int = 0
    restarts: int = 0
    stalls: int = 0
    lost_in_stalls: int = 0


class Injector:
    """Makes faults happen to frames. Keeps back what is overtaken or stalled; ``flush`` lets it go."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.counters = FaultCounters()
        self._random = Random(faults.seed)
        self._base = 0
        self._overtaken: list[tuple[int, Frame]] = []
        self._stalled: list[Frame] | None = None
        self._stall_left = 0

    def renumber(self, frame: Frame) -> tuple[Frame, bool]:
        """Return the frame as the publisher sends it, and whether it is the first of a new one.

        For a relay, which stands in for the publisher and has to answer for what it sent. Call it once per frame, and then
        ``disturb``; ``feed`` does both.
        """
        restarted = self._happens(self.faults.restart)
        if restarted:
            self.counters.restarts += 1
            self._base = frame.seq
        if frame.seq < self._base:  # a real restart on top
            self._base = 0
        if not self._base:
            return frame, restarted
        return Frame(frame.topic, frame.seq - self._base, frame.payload), restarted

    def disturb(self, frame: Frame) -> list[Frame]:
        """Return the frames that arrive in place of ``frame``: none, itself, several, or a damaged one."""
        faults, counters = self.faults, self.counters
        counters.frames += 1
        out: list[Frame] = []
        if self._happens(faults.drop):
            counters.dropped += 1
        else:
            copies = 1
            if self._happens(faults.duplicate):
                counters.duplicated += 1
                copies = 2
            for _ in range(copies):
                copy = self._damaged(frame)
                if faults.reorder_by and self._happens(faults.reorder):
                    counters.reordered += 1
                    self._overtaken.append((self._random.randint(1, faults.reorder_by), copy))
                else:
                    out.append(copy)
        out += self._caught_up()
        return self._read(out)

    def feed(self, frame: Frame) -> list[Frame]:
        """Both: what arrives of ``frame``, renumbered if the publisher was restarted."""
        return self.disturb(self.renumber(frame)[0])

    def flush(self) -> list[Frame]:
        """Return the frames held back, at the end of the stream."""
        out = [frame for _, frame in sorted(self._overtaken, key=lambda item: item[0])]
        self._overtaken = []
        if self._stalled is not None:
            out = self._end_stall() + out
        self.counters.passed += len(out)
        return out

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def _damaged(self, frame: Frame) -> Frame:
        payload, random = frame.payload, self._random
        if payload and self._happens(self.faults.truncate):
            self.counters.truncated += 1
            payload = payload[: random.randrange(len(payload))]
        if payload and self._happens(self.faults.corrupt):
            self.counters.corrupted += 1
            spoilt = bytearray(payload)
            for _ in range(random.randint(1, 8)):
                offset = random.randrange(len(spoilt))
                spoilt[offset] ^= random.randint(1, 255)
            payload = bytes(spoilt)
        return frame if payload is frame.payload else Frame(frame.topic, frame.seq, payload)

    def _caught_up(self) -> list[Frame]:
        """Return frames that have now been overtaken by as many as they should."""
        ready = [frame for left, frame in self._overtaken if left <= 0]
        self._overtaken = [(left - 1, frame) for left, frame in self._overtaken if left > 0]
        return ready

    def _read(self, frames: list[Frame]) -> list[Frame]:
        """Return the frames that a consumer, which may be stalled, gets to read."""
        faults, counters = self.faults, self.counters
        if self._stalled is None and self._happens(faults.stall):
            counters.stalls += 1
            self._stalled, self._stall_left = [], faults.stall_frames
        if self._stalled is not None:
            room = max(0, faults.stall_room - len(self._stalled))
            self._stalled += frames[:room]
            counters.lost_in_stalls += len(frames) - len(frames[:room])
            self._stall_left -= 1
            frames = self._end_stall() if self._stall_left <= 0 else []
        counters.passed += len(frames)
        return frames

    def _end_stall(self) -> list[Frame]:
        frames, self._stalled = self._stalled or [], None
        return frames


def inject(frames: Iterable[Frame], faults: Faults) -> Iterator[Frame]:
    """Yield ``frames`` as they arrive with ``faults``."""
    injector = Injector(faults)
    for frame in frames:
        yield from injector.feed(frame)
    yield from injector.flush()
