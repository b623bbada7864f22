"""The journal: all inputs and decisions of a router, in order.

A router has no clock and no socket, so its decisions follow from its calls alone: the batches that the index had applied,
the workers, the requests in flight. Written down in the order in which they happened, these are enough to take every
decision again (``kvyard.lab.rehearsal`` does), and to see afterwards what a decision was based on.

It has no text: a prompt is the number of its blocks and the key of the last one, which names the whole prefix. A line is an
``Entry``; the tags are part of the file format, and stay as they are. A router is given a journal when it is made, and so is
a ``JournaledIndexer``; a ``JournalFile`` is one on disk, and ``read_journal`` reads it back.
"""

import gzip
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, Union

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.index import Holder, Indexer, Source
from kvyard.line_file import LineFile
from kvyard.router.config import RouterConfig
from kvyard.router.request import Decision

log = logging.getLogger(__name__)

FORMAT = "kvyard-journal/1"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="did", gc=False):
    """One line. ``at`` is the time passed to the router or the index, in nanoseconds."""

    at: int = 0
    router: str = ""
    """Name of one of several routers over one index; empty for the first."""


class Began(Entry, frozen=True, kw_only=True, omit_defaults=False, tag="began"):
    """The router was made."""

    config: RouterConfig
    seed: int
    block_size: int
    format: str = FORMAT


class Listening(Entry, frozen=True, kw_only=True, tag="listening"):
    """A stream's events count from now on, for a worker's rank or a pool."""

    source: Source


class Unheard(Entry, frozen=True, kw_only=True, tag="unheard"):
    """A stream and all it announced is removed."""

    stream: str


class Shared(Entry, frozen=True, kw_only=True, tag="shared"):
    """Blocks of a pool are credited to these workers from now on."""

    pool: str
    members: tuple[Holder, ...] = ()


class Applied(Entry, frozen=True, kw_only=True, tag="applied"):
    """An update went into the index: a batch, or what a subscriber has to say of its stream."""

    stream: str
    topic: str = ""
    epoch: int = 0
    seq: int
    rank: int | None = None
    origin: Origin = Origin.LIVE
    state: State = State.FRESH
    dialect: str = ""
    """Dialect of the wire; ``none`` for entries of the subscriber itself."""
    events: int = 0
    """Number of events."""
    reason: str = ""

    @classmethod
    def of(cls, update: Update, now: int) -> "Applied":
        """Return the entry for ``update``, applied at ``now``."""
        fields = {
            name: getattr(update, name) for name in cls.__struct_fields__ if name not in ("at", "events", "router")
        }
        return cls(at=now, events=len(update.events), **fields)


class Lost(Entry, frozen=True, kw_only=True, tag="lost"):
    """A stream was found to lack something, other than by its subscriber."""

    stream: str
    reason: str = ""


class Joined(Entry, frozen=True, kw_only=True, tag="joined"):
    """A worker may be chosen."""

    worker: Holder
    role: Role = "both"


class Drained(Entry, frozen=True, kw_only=True, tag="drained"):
    """A worker may be chosen no more."""

    worker: Holder


class Left(Entry, frozen=True, kw_only=True, tag="left"):
    """A worker is removed, and with it its requests in flight."""

    worker: Holder
    under_way: tuple[str, ...] = ()


class Asked(Entry, frozen=True, kw_only=True):
    """Description of a prompt."""

    id: str
    tokens: int
    blocks: int = 0
    tail: int = 0
    """The key of its last full block."""
    keys: tuple[int, ...] = ()
    """All keys, where the journal is ``whole``."""
    session: str | None = None
    expected_output: int | None = None


class HeldBack(Entry, frozen=True, kw_only=True, tag="held_back"):
    """A request waited before it was routed. No input of the router's; see ``kvyard.router.flow.FlowWait``."""

    id: str
    policy: str
    waited_ms: float
    ahead: int = 0
    overtaken: int = 0
    why: str


class Routed(Asked, frozen=True, kw_only=True, tag="routed"):
    """A request got a worker."""

    excluded: tuple[Holder, ...] = ()
    decision: Decision


class NotRouted(Asked, frozen=True, kw_only=True, tag="refused"):
    """A request got none."""

    excluded: tuple[Holder, ...] = ()
    why: str


class Previewed(Asked, frozen=True, kw_only=True, tag="previewed"):
    """``Router.preview`` was called. Nothing is booked, but predictions that are out of date are struck off."""

    excluded: tuple[Holder, ...] = ()


