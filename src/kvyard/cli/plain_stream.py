"""Output without terminal escapes: names of engines, traces and files may contain them."""

import re
from typing import Any, TextIO

_OWN = r"\r\x1b\[K|\r?\n|\t"
"""Control characters that commands write themselves: carriage return with erase, line ends, tabs."""
_CONTROL = re.compile(_OWN + r"|([\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069])")
"""All other control characters: they move the cursor, set titles and colours, type for the user, or reverse text."""


class PlainStream:
    """A text stream that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, with control characters as Python spells them."""
        self._stream.write(_CONTROL.sub(_escaped, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)


def _escaped(match: re.Match[str]) -> str:
    control = match[1]
    return match[0] if control is None else control.encode("unicode_escape").decode()
