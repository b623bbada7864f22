"""Usage: the token counts in an engine's answer, found at any place without parsing the answer.

Engines write ``"usage": {...}`` in the middle of an answer: prompt ids, log probabilities or the whole request may follow it.
Inside of a text its quotes would be escaped, so only a field of that name matches. Where there are several, as in a stream
with running counts, the last one counts; what it leaves out is taken from those before it.
"""

import re
from typing import NamedTuple

import msgspec

from kvyard.decode_errors import DECODE_ERRORS

LONGEST = 2048
"""Bytes of a usage object."""
SMALL = 1 << 20
"""Bytes up to which a whole answer is read as JSON, for its own field alone and none inside of what it repeats."""
MOST_NAMES = 64
"""Occurrences looked at in one chunk that are no field, such as nulls."""
_NAME = b'"usage"'
_BEGIN = re.compile(rb'"usage"\s*:\s*\{')
_REACH = len(_NAME) + 16
"""Bytes in which the field begins, spaces included."""
_BRACES = re.compile(rb"[{}]")
_FIELD = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|input_tokens|output_tokens|cache_(?:read|creation)_input_tokens)"'
    rb"\s*:\s*(\d{1,12})(?![\d.eE])"  # what no count of tokens can be isn't read in part
)


class AnswerTokens(NamedTuple):
    """Token counts of an answer; ``None`` if it has none."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None


class _Whole(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")


_decode_whole = msgspec.json.Decoder(_Whole).decode


def answer_tokens(answer: bytes) -> AnswerTokens:
    """Return the usage in a whole answer, or in part of one."""
    if len(answer) <= SMALL and answer[:1] == b"{":
        try:
            return _counts(bytes(_decode_whole(answer).usage))
        except DECODE_ERRORS:
            pass  # something else than an answer, or cut
    reader = UsageReader()
    reader.feed(answer)
    return reader.tokens


def events_in(chunk: bytes) -> int:
    """Return the number of server-sent events that end in a chunk of a stream."""
    return chunk.count(b"\n\n") or chunk.count(b"\r\n\r\n")


class UsageReader:
    """Finds usage in an answer that comes in chunks, cut anywhere."""

    __slots__ = ("_end", "_object", "_open", "_seen")

    def __init__(self) -> None:
        self._end = b""
        """The last bytes of what came, in which a field may begin."""
        self._object = b""
        """The usage object that came last, as far as it came."""
        self._open = False
        """True if more of it may come."""
        self._seen = AnswerTokens()
        """From objects before it."""

    def feed(self, chunk: bytes) -> None:
        """Look through the next chunk."""
        if self._open:
            self._object = (self._object + chunk)[:LONGEST]
            self._open = len(self._object) < LONGEST
        if _NAME in chunk:
            self._search(self._end + chunk)
        elif self._end and _NAME in self._end + chunk[:_REACH]:
            self._search(self._end + chunk[:LONGEST])  # the name was cut, or what follows it
        self._end = chunk[-_REACH:] if len(chunk) >= _REACH else (self._end + chunk)[-_REACH:]

    @property
    def tokens(self) -> AnswerTokens:
        """Token counts by what came so far."""
        return _later(self._seen, _read(self._object))

    def _search(self, data: bytes) -> None:
        last = _find_last(data, len(data))
        if last < 0:
            return
        before = _find_last(data, last)  # one chunk may have the first and the last event of a stream
        self._seen = self.tokens
        if before >= 0:
            self._seen = _later(self._seen, _read(data[before : min(last, before + LONGEST)]))
        self._object = data[last : last + LONGEST]
        self._open = len(self._object) < LONGEST


def _find_last(data: bytes, end: int) -> int:
    """Return the start of the last field before ``end``; -1 if there is none among the last names."""
    index = end
    for _ in range(MOST_NAMES):
        index = data.rfind(_NAME, 0, index)
        if index < 0 or _BEGIN.match(data, index):
            return index
    return -1


def _read(data: bytes) -> AnswerTokens:
    """Return the counts in an object, which is looked at up to its last brace."""
    depth = 0
    for brace in _BRACES.finditer(data):
        depth += 1 if brace[0] == b"{" else -1
        if not depth:
            return _counts(data[: brace.end()])
    return _counts(data)


def _counts(data: bytes) -> AnswerTokens:
    """Return the counts in an object that is all there is."""
    counts = {match[1]: int(match[2]) for match in _FIELD.finditer(data)}
    if b"input_tokens" not in counts:
        output = counts.get(b"completion_tokens", counts.get(b"output_tokens"))
        return AnswerTokens(counts.get(b"prompt_tokens"), output, counts.get(b"cached_tokens"))
    output, read = counts.get(b"output_tokens"), counts.get(b"cache_read_input_tokens")
    if read is None:  # OpenAI's responses
        return AnswerTokens(counts[b"input_tokens"], output, counts.get(b"cached_tokens"))
    # Anthropic's: what is cached, before or by this request, isn't among the input.
    return AnswerTokens(counts[b"input_tokens"] + read + counts.get(b"cache_creation_input_tokens", 0), output, read)


def _later(before: AnswerTokens, after: AnswerTokens) -> AnswerTokens:
    if after.prompt is not None:
        return AnswerTokens(after.prompt, before.output if after.output is None else after.output, after.cached)
    return AnswerTokens(*(early if late is None else late for early, late in zip(before, after, strict=True)))
