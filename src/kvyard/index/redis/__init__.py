"""The index on a Redis or Valkey server, shared by any number of processes: why and how is in ``docs/how-to/redis-index.md``.

Importing this doesn't import redis-py; opening an index does, and says what to install if it is missing.
"""

from kvyard.index.redis.rows import RedisIndex
from kvyard.index.redis.server import Unavailable
from kvyard.index.redis.shared import SharedIndexer

__all__ = ["RedisIndex", "SharedIndexer", "Unavailable"]
