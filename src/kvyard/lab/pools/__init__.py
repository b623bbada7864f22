"""Fleets of independent pools: each has workers, a router and requests of its own, and all together have one report."""

from kvyard.lab.pools.pool import common_limit, pool_requests, read_pools
from kvyard.lab.pools.run import PooledRun, replay_pools

__all__ = ["PooledRun", "common_limit", "pool_requests", "read_pools", "replay_pools"]
