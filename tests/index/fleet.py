"""A fleet of real block managers whose events feed an indexer that names blocks differently. The managers are the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.index.support import ENGINE

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.events import Batcher, EventBatch
from kvyard.hashing import TokenChain

FULL = GroupSpec(block_size=4)
WINDOW = GroupSpec(kind="sliding_window", window=10, block_size=4)
PRESETS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FULL,),
    "mla": (GroupSpec(kind="mla", block_size=8),),
    "window": (WINDOW,),
    "full+window": (FULL, WINDOW),
    "full+2 windows": (FULL, WINDOW, GroupSpec(kind="sliding_window", window=17, block_size=4)),
    "full+wide blocks": (FULL, GroupSpec(kind="sliding_window", window=13, block_size=8)),
    "full+state": (FULL, GroupSpec(kind="mamba", block_size=4, mode="all")),
    "full+aligned state": (FULL, GroupSpec(kind="mamba", block_size=4, mode="align")),
    "draft head": (GroupSpec(block_size=4, eagle=True),),
    # Alone, a chunked group "hits" every chunk but the last with nothing cached at all; the index credits copies only.
    "full+chunked": (FULL, GroupSpec(kind="chunked_local", chunk=16, block_size=4)),
    "draft head+window": (GroupSpec(block_size=4, eagle=True), WINDOW),
}
# Not on the wire: draft heads and chunk sizes. And an aligned state may stay unheard of for a while.
LEARNABLE = [name for name in PRESETS if not {"draft", "chunked", "aligned"} & set(name.replace("+", " ").split())]


class Engine:
    """A manager that runs whole requests, with a batcher on its sink."""

    def __init__(
        self, name: str, groups: Sequence[GroupSpec], blocks: int = 40, seed: int = 0, batcher: Any = None
    ) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.batcher = batcher or Batcher([spec.meta for spec in groups], stream=name, rank=0)
        self.manager = BlockManager(blocks, groups, sink=self.batcher, max_model_len=512)
        self.running: list[Request] = []
        self.count = 0

    def request(self, tokens: Sequence[int]) -> Request:
        self.count += 1
        return Request(f"{self.name}-{self.count}", self.chain(tokens))

    def chain(self, tokens: Sequence[int]) -> TokenChain:
        return TokenChain(tokens, self.manager.geometry.hash_block_size, ENGINE)

    def step(self, prompts: Sequence[Sequence[int]]) -> EventBatch | None:
        """Some scheduling: admit, run on, finish, now and then reset."""
        rng, manager = self.rng, self.manager
        manager.begin_step()
        for _ in range(rng.randrange(3)):
            deed = rng.random()
            if deed < 0.6:
                request = self.request(rng.choice(prompts))
                hit = manager.lookup(request)
                new = request.num_tokens - hit.tokens
                if rng.random() < 0.3:
                    new = rng.randrange(1, new + 1)
                if manager.allocate(request, new, hit) is not None:
                    request.num_computed_tokens = hit.tokens + new
                    request.running = True
                    self.running.append(request)
            elif deed < 0.75 and self.running:
                request = rng.choice(self.running)
                left = request.num_tokens - request.num_computed_tokens
                if not left:
                    more = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
                    request.append(more)
                    left = len(more)
                if manager.allocate(request, left) is not None:
                    request.num_computed_tokens += left
            elif self.running:
                manager.free(self.running.pop(rng.randrange(len(self.running))))
        if rng.random() < 0.03:
            while self.running:
                manager.free(self.running.pop())
            manager.reset()
        manager.take_copies()
        return self.batcher.end_iteration(0)

    def longest(self, tokens: Sequence[int]) -> int:
        """Return the tokens that the manager itself would skip of a prompt."""
        self.manager.begin_step()
        return self.manager.lookup(self.request(tokens)).tokens


def prompts_of(rng: random.Random, count: int = 10, most: int = 60) -> list[list[int]]:
    """Prompts that share prefixes, aligned to nothing."""
    out = [[rng.randrange(4) for _ in range(rng.randrange(5, most))]]
    for _ in range(count - 1):
        old = rng.choice(out)
        keep = rng.randrange(len(old))
        out.append(old[:keep] + [rng.randrange(4) for _ in range(rng.randrange(1, most - keep))])
    return out


def options_of(name: str, learned: bool) -> dict[str, Any]:
    return {} if learned else {"groups": PRESETS[name]}
