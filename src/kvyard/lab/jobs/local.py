"""Replays on this machine: one after the other in this process, or several at a time in processes of their own.

Processes are started afresh (spawn), so a replay depends on nothing that ran before it.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from threading import current_thread, main_thread
from typing import Any

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.lab.jobs.executor import ATTEMPTS, Ended, Executor, Progress
from kvyard.lab.jobs.task import Task, outcome


class LocalExecutor(Executor):
    """Runs replays on this machine. With one job at a time they run right here."""

    def __init__(self, jobs: int = 1) -> None:
        """Raises ``KvyardError`` for less than one."""
        if jobs < 1:
            raise KvyardError(f"jobs must be at least 1, got {jobs}")
        self.jobs = jobs

    def run(self, tasks: Sequence[Task], ended: Ended, progress: Progress | None = None) -> None:
        """See ``Executor.run``."""
        if self.jobs > 1:
            _Crew(self.jobs, ended, progress).run(tasks)
            return
        for task in tasks:
            report, why = outcome(task, _reporter(task, progress))
            try:
                if why is None:
                    write_whole(task.path, report)
            except KvyardError as error:
                why = str(error)
            ended(task.key, why)


def _reporter(task: Task, progress: Progress | None) -> Any:
    return None if progress is None else lambda through, now: progress(task.key, through, now)


class _Crew:
    """Processes at work, each with a pipe to here."""

    def __init__(self, jobs: int, ended: Ended, progress: Progress | None) -> None:
        self._jobs = jobs
        self._ended = ended
        self._progress = progress
        self._spawn = multiprocessing.get_context("spawn")
        self._at_work: dict[Connection, tuple[Task, Any]] = {}
        self._todo: list[Task] = []
        self._begun: dict[str, int] = {}

    def run(self, tasks: Sequence[Task]) -> None:
        self._todo = list(reversed(tasks))
        try:
            while self._todo or self._at_work:
                while self._todo and len(self._at_work) < self._jobs:
                    self._start(self._todo.pop())
                for pipe in wait(list(self._at_work)):
                    self._listen(pipe)  # type: ignore[arg-type]
        finally:
            for pipe, (_, process) in self._at_work.items():
                process.terminate()
                process.join()
                pipe.close()

    def _start(self, task: Task) -> None:
        here, there = self._spawn.Pipe(duplex=False)
        process = self._spawn.Process(target=_work, args=(task, there), daemon=True)
        with _uninterrupted():
            process.start()
            there.close()
            self._begun[task.key] = self._begun.get(task.key, 0) + 1
            self._at_work[here] = (task, process)

    def _listen(self, pipe: Connection) -> None:
        task, process = self._at_work[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # it was killed, maybe in the middle of a message
            message = None
        if message is not None and message[0] == "progress":
            if self._progress is not None:
                self._progress(task.key, message[1], message[2])
            return
        del self._at_work[pipe]
        pipe.close()
        process.join()
        if message is None:
            if self._begun[task.key] < ATTEMPTS:
                self._todo.append(task)
                return
            why = f"its process ended {ATTEMPTS} times, at last with exit code {process.exitcode}; is there enough memory?"
            self._ended(task.key, why)
        elif message[0] == "failed":
            self._ended(task.key, message[1])
        else:
            write_whole(task.path, message[1])
            self._ended(task.key, None)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Within the context, processes that are started never receive Ctrl-C, not even while their interpreter starts; this
    process receives it afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    ensure_running()  # it starts a process too, and lets Ctrl-C through again while it does
    signals: list[int] = []
    handler: Any = None
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not None:
        # Blocking it is not enough: another thread, such as one of numpy's, may take the signal, and then this one acts on it.
        handler = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)


def _work(task: Task, pipe: Connection) -> None:
    """Work of a process. The process that started it handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report, why = outcome(task, lambda through, now: pipe.send(("progress", through, now)))
    with suppress(BrokenPipeError):  # the process that started it was killed
        pipe.send(("done", report) if why is None else ("failed", why))
