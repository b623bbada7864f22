"""kvyard's eviction policies in vLLM's CPU tier: the order that won in a replay, unchanged.

Loaded by vLLM's ``OffloadingConnector`` with ``"cache_policy_module_path":"kvyard.vllm.eviction"``; ``"eviction_policy"`` is
``kvyard-`` and the name of an order, those of installed packages included: ``kvyard-lru``, ``kvyard-priority``.
"""

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, ClassVar

from kvyard.vllm.version import check_version

check_version()  # before the first import from vLLM: another version may not have what is imported

# ruff: noqa: E402
from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvyard.blocks.request import wish_at
from kvyard.vllm.ranking import ChunkRanking, RetentionError, read_wishes, usable

logger = init_logger("vllm.kvyard")
PREFIX = "kvyard-"
WISHES = "retention"
"""The key of a request's ``kv_transfer_params`` that has its wishes."""


class OrderPolicy(CachePolicy):
    """A cache policy of vLLM's that goes by an eviction policy of kvyard's."""

    order: ClassVar[str] = "lru"

    def __init__(self, cache_capacity: int) -> None:
        """Raises ``ConfigError`` for an unknown order."""
        super().__init__(cache_capacity)
        self._ranking: ChunkRanking[Any] = ChunkRanking(self.order)
        self._wishes: dict[bytes, tuple[int, int | None]] = {}
        """Of chunks that are about to be stored: a policy doesn't receive the request again then."""
        self._chunk_tokens = 0
        """Tokens of a chunk, which a policy doesn't receive: it follows from where chunks end."""
        logger.info("Chunks in host memory are evicted by kvyard's order %r, %d of them", self.order, cache_capacity)

    def get(self, key: bytes) -> Any:
        return self._ranking.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        wish = self._wishes.pop(key, None)
        pinned = chunk.ref_cnt != 0
        if wish is None:
            self._ranking.insert(key, chunk, pinned=pinned)
        else:
            self._ranking.insert(key, chunk, pinned=pinned, priority=wish[0], expires=wish[1])

    def remove(self, key: bytes) -> None:
        self._ranking.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._ranking.touch(list(keys))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Make room, if possible, for chunks that aren't here and are about to be stored."""
        self._wishes.clear()
        if not self._ranking.reads_priorities:
            return
        try:
            wishes = read_wishes((req_context.kv_transfer_params or {}).get(WISHES))
        except RetentionError as bad:
            logger.warning("Request %s: %s", req_context.req_id, bad)
            return
        ends = {key: end for key in keys if (end := req_context.get_offload_key_position(key)) is not None}
        self._chunk_tokens = gcd(self._chunk_tokens, *ends.values())
        if wishes:
            self._wishes = {key: wish_at(wishes, end - self._chunk_tokens) for key, end in ends.items()}

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Mark everything that a request stored or used as used now, the groups of a hybrid model side by side."""
        keys = [key for group in key_groups for key in group]
        ends = [req_context.get_offload_key_position(key) for key in keys]
        if None not in ends:
            keys = [key for _, key in sorted(zip(ends, keys, strict=False), key=lambda pair: pair[0])]
        self._ranking.touch(keys)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        return self._ranking.evict(n, protected)

    def clear(self) -> None:
        self._ranking.clear()
        self._wishes.clear()

    def mark_evictable(self, key: bytes) -> None:
        self._ranking.pin(key, False)

    def mark_non_evictable(self, key: bytes) -> None:
        self._ranking.pin(key, True)


def __getattr__(name: str) -> type[OrderPolicy]:
    """Return the policy called ``name``. Raises ``AttributeError``, saying what there is, for an order that isn't there."""
    order = name.removeprefix(PREFIX)
    if name.startswith(PREFIX) and order in usable():
        return type(f"OrderPolicy[{order}]", (OrderPolicy,), {"order": order})
    known = ", ".join(PREFIX + known for known in usable())
    raise AttributeError(f"{__name__} has no eviction policy {name!r}; there are {known}")
