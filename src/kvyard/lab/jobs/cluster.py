"""Replays on a Ray cluster. Only this module knows Ray.

The trace travels once, as bytes in Ray's object store; each process of a node unpacks it into a folder of its own. Reports come
back as bytes and are written here, so nodes need no common file system. What they need is the same version of kvyard.
"""

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from kvyard import __version__
from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.lab.jobs.executor import ATTEMPTS, Ended, Executor, Progress
from kvyard.lab.jobs.task import Task, outcome

AUTO = "auto"
SECONDS = 5
"""For the first connection."""
Packed = dict[str, bytes]
"""Files by their path below the folder they are unpacked into."""

_unpacked: dict[str, tuple[Any, str]] = {}
"""In a process of a node: by digest of a trace, its folder, which goes when the process ends, and its path."""


class RayExecutor(Executor):
    """Runs replays on a Ray cluster, each on one CPU of it. Connects when it is made; use it in a ``with``."""

    def __init__(self, address: str = AUTO, jobs: int | None = None) -> None:
        """``auto`` is the cluster that runs on this machine, or that RAY_ADDRESS names. ``jobs`` replays run at a time, as
        many as the cluster has CPUs unless given. Raises ``KvyardError`` if Ray isn't installed, or there is no cluster.
        """
        self._ray = ray = _ray()
        _check_reached(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError, OSError, AssertionError) as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            fix = "start one with ray start --head" if address == AUTO else "see that it runs and can be reached"
            raise KvyardError(f"no Ray cluster at {address} ({why}): {fix}, or leave --ray out") from None
        self.jobs = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_work)
        self._traces: dict[str, tuple[str, Any]] = {}

    def run(self, tasks: Sequence[Task], ended: Ended, progress: Progress | None = None) -> None:
        """See ``Executor.run``; progress isn't reported."""
        ray = self._ray
        lost = (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.ObjectLostError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.LocalRayletDiedError,
        )
        todo = list(reversed(tasks))
        begun: dict[str, int] = {}
        at_work: dict[Any, Task] = {}
        try:
            while todo or at_work:
                while todo and len(at_work) < self.jobs:
                    task = todo.pop()
                    begun[task.key] = begun.get(task.key, 0) + 1
                    digest, stored = self._stored(task.trace)
                    at_work[self._remote.remote(task, digest, stored, __version__)] = task
                for reference in ray.wait(list(at_work), num_returns=1)[0]:
                    task = at_work.pop(reference)
                    try:
                        report, why = ray.get(reference)
                    except lost as error:
                        if begun[task.key] < ATTEMPTS:
                            todo.append(task)
                            continue
                        report, why = b"", f"its node or process was lost {ATTEMPTS} times: {_first_line(error)}"
                    except ray.exceptions.RayTaskError as error:
                        raise KvyardError(
                            f"a node of the Ray cluster can't run a replay ({_first_line(error.cause)}): "
                            f"install kvyard {__version__} there, as here"
                        ) from None
                    if why is None:
                        write_whole(task.path, report)
                    ended(task.key, why)
        finally:
            for reference in at_work:
                ray.cancel(reference, force=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._ray.shutdown()

    def _stored(self, trace: str) -> tuple[str, Any]:
        """Return the digest of a trace, and where the object store has it."""
        stored = self._traces.get(trace)
        if stored is None:
            packed = pack(Path(trace))
            stored = self._traces[trace] = (_digest(packed), self._ray.put(packed))
        return stored


def pack(path: Path) -> Packed:
    """Return a trace's file, or all files of a directory. Raises ``KvyardError`` if it can't be read."""
    try:
        if not path.is_dir():
            return {path.name: path.read_bytes()}
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return {f"{path.name}/{file.relative_to(path).as_posix()}": file.read_bytes() for file in files}
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None


def unpack(digest: str, packed: Packed) -> str:
    """Return the path of a trace in this process's own folder, unpacked now if it wasn't."""
    unpacked = _unpacked.get(digest)
    if unpacked is None:
        folder = tempfile.TemporaryDirectory(prefix="kvyard-")
        for name, data in packed.items():
            target = Path(folder.name, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        unpacked = _unpacked[digest] = (folder, str(Path(folder.name, next(iter(packed)).partition("/")[0])))
    return unpacked[1]


def _work(task: Task, digest: str, packed: Packed, version: str) -> tuple[bytes, str | None]:
    """Work of a node: a report, or the reason why there is none. Raises for errors that every replay on this node would
    meet."""
    if version != __version__:
        raise RuntimeError(f"it has kvyard {__version__}")
    return outcome(task._replace(trace=unpack(digest, packed)))


def _digest(packed: Packed) -> str:
    hashed = xxhash.xxh3_128()
    for name, data in packed.items():
        hashed.update(name.encode())
        hashed.update(data)
    return hashed.hexdigest()


def _check_reached(address: str) -> None:
    """Raise ``KvyardError`` at once where no server is at an address: Ray itself goes on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == AUTO or not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise KvyardError(
            f"no Ray cluster at {address} ({why}): see that it runs and can be reached, or leave --ray out"
        ) from None


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report home otherwise
    try:
        import ray
    except ImportError as error:
        raise KvyardError(f"--ray needs {error.name}: pip install 'kvyard[ray]'") from None
    return ray
