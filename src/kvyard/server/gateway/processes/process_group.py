"""A group of processes that serve one port: the parent starts them, restarts those that end, and takes signals for all.

The first one starts alone, so that a wrong configuration is reported once; the others follow when it is ready. One that
ends is started again after a pause that doubles up to ``LONGEST`` seconds, and begins with the shortest where it ran for a
while. One that doesn't answer for half a minute is killed. SIGINT and SIGTERM let all of them answer requests in flight, a
second one ends that; SIGHUP has them read their configuration again. Where the parent itself is killed, its processes see
it, and end as at SIGTERM.

Processes are forked: the parent has no threads and no event loop, and all code is loaded, so a new one is there at once.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec

from kvyard.clock import SECOND, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.processes.frames import FrameKind
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.running import take_hangups

log = logging.getLogger(__name__)

SHORTEST = 0.05
"""Seconds before a process that ended is started again."""
LONGEST = 5.0
STEADY = 30 * SECOND
"""Time that a process must have run for its next end to count as the first."""
GRACE = 10.0
"""Seconds beyond those that answers may take, until a process that doesn't end is killed."""
LOOK = 5.0
"""Seconds between two looks whether processes answer."""
MOST_LOOKS = 6
"""Looks that it may leave unanswered in a row. Looks are counted, not time: that passes too while all of them stand still."""
FLUSH = 1.0
"""Seconds between two times that files are written out."""

Serve = Callable[[Channel, int], None]
"""Work of a process, with its channel and the number of its predecessors. Raises ``KvyardError`` if it can't start."""


class _Child(msgspec.Struct, eq=False):
    """A process, or where one is to be."""

    number: int
    pid: int = 0
    """0 while there is none."""
    started: int = 0
    times: int = 0
    """It was started."""
    due: int = 0
    """Time at which to start it."""
    wait: float = SHORTEST


class ProcessGroup:
    """Runs ``processes`` of them. For the main thread of a process that has no other."""

    def __init__(
        self, processes: int, hub: Hub, serve: Serve, *, drain_seconds: float, ready: Callable[[list[int]], object]
    ) -> None:
        """``ready`` is called with their process ids once all answer for the first time. Raises ``KvyardError`` where this
        system can't do it.
        """
        if not hasattr(os, "fork") or not hasattr(socket, "SO_REUSEPORT"):
            raise KvyardError("several processes on one port need Linux: leave --processes out")
        self._hub = hub
        self._serve = serve
        self._drain_seconds = drain_seconds
        self._ready = ready
        self._clock = WallClock()
        self._children = [_Child(number) for number in range(1, processes + 1)]
        self._announced = False
        self._ending = 0
        """Signals that asked for the end."""
        self._deadline = 0
        self._code = 0
        self._signals, self._wakes = socket.socketpair()

    def run(self) -> int:
        """Run until all processes have ended. Returns the exit code: 0, or that of a first process that couldn't start."""
        self._signals.setblocking(False)
        self._wakes.setblocking(False)
        handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]
        before = [signal.signal(number, _taken_note_of) for number in handled]
        old = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        take_hangups()
        self._hub.watch(self._signals, self._signalled)
        gc.collect()
        gc.freeze()
        flushed = looked = self._clock.now()
        try:
            while True:
                now = self._clock.now()
                self._start_due(now)
                if self._ending and not any(child.pid for child in self._children):
                    return self._code
                if self._deadline and now > self._deadline:
                    self._kill()
                if now - flushed > from_seconds(FLUSH):
                    flushed = now
                    self._hub.flush()
                if now - looked > from_seconds(LOOK):
                    looked = now
                    self._kill_hung()
                self._hub.wait(self._pause(now))
                self._reap()
                if not self._announced:
                    self._announce()
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in zip(handled, before, strict=True):
                signal.signal(number, handler)
            self._hub.close()
            self._signals.close()
            self._wakes.close()

    # -- starting ---------------------------------------------------------------------------------------------------------

    def _wanted(self) -> list[_Child]:
        """Return the processes that are to run now."""
        if self._ending:
            return []
        first = self._children[0]
        alone = not self._announced and not self._hub.is_ready(first.number) and first.times <= 1
        return self._children[:1] if alone and not any(child.pid for child in self._children[1:]) else self._children

    def _start_due(self, now: int) -> None:
        for child in self._wanted():
            if not child.pid and now >= child.due:
                self._start(child)

    def _start(self, child: _Child) -> None:
        """Raises ``KvyardError`` if there can't be a first one; others are tried again later."""
        sys.stdout.flush()
        sys.stderr.flush()
        ends: tuple[socket.socket, ...] = ()
        try:
            ours, theirs = ends = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            for end in ends:
                end.close()
            why = f"process {child.number} can't be started: {error.strerror}"
            if not any(child_process.times for child_process in self._children):
                raise KvyardError(f"{why}; see ulimit -u and -n, and the memory that is free") from None
            log.error("%s", why)
            self._wait_for_next(child)
            return
        if not pid:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                # A terminal's Ctrl-C and hang-up reach all of its processes: the parent passes on what they mean.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._hub.forget_all()
                for end in (ours, self._signals, self._wakes):
                    end.close()
                self._serve(Channel(theirs, child.number, len(self._children)), child.times)
                code = 0
            except KvyardError as error:
                sys.stderr.write(f"Error: {error}\n")
                code = 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        child.pid, child.started = pid, self._clock.now()
        if child.times:
            self._hub.restarts += 1
        child.times += 1
        self._hub.add(child.number, ours)

    def _wait_for_next(self, child: _Child) -> None:
        child.due = self._clock.now() + from_seconds(child.wait)
        child.wait = min(2 * child.wait, LONGEST)

    def _announce(self) -> None:
        if all(self._hub.is_ready(child.number) for child in self._children):
            self._announced = True
            self._ready([child.pid for child in self._children])

    # -- ending -----------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            was_ready = self._hub.is_ready(child.number)
            self._hub.remove(child.number)
            child.pid = 0
            if self._ending:
                continue
            if not was_ready and not self._announced and child.number == 1 and child.times == 1:
                self._code = code if code > 0 else 1  # it has logged why
                self._end()
                continue
            if self._clock.now() - child.started >= STEADY:
                child.wait = SHORTEST
            self._wait_for_next(child)
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            log.error("process %d (%d) ended %s and is started again", child.number, pid, how)

    def _signalled(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._end()
                elif number == signal.SIGHUP:
                    self._hub.reload()

    def _end(self) -> None:
        self._ending += 1
        self._hub.tell_all(FrameKind.END if self._ending == 1 else FrameKind.HURRY)
        if not self._deadline:
            self._deadline = self._clock.now() + from_seconds(self._drain_seconds + GRACE)

    def _kill(self) -> None:
        for child in self._children:
            if child.pid:
                log.error("process %d (%d) doesn't end, and is killed", child.number, child.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        self._deadline = 0

    def _kill_hung(self) -> None:
        """Kill those that answer nothing any more: the kernel goes on to give them connections."""
        unanswered = self._hub.look()
        for child in self._children:
            if child.pid and not self._ending and unanswered.get(child.number, 0) >= MOST_LOOKS:
                log.error("process %d (%d) hangs, and is killed", child.number, child.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _pause(self, now: int) -> float:
        due = [child.due for child in self._wanted() if not child.pid]
        return min([FLUSH, LOOK, *((time - now) / SECOND for time in due)])


def _taken_note_of(number: int, _: object) -> None:
    """Ignore the signal here: its number is read from a socket, in turn with everything else."""
