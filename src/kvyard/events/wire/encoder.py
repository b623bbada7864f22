"""The encoder: batches out, in any format that can be written. The default is vLLM's current one."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.errors import KvyardError
from kvyard.events.types import EventBatch, GroupMeta
from kvyard.events.wire.format import WIRES, written_dialects


class Encoder:
    """Writes the batches of one stream. Some formats, such as ``trtllm``, remember what was written."""

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
        """``batch`` as one payload. Stream, sequence and epoch aren't in it: they travel beside it."""
        return self._writer.encode(batch)


def encode(batch: EventBatch, dialect: str = "vllm") -> bytes:
    """Write one batch by itself; for a stream, and above all for ``trtllm``, keep an ``Encoder``.

    Raises ``KvyardError`` for an unknown dialect.
    """
    return Encoder(dialect).encode(batch)
