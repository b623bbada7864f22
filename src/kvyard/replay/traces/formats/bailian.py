"""Qwen-Bailian: JSON lines of seconds, lengths, 16-token ids, and the chat each request continues.

The ids are salted hashes of blocks, and nothing says that they are cumulative. So each is chained with those before it, which
changes nothing where they were. Turns keep their recorded times but wait for the request they continue. When two requests
continue the same one, the second starts a session of its own.
"""

from collections.abc import Iterator

import msgspec

from kvyard.clock import SECOND
from kvyard.replay.traces.identity import chained
from kvyard.replay.traces.reading import Reading, check_ids, checked_lengths, ns
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

BLOCK_SIZE = 16


class _BailianRow(msgspec.Struct, gc=False):
    chat_id: int | str
    timestamp: int | float
    input_length: int
    output_length: int
    parent_chat_id: int | str | None = None
    hash_ids: list[int] | None = None


class _Chat(msgspec.Struct):
    """A request that others may continue."""

    name: str
    session: str
    latest: bool = True
    """True if no request continued it so far."""


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Return the requests of a pass."""
    decode = msgspec.json.Decoder(_BailianRow).decode
    size = reading.block_size or BLOCK_SIZE
    chats: dict[int | str, _Chat] = {}

    def row(number: int, record: bytes) -> TraceRequest:
        row_read = decode(record)
        checked_lengths(row_read.input_length, row_read.output_length, ("input_length", "output_length"))
        ids = None
        if row_read.hash_ids is not None:
            check_ids(row_read.hash_ids, size, row_read.input_length)
            ids = chained(row_read.hash_ids)
        arrival = reading.arrive(ns(row_read.timestamp, SECOND, "timestamp"))
        name = reading.name(number, row_read.chat_id)
        # A parent that isn't in the file came before it began.
        parent = chats.get(-1 if row_read.parent_chat_id is None else row_read.parent_chat_id)
        after: tuple[str, ...] = ()
        if parent is None:
            session = name
        elif parent.latest:
            session, parent.latest = parent.session, False
        else:
            session, after = name, (parent.name,)
        chats[row_read.chat_id] = _Chat(name, session)
        return TraceRequest(
            name,
            arrival,
            row_read.input_length,
            row_read.output_length,
            ids,
            size if ids else 0,
            session=session,
            after=after,
        )

    return reading.rows(row)


FORMAT = Format(
    name="bailian",
    summary="Qwen-Bailian usage traces, JSON lines: seconds, lengths, chats and turns, 16-token ids.",
    recognise=lambda head: head.has("chat_id", "timestamp", "input_length", "output_length"),
    read=read,
)
