"""The block manager: pool, attention groups, coordinator, manager."""

from kvyard.blocks.coordinator import Coordinator, Hit
from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.extent import DEFAULT_PRIORITY
from kvyard.blocks.manager import BlockManager
from kvyard.blocks.pool import NULL_BLOCK, Pool
from kvyard.blocks.request import Request, RequestError
from kvyard.blocks.spec import ConfigError, GroupSpec, Retention

__all__ = [
    "DEFAULT_PRIORITY",
    "NULL_BLOCK",
    "ORDERS",
    "BlockManager",
    "ConfigError",
    "Coordinator",
    "GroupSpec",
    "Hit",
    "Pool",
    "Request",
    "RequestError",
    "Retention",
]