class Booked(Asked, frozen=True, kw_only=True, tag="booked"):
    """A request that another router has routed was taken in."""

    worker: Holder
    new_tokens: int | None = None


class FirstToken(Entry, frozen=True, kw_only=True, tag="first_token"):
    """A request's prompt was computed."""

    id: str
    seen: bool = True
    """True if its first token was seen then, and not only a whole answer."""


class Progressed(Entry, frozen=True, kw_only=True, tag="progressed"):
    """Tokens of a request so far."""

    id: str
    output_tokens: int


class Ended(Entry, frozen=True, kw_only=True, tag="ended"):
    """A request was over, whichever way."""

    id: str
    refused: bool = False
    """True if its worker computed nothing of it."""


def number(key: int | bytes) -> int:
    """Return a key as a whole number; trace keys are numbers already, hashes of bytes are read as one."""
    return key if isinstance(key, int) else int.from_bytes(key, "big")


LINE: Any = Union[tuple({*Entry.__subclasses__(), *Asked.__subclasses__()} - {Asked})]  # noqa: UP007
"""Whatever a line can be."""
Journal: TypeAlias = Callable[[Entry], None]
"""Destination of entries: a list's ``append``, or a ``JournalFile``'s ``write``."""


def named(journal: Journal, router: str) -> Journal:
    """Return ``journal`` for one more router over the same index, whose entries say so."""
    return lambda entry: journal(msgspec.structs.replace(entry, router=router))


class JournalFile:
    """A journal on disk, one JSON line per entry. What waits for the disk is bounded.

    A disk that is full mustn't stop a gateway: it ends the journal, after its last whole line, and is logged once. ``error``
    says why, ``dropped`` counts what isn't in the file.
    """

    def __init__(self, path: str | Path) -> None:
        """Begin the file. Raises ``KvyardError`` where it exists already or can't be written."""
        self.path = Path(path)
        self.entries = 0
        self.dropped = 0
        self.error = ""
        self._encode = msgspec.json.Encoder().encode
        try:
            self._file = LineFile(self.path)
        except KvyardError as error:
            raise KvyardError(f"can't write the journal: {error}") from None

    def write(self, entry: Entry) -> None:
        """Add an entry."""
        if self.error:
            self.dropped += 1
            return
        self.entries += 1
        try:
            self._file.add(self._encode(entry) + b"\n")
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write what waits."""
        if not self.error:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        """Write what waits and end the file. Twice does no harm."""
        self.flush()
        if not self.error:
            self._file.close()

    def _end(self, error: OSError) -> None:
        self.error = error.strerror or str(error)
        self.entries -= self._file.lost
        self.dropped += self._file.lost
        with suppress(OSError):
            self._file.close()
        log.error("the journal %s ends here: %s; free room, and start again with another name", self.path, self.error)


def read_journal(path: str | Path) -> Iterator[Entry]:
    """Yield the entries of a journal, packed (``.gz``) or not, in order. One that was cut off in its last line, because its
    writer was killed, is read up to there. Raises ``KvyardError`` for what isn't a journal.
    """
    decode = msgspec.json.Decoder(LINE).decode
    path = Path(path)
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decode(line)
                except DECODE_ERRORS as error:
                    what = f"{path} is no journal, or damaged: line {number} can't be read ({error})"
                    raise KvyardError(what) from None
    except EOFError:
        if not number:
            raise KvyardError(f"{path} is no journal: its gzip file breaks off before the first line") from None
    except zlib.error as error:
        raise KvyardError(f"{path} is damaged behind line {number}: {error}") from None
    except OSError as error:
        raise KvyardError(f"can't read the journal {path}: {error.strerror or error}") from None


class JournaledIndexer(Indexer):
    """An ``Indexer`` whose inputs go into a journal. What it refuses is not written."""

    def __init__(self, *given: Any, journal: Journal, **named: Any) -> None:
        """See ``Indexer``."""
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

    def applying(self, update: Update, now: int = 0, most: int = 512) -> Iterator[None]:
        # Whole: a decision between two slices couldn't be taken again from a journal that knows whole updates.
        self.apply(update, now)
        yield

    def lose(self, stream: str, reason: str) -> None:
        super().lose(stream, reason)
        self._write(Lost(stream=stream, reason=reason))
