"""Progress of a replay: ended requests, their rate, virtual and real time. A bar on a terminal, occasional lines elsewhere."""

import lzma
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.replay.traces.files import PACKED, open_bytes

COUNTED = 2 * 2**30
"""Bytes on disk up to which the lines of a plain file are counted, to know how far there is to go: two seconds, about."""
COUNTED_PACKED = 200 * 2**20
"""``COUNTED`` for compressed files, which take longer."""


EVERY = 30 * SECOND
"""Time between two lines of progress."""


class ProgressLines:
    """Progress if there is no terminal, such as in a log file: a line on stderr every ``EVERY`` seconds at most."""

    def __init__(self) -> None:
        self._clock = WallClock()
        self._started = self._written = self._clock.now()

    def say(self, text: Callable[[], str]) -> None:
        """Write a line with what ``text`` returns and the time since the start, if it is time for one."""
        now = self._clock.now()
        if now - self._written >= EVERY:
            self._written = now
            print(f"{text()}, after {clock(now - self._started)}", file=sys.stderr, flush=True)


class ProgressBar:
    """A progress bar on stderr while its ``with`` lasts; lines without a terminal."""

    def __init__(self, source: Trace | Iterable[TraceRequest], limit: int | None, passed: str = "simulated in") -> None:
        """``passed`` stands between the run's own time and the real one."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.completed:,.0f} of {task.fields[of]} requests"),
            BarColumn(bar_width=28),
            TextColumn(f"{{task.fields[simulated]}} {passed}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.shown = self._progress.console.is_terminal
        self._lines = ProgressLines()
        total = count_requests(source) if self.shown else None
        if limit is not None:
            total = limit if total is None else min(total, limit)
        fields: dict[str, Any] = {"simulated": "0:00", "rate": "", "of": "?" if total is None else f"{total:,}"}
        self._task = self._progress.add_task("replay", total=total, **fields)

    def update(self, arrived: int, through: int, now: int) -> None:
        """Draw where the run is."""
        if not self.shown:
            self._lines.say(lambda: f"{through:,} requests replayed, {clock(now)} of their time")
            return
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        rate = f"{through / elapsed:,.0f} requests/s" if elapsed > 0.2 else ""
        self._progress.update(self._task, completed=through, simulated=clock(now), rate=rate)

    def __enter__(self) -> "ProgressBar":
        if self.shown:
            self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self.shown:
            self._progress.stop()


def clock(ns: int) -> str:
    """Return virtual time as hours, minutes and seconds."""
    minutes, seconds = divmod(ns // SECOND, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def count_requests(source: object) -> int | None:
    """Estimate the number of requests from the lines of a file; ``None`` if the lines don't tell or take too long to count."""
    if not isinstance(source, Trace) or source.grouped:
        return None
    path = Path(source.name)
    try:
        most = COUNTED_PACKED if path.suffix in PACKED else COUNTED
        if not path.is_file() or path.stat().st_size > most:
            return None
        with open_bytes(path) as file:
            lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except (KvyardError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return None
    return lines or None
