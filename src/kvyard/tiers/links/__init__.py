"""Links: both directions of a medium with finite bandwidth, between device and host, or host and shared storage.

A link receives the time and transfers, and reports when they land. It knows neither blocks nor tiers, and reads no clock.
``make_link`` builds one from a ``LinkConfig``; ``parse_link_config`` reads that from a file's keys or a preset's name.
"""

from collections.abc import Callable

from kvyard.blocks.spec import ConfigError
from kvyard.errors import suggest
from kvyard.tiers.links.config import PRESETS, LaneConfig, LinkConfig, parse_link_config
from kvyard.tiers.links.fair import FairLink
from kvyard.tiers.links.fifo import FifoLink
from kvyard.tiers.links.link import Direction, Link, Transfer

DISCIPLINES: dict[str, Callable[[LinkConfig], Link]] = {"fair": FairLink, "fifo": FifoLink}
"""Makers of links by the name of their discipline. A maker raises ``ConfigError`` for what it can't honour."""


def make_link(config: LinkConfig) -> Link:
    """Return an idle link. Raises ``ConfigError`` for a discipline that isn't registered, or keys that it can't honour."""
    maker = DISCIPLINES.get(config.discipline)
    if maker is None:
        raise ConfigError(
            f"unknown discipline {config.discipline!r}: {suggest(config.discipline, sorted(DISCIPLINES))}"
        )
    return maker(config)


__all__ = ["PRESETS", "Direction", "LaneConfig", "Link", "LinkConfig", "Transfer", "make_link", "parse_link_config"]
