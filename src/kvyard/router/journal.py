"""The journal: all that a router was told and what it decided, in order.

A router has no clock and no socket, so its decisions follow from its calls alone: which batches the index had applied, who was
there, what was under way. Written down in the order in which they happened, these are enough to take every decision again
(``kvyard.server.rehearsal`` does), and to see afterwards what a decision was based on.

It knows nothing of HTTP and of no text: a prompt is the number of its blocks and the key of the last one, which names all
before it too. ``kvyard.router.entries`` says what a line is. A router is given a journal when it is made, and so is a
``JournaledIndexer``; a ``JournalFile`` is one on disk, and ``read_journal`` reads it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport import Update
from kvyard.index import Holder, Indexer, Source
from kvyard.router.entries import LINE, Applied, Entry, Journal, Listening, Lost, Shared, Unheard

BUFFER = 1 << 16
"""Bytes that a file keeps back at most."""


class JournalFile:
    """A journal on disk, one JSON line per entry. At most ``BUFFER`` bytes wait for the disk.

    A disk that is full mustn't stop a gateway: what can't be written is counted in ``dropped``, and ``error`` says why.
    """

    def __init__(self, path: str | Path) -> None:
        """Begin the file. Raises ``KvyardError`` where it exists already or can't be written."""
        self.path = Path(path)
        self.entries = 0
        self.dropped = 0
        self.error = ""
        self._encode = msgspec.json.Encoder().encode
        self._buffer = bytearray()
        self._waiting = 0
        try:
            self._out = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise KvyardError(f"{path} exists: choose another name for the journal, or remove it") from None
        except OSError as error:
            raise KvyardError(f"can't write the journal {path}: {error.strerror}") from None

    def write(self, entry: Entry) -> None:
        """Add an entry."""
        if self.error:
            self.dropped += 1
            return
        self._buffer += self._encode(entry) + b"\n"
        self.entries += 1
        self._waiting += 1
        if len(self._buffer) >= BUFFER:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, 0
        buffer, self._buffer = self._buffer, bytearray()
        if not buffer or self.error:
            return
        try:
            self._out.write(buffer)
        except OSError as error:
            self.error = error.strerror or str(error)
            self.entries -= waiting
            self.dropped += waiting

    def close(self) -> None:
        """Write what waits and end the file. Twice does no harm."""
        if not self._out.closed:
            self.flush()
            self._out.close()


def read_journal(path: str | Path) -> Iterator[Entry]:
    """The entries of a journal, in order. One that was cut off in its last line, because its writer was killed, is read up to
    there. Raises ``KvyardError`` for what isn't a journal.
    """
    decode = msgspec.json.Decoder(LINE).decode
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decode(line)
                except msgspec.MsgspecError as error:
                    what = f"{path} is no journal, or damaged: line {number} can't be read ({error})"
                    raise KvyardError(what) from None
    except OSError as error:
        raise KvyardError(f"can't read the journal {path}: {error.strerror}") from None


class JournaledIndexer(Indexer):
    """An ``Indexer`` whose inputs go into a journal. What it refuses is not written."""

    def __init__(self, *given: Any, journal: Journal, **named: Any) -> None:
        """As ``Indexer``."""
        super().__init__(*given, **named)
        self._write = journal

    def register(self, source: Source) -> None:
        known = source.stream in self.sources
        super().register(source)
        if not known:
            self._write(Listening(source=source))

    def unregister(self, stream: str) -> None:
        known = stream in self.sources
        super().unregister(stream)
        if known:
            self._write(Unheard(stream=stream))

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        members = list(members)
        super().share(pool, members)
        self._write(Shared(pool=pool, members=tuple(sorted(members))))

    def apply(self, update: Update, now: int = 0) -> None:
        known = update.stream in self.sources
        super().apply(update, now)
        if known:
            self._write(Applied.of(update, now))

    def lose(self, stream: str, reason: str) -> None:
        super().lose(stream, reason)
        self._write(Lost(stream=stream, reason=reason))
