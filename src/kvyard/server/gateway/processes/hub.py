"""The hub: what the parent of a gateway's processes does between them.

It passes frames on, puts operators' changes into one order, and keeps what has to be in one place: rates of keys and models,
where responses are, counters of processes that have ended, the recording and the access log. What it keeps is bounded, and so
is what waits for a process that doesn't read. It has no threads and no event loop, so that its process can fork at any time.
"""

import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from kvyard.clock import VirtualClock, WallClock
from kvyard.server.gateway.access.rates import Allowance, Rate, RateTicket
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.processes.changes import ChangeName, EngineChange, KeptChanges
from kvyard.server.gateway.processes.figures import Figures, HubState, ended_figures
from kvyard.server.gateway.processes.frames import ALL, HUB, LOSSY, FrameKind, FrameReader, frame
from kvyard.server.gateway.processes.records import RecordedCall, write_down
from kvyard.server.gateway.recording import TrafficRecorder
from kvyard.server.health import HealthReason
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

READ = 256 << 10
"""Bytes read of one process at a time."""
MOST_WAITING = 64 << 20
"""Bytes that wait for one process."""
MOST_ALLOWANCES = 4096
"""Number of rates above which full ones are freed: a full one is as good as a new one."""

encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(tuple[int, str, bytes]).decode
_seen = msgspec.msgpack.Decoder(tuple[str, ResponseHome]).decode
_figures = msgspec.msgpack.Decoder(Figures).decode
_change = msgspec.msgpack.Decoder(EngineChange).decode
_call = msgspec.msgpack.Decoder(RecordedCall).decode

RateName = tuple[str, int | None, int | None]
"""Name of a rate, its requests and its tokens a minute."""
_admission = msgspec.msgpack.Decoder(tuple[list[RateName], int]).decode
_settling = msgspec.msgpack.Decoder(tuple[list[RateName], int]).decode


class _HubProcess(msgspec.Struct, eq=False):
    """One process."""

    number: int
    end: socket.socket
    reader: FrameReader
    waiting: deque[bytes]
    size: int = 0
    """Bytes that wait."""
    ready: bool = False
    behind: bool = False
    """True if frames were left out."""
    figures: Figures = []
    recorded: set[str] = set()
    """Requests that are recorded, and not over."""
    unanswered: int = 0
    """Looks since its latest message."""
    missed: set[ChangeName] = set()
    """Changes in flight when it came: it didn't receive them."""
    caught_up: bool = False
    """True if it has asked for the changes that were made before."""


