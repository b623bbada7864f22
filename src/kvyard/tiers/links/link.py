"""The interface of a link, and the registry of disciplines behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvyard.blocks.spec import ConfigError
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.fair import FairLink
from kvyard.tiers.links.fifo import FifoLink
from kvyard.tiers.links.transfer import Direction, LaneStats, Transfer


class Link(Protocol):
    """Both directions of a medium with finite bandwidth. Times are integer nanoseconds and never go back.

    Every verb that takes ``now`` raises ``ClockError`` for one earlier than the last it was told, and changes nothing then.
    """

    @property
    def config(self) -> LinkConfig:
        """What it was made from."""
        ...

    def submit(self, now: int, direction: Direction, nbytes: int, client: str = "", pieces: int = 1) -> Transfer:
        """Queue ``nbytes``, made of ``pieces`` separate copies.

        Raises ``LinkError`` for amounts that can't be, and changes nothing then. A transfer of 0 bytes lands when its first
        byte could have moved.
        """
        ...

    def cancel(self, now: int, transfer: Transfer) -> bool:
        """Give ``transfer`` up: it ends at ``now``, and ``advance`` won't report it.

        Returns whether there was anything to give up: one that landed at or before ``now`` stays landed (and is reported),
        one that was cancelled stays cancelled. Raises ``LinkError`` for a transfer of another link.
        """
        ...

    def earliest(self) -> int | None:
        """When the next transfer lands if nothing else is submitted or cancelled; ``None`` when there is none.

        If some have landed that ``advance`` hasn't reported yet, the last ``now`` the link was told: they are due at once.
        """
        ...

    def advance(self, now: int) -> list[Transfer]:
        """Let time pass up to ``now``, and return what landed since the last call, by ``(ended, number)``."""
        ...

    def stats(self, direction: Direction) -> LaneStats:
        """The account of one direction, up to the last ``now``."""
        ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the link's state is consistent and its shares keep I7. Slow."""
        ...


DISCIPLINES: dict[str, Callable[[LinkConfig], Link]] = {"fair": FairLink, "fifo": FifoLink}
"""Makers of links by the name of their discipline. A maker raises ``ConfigError`` for what it can't honour."""


def make_link(config: LinkConfig) -> Link:
    """An idle link. Raises ``ConfigError`` for a discipline nobody registered, or keys that it can't honour."""
    maker = DISCIPLINES.get(config.discipline)
    if maker is None:
        raise ConfigError(f"unknown discipline {config.discipline!r}; choose one of {', '.join(sorted(DISCIPLINES))}")
    return maker(config)
