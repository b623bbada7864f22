"""A request on its way through: what those who observe it are told."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

TAIL = 4096
"""Bytes at the end of an answer among which its usage is looked for."""
_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,12})')


class ProxiedRequest(msgspec.Struct, kw_only=True):
    """One client's request; times are nanoseconds."""

    id: str
    model: str
    """As the client named it."""
    pool: str
    block_size: int
    size: int
    """Bytes of its body."""
    received: int
    tries: int = 0
    first: int = 0
    """When the engine's first bytes came."""
    events: int = 0
    """Server-sent ones of the answer."""
    output: int = 0
    """Tokens of the answer, as far as they can be told."""


class AnswerTokens(NamedTuple):
    """What an answer says of itself; ``None`` where it doesn't."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None


def answer_tokens(tail: bytes) -> AnswerTokens:
    """The usage in the last bytes of an answer, not parsed as JSON; where it comes several times, the last counts."""
    at = tail.rfind(b'"usage"')
    if at < 0:
        return AnswerTokens()
    found = {match[1]: int(match[2]) for match in _FIELD.finditer(tail, at)}
    return AnswerTokens(found.get(b"prompt_tokens"), found.get(b"completion_tokens"), found.get(b"cached_tokens"))