class Hub:
    """For one thread."""

    def __init__(
        self,
        processes: int,
        recorder: TrafficRecorder | None = None,
        recorder_clock: VirtualClock | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """``recorder_clock`` is the recorder's."""
        self.restarts = 0
        """Processes that ended and were started again, over all time."""
        self.engines = 0
        """Engines of the first process when it was ready."""
        self._clock = WallClock.since_epoch()
        self._processes = processes
        self._recorder = recorder
        self._recorder_clock = recorder_clock or VirtualClock()
        self._access_log = access_log
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _HubProcess] = {}
        self._asked: list[tuple[int, bytes]] = []
        """Requests that wait until everything sent before them is read."""
        self._homes = ResponseHomes()
        self._changes = KeptChanges()
        self._allowances: dict[RateName, Allowance] = {}
        self._ended: Figures = []
        self._config = b""
        """Settings that processes have read since the start; empty: those of the start."""

    # -- who there is -----------------------------------------------------------------------------------------------------

    def watch(self, readable: Any, called: Callable[[], None]) -> None:
        """Call ``called`` where something can be read there."""
        self._selector.register(readable, selectors.EVENT_READ, called)

    def add(self, number: int, end: socket.socket) -> None:
        """Add a process that was started with the other end."""
        end.setblocking(False)
        for other in self._members:
            self.send(FrameKind.JOINED, other, HUB, bytes([number]))
        self._members[number] = member = _HubProcess(number, end, FrameReader(), deque())
        member.missed = self._changes.begun_by_now
        self._selector.register(end, selectors.EVENT_READ, member)
        for other in self._members:
            if other != number:
                self.send(FrameKind.JOINED, number, HUB, bytes([other]))

    def remove(self, number: int) -> None:
        """Remove a process that ended."""
        member = self._members.get(number)
        if member is None:
            return
        while self._read(member):
            pass  # its latest report
        del self._members[number]
        with suppress(KeyError):
            self._selector.unregister(member.end)
        member.end.close()
        self._ended = ended_figures(self._ended, member.figures, [other.figures for other in self._members.values()])
        if self._recorder is not None:
            for id_ in member.recorded:
                self._recorder.ended((number, id_), 0)  # it won't say how they end, and rows behind them wait
        for other in self._members:
            self.send(FrameKind.GONE, other, HUB, bytes([number]))

    def is_ready(self, number: int) -> bool:
        """Return true if a process answers requests."""
        return number in self._members and self._members[number].ready

    def forget_all(self) -> None:
        """Close all ends in a process that was just forked, so that each process notices when the parent is gone."""
        for member in self._members.values():
            member.end.close()
        self._selector.close()

    def close(self) -> None:
        """End the files."""
        self.forget_all()
        if self._recorder is not None:
            self._recorder.close()
        if self._access_log is not None:
            self._access_log.close()

    def flush(self) -> None:
        """Write out what would be lost with this process."""
        if self._recorder is not None:
            self._recorder.flush()
        if self._access_log is not None:
            self._access_log.flush()

    def reload(self) -> None:
        """Have all processes read their configuration again, and begin the access log again by its name."""
        if self._access_log is not None:
            self._access_log.reopen()
        self.tell_all(FrameKind.RELOAD)

    def look(self) -> dict[int, int]:
        """Ask those that are ready whether they still answer. Returns for each how many looks it has left unanswered."""
        for member in self._members.values():
            if member.ready:
                self.send(FrameKind.ASK, member.number, HUB, encode((0, "alive", b"")))
                member.unanswered += 1
        return {member.number: member.unanswered - 1 for member in self._members.values() if member.ready}

    # -- frames -----------------------------------------------------------------------------------------------------------

    def tell_all(self, kind: FrameKind) -> None:
        """Tell all processes."""
        for number in self._members:
            self.send(kind, number, HUB)

    def wait(self, seconds: float) -> None:
        """Pass on and answer what comes within ``seconds``; returns after the first of it."""
        self._turn(seconds)
        if self._asked:
            # Reports that a process sent before it let another ask have arrived by now, and count.
            self._turn(0)
            asked, self._asked = self._asked, []
            for number, body in asked:
                try:
                    self._answer(number, body)
                except Exception:
                    log.exception("a question of process %d can't be answered", number)

    def _turn(self, seconds: float) -> None:
        for key, events in self._selector.select(max(0.0, seconds)):
            member = key.data
            if not isinstance(member, _HubProcess):
                member()
                continue
            if events & selectors.EVENT_WRITE:
                self._write(member)
            if events & selectors.EVENT_READ:
                self._read(member)

    def _read(self, member: _HubProcess) -> bool:
        """Read messages of a process; returns True if there may be more."""
        try:
            data = member.end.recv(READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with suppress(KeyError):
                self._selector.unregister(member.end)  # it ends: its exit is what counts
            return False
        member.unanswered = 0
        for kind, peer, body in member.reader.feed(data):
            if peer == ALL:
                for other in self._members:
                    if other != member.number:
                        self.send(kind, other, member.number, body)
            elif peer != HUB:
                self.send(kind, peer, member.number, body)
            else:
                try:
                    self._told(member, kind, body)
                except Exception:
                    # A fault of ours: it costs this frame. With the parent all processes would end.
                    log.exception("a frame of kind %s from process %d can't be used", kind.name, member.number)
        return True

    def send(self, kind: FrameKind, to: int, sender: int, body: bytes = b"") -> None:
        """Pass a frame to a process. One that doesn't read misses frames that can be sent again later."""
        member = self._members.get(to)
        lossy = kind in LOSSY and sender != HUB  # a request waits for each of the hub's own answers
        if member is None or (member.behind and lossy):
            return
        data = frame(kind, sender, body)
        if lossy and member.size + len(data) > MOST_WAITING:
            member.behind = True
            return
        member.waiting.append(data)
        member.size += len(data)
        if len(member.waiting) == 1:
            self._write(member)

    def _write(self, member: _HubProcess) -> None:
        waiting = member.waiting
        while waiting:
            try:
                sent = member.end.send(waiting[0])
            except BlockingIOError:
                break
            except OSError:
                waiting.clear()
                member.size = 0
                return  # it has ended
            member.size -= sent
            if sent < len(waiting[0]):
                waiting[0] = waiting[0][sent:]
                break
            waiting.popleft()
        with suppress(KeyError, ValueError):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
            if self._selector.get_key(member.end).events != events:
                self._selector.modify(member.end, events, member)
        if member.behind and not waiting:
            member.behind = False
            for other in self._members:
                if other != member.number:
                    self.send(FrameKind.RESTATE, other, HUB, bytes([member.number]))

    # -- what is for the hub itself -----------------------------------------------------------------------------------------

    def _told(self, member: _HubProcess, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ASK:
            self._asked.append((member.number, body))
        elif kind is FrameKind.SETTLE:
            rates, tokens = _settling(body)
            for name in rates:
                bucket = self._allowance(name).tokens
                if bucket is not None:
                    bucket.take(tokens)
        elif kind is FrameKind.SEEN:
            self._homes.remember(*_seen(body))
        elif kind is FrameKind.KEEP:
            member.figures = _figures(body)
        elif kind is FrameKind.CHANGE:
            self._changes.begun(member.number, _change(body))
            for other in list(self._members):
                self.send(kind, other, member.number, body)
        elif kind is FrameKind.CHANGED:
            self._made(body[0], body[1:])
        elif kind is FrameKind.RECORD:
            if self._recorder is not None:
                call = _call(body)
                (member.recorded.discard if call.keys is None else member.recorded.add)(call.id)
                write_down(self._recorder, self._recorder_clock, member.number, call)
        elif kind is FrameKind.LINES:
            if self._access_log is not None:
                self._access_log.write(body)
        elif kind is FrameKind.CONFIG:
            self._config = body
        elif kind is FrameKind.READY:
            member.ready = True
            self.engines = self.engines or int(body or b"0")

    def _answer(self, asker: int, body: bytes) -> None:
        number, subject, asked = _question(body)
        reply = b""
        if subject == "admit":
            reply = self._admit(*_admission(asked))
        elif subject == "home":
            home = self._homes.find(asked.decode())
            reply = b"" if home is None else encode(home)
        elif subject == "changed":
            self._made(asked[0], asked[1:])
        elif subject == "changes":
            reply = encode(self._changes.listed())
            if asker in self._members:
                self._members[asker].caught_up = True
        elif subject == "config":
            reply = self._config
        elif subject == "figures":
            # One that starts knows of no engine yet whether it answers.
            kept = [member.figures for member in self._members.values() if member.ready]
            reply = encode([self._ended, *kept])
        elif subject == "state":
            reply = encode(self._state())
        self.send(FrameKind.ANSWER, asker, HUB, encode((number, reply)))

    def _made(self, process: int, body: bytes) -> None:
        """Note that a process has made a change that ``process`` was asked for."""
        change = _change(body)
        if self._changes.made(process, change):
            for member in self._members.values():
                if member.caught_up and (process, change.number) in member.missed:
                    self.send(FrameKind.CHANGE, member.number, process, body)  # it came in between

    def _state(self) -> HubState:
        ready = sum(member.ready for member in self._members.values())
        reasons: list[HealthReason] = []
        if ready < self._processes:
            why = f"{ready} of {self._processes} answer; one that ended is started again"
            reasons.append(HealthReason(code="process-missing", why=why))
        samples: dict[str, float] = {"processes": ready, "process_restarts_total": self.restarts}
        if self._access_log is not None:
            samples["access_log_lost_total"] = self._access_log.lost
        if self._access_log is not None and self._access_log.error:
            reasons.append(HealthReason(code="access-log", about=self._access_log.path, why=self._access_log.error))
        if self._recorder is not None:
            written = self._recorder.counters
            samples["recording"] = float(not self._recorder.stopped)
            samples["recorded_requests_total"] = written.rows
            samples["recorded_bytes_total"] = written.bytes
            samples["unrecorded_requests_total"] = written.left_out + written.late
            if self._recorder.stopped:
                reasons.append(HealthReason(code="record", about=str(self._recorder.path), why=self._recorder.stopped))
        samples["degraded"] = float(bool(reasons))
        return HubState(processes=sorted(self._members), reasons=reasons, samples=samples)

    # -- rates --------------------------------------------------------------------------------------------------------------

    def _admit(self, rates: list[RateName], tokens: int) -> bytes:
        """Return the admission of a request, as ``shared_rates`` reads it."""
        try:
            ticket = RateTicket([self._allowance(name) for name in rates], tokens)
        except Refusal as refusal:
            return encode((refusal.problem.error, refusal.problem.fix, refusal.headers))
        return encode(("", "", {name.decode(): value.decode() for name, value in ticket.headers()}))

    def _allowance(self, name: RateName) -> Allowance:
        known = self._allowances.get(name)
        if known is None:
            if len(self._allowances) >= MOST_ALLOWANCES:
                self._allowances = {key: allowance for key, allowance in self._allowances.items() if not allowance.full}
            whose, requests, tokens = name
            rate = Rate(requests_per_minute=requests, tokens_per_minute=tokens)
            known = self._allowances[name] = Allowance(whose, rate, self._clock.now)
        return known
