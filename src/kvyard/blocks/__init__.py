"""The block manager: pool, attention groups, coordinator, manager."""

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.hints import NO_HINTS, Hints, Retention
from kvyard.blocks.manager import BlockManager
from kvyard.blocks.pool import Pool
from kvyard.blocks.request import Request, RequestError
from kvyard.blocks.spec import ConfigError, GroupSpec

__all__ = [
    "NO_HINTS",
    "BlockManager",
    "ConfigError",
    "GroupSpec",
    "Hints",
    "Hit",
    "Pool",
    "Request",
    "RequestError",
    "Retention",
]
