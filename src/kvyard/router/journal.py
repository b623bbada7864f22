"""The journal: all that a router was told and what it decided, in order.

A router has no clock and no socket, so its decisions follow from its calls alone: which batches the index had applied, who was
there, what was under way. Written down in the order in which they happened, these are enough to take every decision again
(``kvyard.server.rehearsal`` does), and to see afterwards what a decision was based on.

It knows nothing of HTTP and of no text: a prompt is the number of its blocks and the key of the last one, which names all
before it too. ``JournaledRouter`` and ``JournaledIndexer`` (``kvyard.router.journaled``) write it without being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport import Update
from kvyard.index import Holder, Source
from kvyard.router.config import RouterConfig
from kvyard.router.entries import (
    AnyEntry,
    Applied,
    Began,
    Booked,
    Drained,
    Ended,
    FirstToken,
    Joined,
    Left,
    Listening,
    Lost,
    Previewed,
    Progressed,
    Refused,
    Routed,
    Shared,
    Unheard,
)
from kvyard.router.request import Decision, RouteRequest

FORMAT = "kvyard-journal/1"
BUFFER = 1 << 16
"""Bytes that a file keeps back at most."""


class Journal:
    """Makes entries and hands them to ``write``: a list's ``append``, or a ``JournalFile``'s ``write``."""

    def __init__(self, write: Callable[[AnyEntry], None], *, whole: bool = False) -> None:
        """``whole``: all keys of every prompt are written, so that the journal alone is enough; it gets large."""
        self._write = write
        self._whole = whole

    def began(self, config: RouterConfig, seed: int, block_size: int) -> None:
        """The router was made."""
        self._write(Began(config=config, seed=seed, block_size=block_size, format=FORMAT))

    def listening(self, source: Source, now: int = 0) -> None:
        """A stream was registered with the index."""
        self._write(Listening(at=now, source=source))

    def unheard(self, stream: str, now: int = 0) -> None:
        """A stream was unregistered."""
        self._write(Unheard(at=now, stream=stream))

    def shared(self, pool: str, members: Iterable[Holder], now: int = 0) -> None:
        """A pool got its members."""
        self._write(Shared(at=now, pool=pool, members=tuple(sorted(members))))

    def applied(self, update: Update, now: int) -> None:
        """An update is applied to the index."""
        self._write(
            Applied(
                at=now,
                stream=update.stream,
                topic=update.topic,
                epoch=update.epoch,
                seq=update.seq,
                rank=update.rank,
                origin=update.origin.value,
                state=update.state.value,
                dialect=update.dialect,
                events=len(update.events),
                reason=update.reason,
            )
        )

    def lost(self, stream: str, reason: str, now: int = 0) -> None:
        """A stream is marked stale."""
        self._write(Lost(at=now, stream=stream, reason=reason))

    def joined(self, worker: Holder, now: int = 0) -> None:
        """A worker was added, or is back from draining."""
        self._write(Joined(at=now, worker=worker))

    def drained(self, worker: Holder, now: int = 0) -> None:
        """A worker drains."""
        self._write(Drained(at=now, worker=worker))

    def left(self, worker: Holder, under_way: Iterable[object] = (), now: int = 0) -> None:
        """A worker was removed; ``under_way`` is what the router returned."""
        self._write(Left(at=now, worker=worker, under_way=tuple(str(id_) for id_ in under_way)))

    def routed(self, request: RouteRequest, decision: Decision, now: int, exclude: Collection[Holder] = ()) -> None:
        """A request was routed. Everyone's figures are left out of the decision: they follow from what came before."""
        if decision.candidates:
            decision = msgspec.structs.replace(decision, candidates=())
        self._write(
            Routed(
                **self._asked(request, now),
                excluded=tuple(sorted(exclude)),
                decision=decision,
            )
        )

    def refused(self, request: RouteRequest, why: str, now: int, exclude: Collection[Holder] = ()) -> None:
        """``Router.route`` raised; it changed nothing."""
        self._write(
            Refused(
                **self._asked(request, now),
                excluded=tuple(sorted(exclude)),
                why=why,
            )
        )

    def previewed(self, request: RouteRequest, now: int, exclude: Collection[Holder] = ()) -> None:
        """``Router.preview`` was called."""
        self._write(Previewed(**self._asked(request, now), excluded=tuple(sorted(exclude))))

    def booked(self, request: RouteRequest, worker: Holder, now: int, new_tokens: int | None = None) -> None:
        """Another gateway's request was taken in."""
        self._write(
            Booked(
                **self._asked(request, now),
                worker=worker,
                new_tokens=new_tokens,
            )
        )

    def first_token(self, id_: object, now: int) -> None:
        """``Router.prefill_done`` was called."""
        self._write(FirstToken(at=now, id=str(id_)))

    def progressed(self, id_: object, output_tokens: int, now: int) -> None:
        """``Router.progressed`` was called."""
        self._write(Progressed(at=now, id=str(id_), output_tokens=output_tokens))

    def ended(self, id_: object, now: int) -> None:
        """``Router.finished`` was called."""
        self._write(Ended(at=now, id=str(id_)))

    def _asked(self, request: RouteRequest, now: int) -> dict[str, Any]:
        keys = request.keys
        return {
            "at": now,
            "id": str(request.id),
            "tokens": request.num_tokens,
            "blocks": len(keys),
            "tail": _plain(keys[-1]) if keys else 0,
            "keys": tuple(_plain(key) for key in keys) if self._whole else (),
            "session": request.session,
            "expected_output": request.expected_output,
        }


def _plain(key: object) -> int:
    """A key as a whole number; trace keys are numbers already, hashes of bytes are read as one."""
    return key if isinstance(key, int) else int.from_bytes(bytes(key), "big")  # type: ignore[call-overload]


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

    def write(self, entry: AnyEntry) -> None:
        """Add an entry."""
        if self.error:
            self.dropped += 1
            return
        self._buffer += self._encode(entry)
        self._buffer += b"\n"
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

    def __enter__(self) -> JournalFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_journal(path: str | Path) -> Iterator[AnyEntry]:
    """The entries of a journal, in order. One that was cut off in its last line, because its writer was killed, is read up to
    there. Raises ``KvyardError`` for what isn't a journal.
    """
    decode = msgspec.json.Decoder(AnyEntry).decode
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decode(line)
                except msgspec.MsgspecError as error:
                    raise KvyardError(
                        f"{path} is no journal, or damaged: line {number} can't be read ({error})"
                    ) from None
    except OSError as error:
        raise KvyardError(f"can't read the journal {path}: {error.strerror}") from None
