"""A streamed answer as it comes over the wire: server-sent events, and what a completion's chunks say."""

from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import TokenUsage

MOST = 1 << 20
"""Most bytes of one event."""


class _StreamedChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event of a completion."""

    choices: list[_StreamedChoice] = []
    usage: TokenUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class StreamError(Exception):
    """The answer is no stream of completion chunks, or reports an error; its text says which."""


class AnswerStream:
    """Takes in bytes as they come. Counts; keeps no text."""

    def __init__(self) -> None:
        self.tokens = 0
        """Chunks that brought something."""
        self.done = False
        """True if the end was announced."""
        self.finish: str | None = None
        self.usage: TokenUsage | None = None
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Take in ``data``; returns how many chunks with tokens were in it. Raises ``StreamError``."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > MOST:
            raise StreamError(f"an event of more than {MOST:,} bytes")
        before = self.tokens
        for event in events:
            if event.startswith(b"data:"):
                self._take(event[5:].lstrip() if b"\n" not in event else _joined(event))
            elif event and not event.startswith((b":", b"event:", b"id:", b"retry:")):
                raise StreamError(f"not an event stream: {event[:80]!r}")
        return self.tokens - before

    def _take(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(payload)
        except DECODE_ERRORS as error:
            raise StreamError(f"a chunk that can't be read: {error}") from None
        if chunk.error is not None:
            raise StreamError(error_words(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
            # The chunk that only says why it ended brings no token, unless it is the only one there is.
            if choice.text or choice.finish_reason is None or not self.tokens:
                self.tokens += 1


def _joined(event: bytes) -> bytes:
    """Return the data of an event of several lines."""
    return b"\n".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))


def error_words(error: object) -> str:
    """Return the words of an OpenAI error, or of anything else in its place, on one line."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        message = inner.get("message") if isinstance(inner, dict) else inner
        error = message if message is not None else error
    return " ".join(str(error).split())[:300].rstrip(".")
