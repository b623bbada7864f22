"""The block manager: pool, attention groups, coordinator, manager."""

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.manager import BlockManager
from kvyard.blocks.pool import Pool
from kvyard.blocks.request import Request, RequestError
from kvyard.blocks.spec import ConfigError, GroupSpec, Retention

__all__ = ["BlockManager", "ConfigError", "GroupSpec", "Hit", "Pool", "Request", "RequestError", "Retention"]
