"""Links: both directions of a medium with finite bandwidth, between device and host, or host and shared storage.

A link is told the time, is handed transfers, and says when they land. It knows neither blocks nor tiers, and reads no clock.
``make_link`` builds one from a ``LinkConfig``; ``parse_link_config`` reads that from a file's keys or a preset's name.
"""

from kvyard.tiers.links.base import LinkError
from kvyard.tiers.links.config import LaneConfig, LinkConfig, parse_link_config
from kvyard.tiers.links.link import DISCIPLINES, Link, make_link
from kvyard.tiers.links.presets import PRESETS
from kvyard.tiers.links.transfer import Direction, LaneStats, Transfer

__all__ = [
    "DISCIPLINES",
    "PRESETS",
    "Direction",
    "LaneConfig",
    "LaneStats",
    "Link",
    "LinkConfig",
    "LinkError",
    "Transfer",
    "make_link",
    "parse_link_config",
]
