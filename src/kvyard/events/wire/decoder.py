"""The decoder: bytes off any engine's wire in, events and problems out, and never an exception.

The format of a payload is found by trying: first the format of the previous payload. Each format reads its own payloads; see
``format``.
"""

from collections.abc import Sequence

from kvyard.errors import KvyardError
from kvyard.events.types import EventBatch, GroupMeta
from kvyard.events.wire.decoded import UNREADABLE, Decoded, DecodeStats, no_events
from kvyard.events.wire.format import WIRES, PayloadReader, reading_order, written_dialects

MAX_BYTES = 128 << 20


class Decoder:
    """Reads the payloads of one stream. Not for several threads at once."""

    def __init__(
        self,
        dialect: str = "auto",
        *,
        narrow: bool = False,
        block_size: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """``dialect`` says whose stream it is; what it can't read is tried as any other. "auto" has no preference.

        ``narrow`` turns digests into the 64-bit integers vLLM would have sent. ``block_size`` is the tokens per block of a
        TensorRT-LLM stream, which doesn't say; left out, it is learned. Raises ``KvyardError`` for an unknown dialect.
        """
        self.dialect = dialect
        self.stats = DecodeStats()
        self._max_bytes = max_bytes
        self._prepared: tuple[object, Decoded] | None = None
        readers: dict[type[PayloadReader], PayloadReader] = {}
        for name in reading_order(dialect):
            reader = WIRES.get(name).reader(narrow, block_size)
            readers.setdefault(type(reader), reader)
        self._readers = list(readers.values())

    def prepare(self, payload: bytes) -> None:
        """Read ``payload`` ahead: the next ``decode`` of this very object has it already. A thread may do so while no other
        uses the decoder.
        """
        self._prepared = (payload, self.decode(payload))

    def decode(self, payload: object) -> Decoded:
        """Read ``payload``: bytes, or what a JSON or msgpack decoder made of them. Never raises for any payload."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is payload:
            return prepared[1]
        if isinstance(payload, bytearray | memoryview):
            payload = bytes(payload)
        try:
            return self._read(payload)
        except Exception as error:
            # Nothing is known to get here. A consumer must outlive a bug in here all the same.
            return no_events(f"unexpected {type(error).__name__}: {error}"[:200])

    def _read(self, payload: object) -> Decoded:
        if isinstance(payload, bytes):
            if len(payload) > self._max_bytes:
                return no_events(f"{len(payload)} bytes are more than the limit of {self._max_bytes}")
            if not payload:
                return no_events("empty payload")
        failure = ""  # an exception that is kept would keep this frame, and so the payload
        for index, reader in enumerate(self._readers):
            try:
                decoded = reader.read(payload, self.stats)
            except UNREADABLE as error:
                failure = failure or f"{type(error).__name__}: {error}"[:200]
                continue
            if decoded is not None:
                if index:
                    self._readers.insert(0, self._readers.pop(index))
                return decoded
        if failure:
            return no_events(failure)
        return no_events("neither a batch [time, events, …] nor a list of TensorRT-LLM events")


def decode(payload: object, *, dialect: str = "auto") -> Decoded:
    """Read one payload by itself; for a stream keep a ``Decoder``. Never raises but for an unknown ``dialect``."""
    return Decoder(dialect).decode(payload)


class Encoder:
    """Writer of the batches of one stream. Some formats, such as ``trtllm``, keep state between batches."""

    def __init__(self, dialect: str = "vllm", *, integers: bool = True, groups: Sequence[GroupMeta] = ()) -> None:
        """``integers`` writes digests as vLLM does by default, as their last 64 bits; without it they go out whole.

        ``groups`` is for ``trtllm``, which begins with a ``created`` per group and always writes digests whole. Raises
        ``KvyardError`` for an unknown dialect, or one that is only read.
        """
        format_ = WIRES.get(dialect)
        if format_.writer is None:
            names = ", ".join(written_dialects())
            raise KvyardError(f"wire format {dialect!r} is only read: choose one of {names}")
        self.dialect = dialect
        self._writer = format_.writer(integers, groups)

    def encode(self, batch: EventBatch) -> bytes:
        """Return ``batch`` as one payload. Stream, sequence and epoch aren't in it: they travel beside it."""
        return self._writer.encode(batch)


def encode(batch: EventBatch, dialect: str = "vllm") -> bytes:
    """Write one batch by itself; for a stream, and above all for ``trtllm``, keep an ``Encoder``.

    Raises ``KvyardError`` for an unknown dialect.
    """
    return Encoder(dialect).encode(batch)
