"""Output that a terminal takes as text: what engines, traces and files are called may have escapes in it."""

import re
from typing import Any, TextIO

_OWN = r"\r\x1b\[K|\r?\n|\t"
"""Control characters that commands write themselves: a line that is written anew, ends of lines, tabs."""
_CONTROL = re.compile(_OWN + r"|([\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069])")
"""All others: they move the cursor, set titles and colours, answer in the user's name, or turn the direction of text."""


class PlainStream:
    """A text stream on which control characters are shown and not obeyed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, with control characters as Python spells them."""
        self._stream.write(_CONTROL.sub(_spelled, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)


def _spelled(found: re.Match[str]) -> str:
    sign = found[1]
    return found[0] if sign is None else sign.encode("unicode_escape").decode()
