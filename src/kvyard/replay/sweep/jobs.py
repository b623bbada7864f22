"""The points of a sweep over processes. A process runs one point, tells how far it is, and leaves a report in a file.

Processes are started afresh (spawn), so a point depends on nothing that ran before it. A point that fails, or whose process
dies, doesn't take the others with it.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Slo

Told = Callable[[str, int, int], None]
"""Told now and then: the key of a point, its requests through, its virtual time in nanoseconds."""
Ended = Callable[[str, str | None], None]
"""Told when a point is through: its key, and why it failed if it did."""


class Task(NamedTuple):
    """One point to run."""

    trace: str
    reading: Mapping[str, Any]
    """Arguments of ``open_trace``."""
    config: ReplayConfig
    slo: Slo | None
    label: str
    path: str
    """Where its report goes."""
    key: str


def run_task(task: Task, told: Told | None) -> None:
    """Run one point right here. Raises ``KvyardError``; a KeyboardInterrupt goes on, and leaves no file."""
    from kvyard.replay.report.files import write_report
    from kvyard.replay.run import replay
    from kvyard.replay.traces import open_trace

    source = open_trace(task.trace, **task.reading)
    tell = None if told is None else lambda came, through, now: told(task.key, through, now)
    done = replay(source, config=task.config, slo=task.slo, label=task.label, progress=tell)
    if not done.complete:
        raise KeyboardInterrupt
    write_report(done.report, task.path)


def run_tasks(tasks: Sequence[Task], jobs: int, ended: Ended, told: Told | None) -> None:
    """Run all of them, ``jobs`` at a time. On a KeyboardInterrupt, ends what is under way and lets it go on."""
    if jobs == 1:
        for task in tasks:
            try:
                run_task(task, told)
            except KvyardError as error:
                ended(task.key, str(error))
            else:
                ended(task.key, None)
        return
    _Crew(jobs, ended, told).run(tasks)


class _Crew:
    """Processes at work, each with a pipe to here."""

    def __init__(self, jobs: int, ended: Ended, told: Told | None) -> None:
        self._jobs = jobs
        self._ended = ended
        self._told = told
        self._spawn = multiprocessing.get_context("spawn")
        self._at_work: dict[Connection, tuple[Task, Any]] = {}

    def run(self, tasks: Sequence[Task]) -> None:
        todo = list(reversed(tasks))
        try:
            while todo or self._at_work:
                while todo and len(self._at_work) < self._jobs:
                    self._start(todo.pop())
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
        process.start()
        there.close()
        self._at_work[here] = (task, process)

    def _listen(self, pipe: Connection) -> None:
        task, process = self._at_work[pipe]
        try:
            message = pipe.recv()
        except EOFError:
            process.join()
            message = ("ended", f"its process ended with exit code {process.exitcode}; is there enough memory?")
        if message[0] == "told":
            if self._told is not None:
                self._told(task.key, message[1], message[2])
            return
        del self._at_work[pipe]
        pipe.close()
        process.join()
        self._ended(task.key, message[1])


def _work(task: Task, pipe: Connection) -> None:
    """What a process does. Ctrl-C is the business of who started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def told(key: str, through: int, now: int) -> None:
        pipe.send(("told", through, now))

    try:
        run_task(task, told)
    except KvyardError as error:
        pipe.send(("ended", str(error)))
    else:
        pipe.send(("ended", None))
