"""Fleets of independent pools: each has workers, a router and requests of its own, and all together have one report."""

from kvyard.lab.pools.pool import of_all, pool_requests, read_pools
from kvyard.lab.pools.run import PooledRun, replay_pools

__all__ = ["PooledRun", "of_all", "pool_requests", "read_pools", "replay_pools"]
