"""Recordings: the messages of a stream as they arrived, each with its time, in a file.

The file is a line that names the format, a line of JSON about the recording, and then per message four bytes of length (big
endian) and a msgpack array of its time in nanoseconds since the start and its frames. Nothing is interpreted, so what was
malformed on the wire is malformed in the file. A file that ends in mid-message, because its writer was killed, can be read
up to there. Names that end in ``.gz`` are compressed.

JSON lines can be read too, one payload a line, as a loop around TensorRT-LLM's ``/kv_cache_events`` writes them; these
messages have no sequence and no time.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.events.transport.frames import Frame, read_live
from kvyard.files import open_new

MAGIC = b"kvyard-events/1\n"
MAX_MESSAGE = 1 << 30

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[int, list[bytes]]).decode


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metadata of a recording."""

    endpoint: str = ""
    topic: str = ""
    started: int = 0
    """Nanoseconds since 1970."""


class Recorded(msgspec.Struct, frozen=True):
    """One message."""

    at: int
    """Nanoseconds since the recording started."""
    parts: list[bytes]

    def frame(self) -> Frame | str:
        """Return the batch it is, or why it is none."""
        return read_live(self.parts)

    @property
    def bare(self) -> bytes | None:
        """The payload of a message that has nothing else: a line of JSON."""
        return self.parts[0] if len(self.parts) == 1 else None


class RecordingWriter:
    """Writes a recording. ``close`` it, or use it in a ``with`` block."""

    def __init__(self, path: str | Path, about: About) -> None:
        """Begin the file. Raises ``KvyardError`` where it exists already or can't be written."""
        self.messages = 0
        self.bytes = 0
        self._raw = open_new(path)
        self._out = (
            cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw, mode="wb")) if str(path).endswith(".gz") else self._raw
        )
        self._out.write(MAGIC + msgspec.json.encode(about) + b"\n")

    def write(self, time: int, parts: Sequence[bytes]) -> None:
        """Add a message."""
        body = _pack((time, list(parts)))
        self._out.write(len(body).to_bytes(4, "big") + body)
        self.messages += 1
        self.bytes += len(body)

    def flush(self) -> None:
        """Let what was written survive this process."""
        self._out.flush()

    def close(self) -> None:
        """End the file."""
        self._out.close()
        self._raw.close()

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Recording:
    """Reads a recording, any number of times."""

    def __init__(self, path: str | Path) -> None:
        """Read the file's header. Raises ``KvyardError`` if it isn't a recording."""
        self.path = Path(path)
        self.truncated = False
        """True if the file ended in mid-message, once it was read."""
        with self._open() as file:
            try:
                head, about = file.readline(len(MAGIC) + 1), file.readline(1 << 16)
            except (EOFError, zlib.error, OSError) as error:
                raise KvyardError(f"{path} is no recording of events, or damaged: {error}") from None
            self.is_json = head != MAGIC
            if self.is_json:
                if head[:1] not in (b"[", b"{"):
                    raise KvyardError(f"{path} is neither a recording of events nor JSON lines of them")
                self.about = About()
                return
            try:
                self.about = msgspec.json.decode(about, type=About)
            except DECODE_ERRORS as error:
                raise KvyardError(f"{path} is a damaged recording: its second line says nothing ({error})") from None

    def __iter__(self) -> Iterator[Recorded]:
        """Yield the messages in order. Raises ``KvyardError`` at one that can't be read."""
        with self._open() as file:
            try:
                yield from self._lines(file) if self.is_json else self._messages(file)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                self.truncated = True

    def _open(self) -> IO[bytes]:
        try:
            return cast("IO[bytes]", (gzip.open if self.path.name.endswith(".gz") else open)(self.path, "rb"))
        except OSError as error:
            raise KvyardError(f"can't read {self.path}: {error.strerror}") from None

    def _lines(self, file: IO[bytes]) -> Iterator[Recorded]:
        for line in file:
            if line.strip():
                yield Recorded(0, [line.strip()])

    def _messages(self, file: IO[bytes]) -> Iterator[Recorded]:
        file.readline()
        file.readline()
        number = 0
        while length := file.read(4):
            number += 1
            size = int.from_bytes(length, "big")
            if len(length) == 4 and size > MAX_MESSAGE:
                raise KvyardError(f"{self.path} is damaged: message {number} claims {size} bytes")
            body = file.read(size)
            if len(length) < 4 or len(body) < size:
                self.truncated = True
                return
            try:
                instant, parts = _unpack(body)
            except DECODE_ERRORS as error:
                raise KvyardError(f"{self.path} is damaged at message {number}: {error}") from None
            yield Recorded(instant, parts)
