"""Ctrl-C that waits for a good moment: the first one ends the work between two steps, a second one at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether somebody has asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def obey(self) -> None:
        """Raise ``KeyboardInterrupt`` if somebody has."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def patient() -> Iterator[Interruption]:
    """While this lasts, the first Ctrl-C only sets a ``Interruption``. In the main thread only."""
    wish = Interruption()

    def asked(number: int, frame: FrameType | None) -> None:
        wish.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, asked)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGINT, before)
