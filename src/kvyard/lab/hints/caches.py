"""Caches without a clock: hits of prompts that arrive one after the other, each routed to the cache with its longest prefix.

A quick estimate of the gain of session ends for caches alone. A cache evicts the least recently used block, but first the
blocks of ended conversations that no other conversation has used. The last block of a prompt counts as used first, and a
partial block counts as a block.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvyard.integers import ceil_div

LEAST_MATCH = 1024
"""Tokens that must be there before a cache is preferred to the least busy one: else all follow a common start to one cache."""
DECAY = 0.99
"""Share of a cache's load that is left from one request to the next."""
SHARED = -1


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as a cache without a clock sees it."""

    ids: Sequence[int]
    block_size: int
    length: int
    conversation: int


class _Cache:
    """Blocks with the one conversation that has used each, or that several have."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.alive: OrderedDict[int, int] = OrderedDict()
        self.over: OrderedDict[int, int] = OrderedDict()

    def match(self, ids: Sequence[int]) -> int:
        alive, over = self.alive, self.over
        for index, block in enumerate(ids):
            if block not in alive and block not in over:
                return index
        return len(ids)

    def use(self, prompt: Prompt, ends: bool) -> None:
        alive, over, mine = self.alive, self.over, prompt.conversation
        for block in reversed(prompt.ids):
            user = alive.pop(block, None)
            if user is None:
                user = over.pop(block, mine)
            if user != mine:
                user = SHARED
            if ends and user == mine:
                over[block] = user
            else:
                alive[block] = user
        while len(alive) + len(over) > self.capacity:
            (over or alive).popitem(last=False)


def reuse_without_time(prompts: Sequence[Prompt], ends: Sequence[bool], caches: int, capacity: int) -> float:
    """Return the share of prompt tokens that are found, with ``caches`` of ``capacity`` blocks each. ``ends``: for each prompt,
    True if a hint ends its conversation.
    """
    cache_list = [_Cache(capacity) for _ in range(caches)]
    loads = [0.0] * caches
    reused = total = 0
    for prompt, end in zip(prompts, ends, strict=True):
        least = ceil_div(LEAST_MATCH, prompt.block_size)
        matches = [cache.match(prompt.ids) for cache in cache_list]
        best = min(
            range(caches),
            key=lambda candidate: (-matches[candidate] if matches[candidate] >= least else 0, loads[candidate]),
        )
        reused += min(matches[best] * prompt.block_size, prompt.length)
        total += prompt.length
        for index in range(caches):
            loads[index] *= DECAY
        loads[best] += prompt.length
        cache_list[best].use(prompt, end)
    return reused / total if total else 0.0
