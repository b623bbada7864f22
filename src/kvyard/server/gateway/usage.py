"""What an answer says of itself: tokens that were cached, tokens that were made. Read from its last bytes, not parsed."""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL = 4096
"""Bytes at the end of an answer among which its usage is looked for."""
_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,12})')


class Usage(NamedTuple):
    """``None`` where it doesn't say."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None


def usage(tail: bytes) -> Usage:
    """The usage that the end of an answer brings; where it comes several times, the last counts."""
    at = tail.rfind(b'"usage"')
    if at < 0:
        return Usage()
    found = {match[1]: int(match[2]) for match in _FIELD.finditer(tail, at)}
    return Usage(found.get(b"prompt_tokens"), found.get(b"completion_tokens"), found.get(b"cached_tokens"))
