"""A wish to keep part of a request's blocks longer than others."""

from __future__ import annotations

import msgspec

from kvyard.blocks.spec import ConfigError


class Retention(msgspec.Struct, frozen=True):
    """A wish to keep the tokens ``start`` to ``stop`` (``None``: to the end) longer than others."""

    start: int
    stop: int | None
    priority: int
    duration: int | None = None
    """Nanoseconds the wish lasts once the blocks are free; ``None`` for ever."""

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ConfigError(f"a wish is for tokens from 0 on, one at least, not for {self.start} to {self.stop}")
        if not 0 <= self.priority <= 100:
            raise ConfigError(f"a retention priority is from 0 to 100, got {self.priority}")
        if self.duration is not None and self.duration < 0:
            raise ConfigError(f"a retention lasts 0 ns or longer, got {self.duration}")
