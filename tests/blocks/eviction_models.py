"""Slow and obvious: a cache of single blocks, and every eviction policy as a choice among all free blocks, made each time.

It shares nothing with the manager but hash keys. Blocks have the ids that the manager hands out, so victims can be compared.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SECOND = 10**9


@dataclass(eq=False)
class Block:
    id: int
    key: Any = None
    position: int = 0
    refs: int = 1
    serial: int = 0
    """When it became free."""
    uses: int = 0
    last: Any = None
    """The last request that used it."""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Prompt:
    """A request: its keys (full blocks), its length, and its number in the trace."""

    name: str
    keys: list[Any]
    tokens: int
    number: int
    category: str = ""
    turn: int = 0


class Policy:
    """LRU; others change what they must."""

    def __init__(self, capacity: int, now: Callable[[], int], size: int, future: Sequence[Prompt] = ()) -> None:
        self.capacity, self.now, self.size, self.future = capacity, now, size, future
        self.start()

    def start(self) -> None:
        pass

    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        for block in blocks:
            if block.last is not prompt:
                block.uses += 1
            block.last = prompt

    def freed(self, block: Block) -> None:
        pass

    def rank(self, block: Block) -> Any:
        return block.serial

    def victim(self, free: list[Block]) -> Block:
        return min(free, key=self.rank)

    def evicted(self, block: Block) -> None:
        pass

    def look(self, waiting: list[list[Block]]) -> None:
        pass


class Lfu(Policy):
    def rank(self, block: Block) -> Any:
        return block.uses, block.serial


class HitsPerToken(Policy):
    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        fresh = [block for block in blocks if not block.uses]
        for block in fresh:
            block.info["size"] = len(fresh) * self.size
        super().used(blocks, prompt)

    def rank(self, block: Block) -> Any:
        return block.uses / block.info["size"], block.serial


class TailLru(Policy):
    threshold, following = 16, 6

    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        super().used(blocks, prompt)
        for block in blocks:
            block.info["needed"] = block.position * self.size < max(0, prompt.tokens + self.following - self.threshold)

    def rank(self, block: Block) -> Any:
        return block.info["needed"], block.serial


class Slru(Policy):
    def start(self) -> None:
        self.serial = 1 << 40  # behind every serial that the cache gives, until it is told of a later one

    def freed(self, block: Block) -> None:
        block.info["protected"] = block.uses >= 2

    def victim(self, free: list[Block]) -> Block:
        protected = sorted((block for block in free if block.info["protected"]), key=lambda block: block.serial)
        for block in protected[: max(0, len(protected) - int(0.8 * self.capacity))]:
            block.info["protected"] = False
            block.serial = self.next_serial()
        return min(free, key=lambda block: (block.info["protected"], block.serial))

    next_serial: Callable[[], int]


class S3Fifo(Policy):
    def start(self) -> None:
        self.ghost: OrderedDict[Any, None] = OrderedDict()
        self.place = 0
        self.full = max(1, int(0.1 * self.capacity))

    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        for block in blocks:
            if block.last is None:
                block.info["main"] = block.key in self.ghost
                self.ghost.pop(block.key, None)
            elif block.last is not prompt:
                block.uses = min(3, block.uses + 1)
            block.last = prompt

    def freed(self, block: Block) -> None:
        if "place" not in block.info:
            self.to_end(block)

    def to_end(self, block: Block) -> None:
        self.place += 1
        block.info["place"] = self.place

    def victim(self, free: list[Block]) -> Block:
        while True:
            small = [block for block in free if not block.info["main"]]
            main = [block for block in free if block.info["main"]]
            oldest = min(
                small if small and (not main or len(small) >= self.full) else main, key=lambda b: b.info["place"]
            )
            if not oldest.info["main"]:
                if oldest.uses < 2:
                    return oldest
                oldest.info["main"], oldest.uses = True, 0
            elif not oldest.uses:
                return oldest
            else:
                oldest.uses -= 1
            self.to_end(oldest)

    def evicted(self, block: Block) -> None:
        if not block.info["main"]:
            self.ghost.pop(block.key, None)
            self.ghost[block.key] = None
            while len(self.ghost) > self.capacity - self.full:
                self.ghost.popitem(last=False)


class WorkloadAware(Policy):
    window, turns = 1800 * SECOND, 8

    def start(self) -> None:
        self.seen: list[tuple[int, str, str, int]] = []
        """(when told, what, category, figure), a line for each block."""
        self.evictions: list[int] = []

    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        now = self.now()
        if not prompt.turn:
            prompt.turn = self.turn_of(blocks, prompt)
        category = f"{prompt.category}/{min(prompt.turn, self.turns)}"
        for block in blocks:
            if block.last is not prompt:
                self.seen.append((now, "used", category, 1))
                if block.last is not None:
                    self.seen.append((now, "reused", block.info["category"], now - block.info["time"]))
            block.info["category"], block.info["time"] = category, now
            block.last = prompt
        self.seen += [(now, "evicted", "", age) for age in self.evictions]
        self.evictions = []
        self.seen = [line for line in self.seen if line[0] >= now - self.window]

    def turn_of(self, blocks: list[Block], prompt: Prompt) -> int:
        known = [block for block in blocks if block.last is not None and block.last is not prompt]
        if known and 2 * len(known) * self.size >= prompt.tokens:
            return known[-1].last.turn + 1
        return 1

    def evicted(self, block: Block) -> None:
        self.evictions.append(self.now() - block.info["time"])

    def rank(self, block: Block) -> Any:
        category = block.info["category"]
        used = [line for line in self.seen if line[1:3] == ("used", category)]
        gaps = [line[3] for line in self.seen if line[1:3] == ("reused", category)]
        ages = [line[3] for line in self.seen if line[1] == "evicted"]
        life = sum(ages) / len(ages) if ages else self.window
        mean = max(1.0, sum(gaps) / len(gaps) if gaps else life)
        age = self.now() - block.info["time"]
        share = (len(gaps) + 1) / (len(used) + 2)
        return share * (math.exp(-age / mean) - math.exp(-(age + life) / mean)), block.serial


class QueueInformed(Policy):
    def look(self, waiting: list[list[Block]]) -> None:
        self.wanted = {}
        for turn, blocks in enumerate(waiting):
            for block in blocks:
                self.wanted.setdefault(block, turn)

    def start(self) -> None:
        self.wanted: dict[Block, int] = {}

    def rank(self, block: Block) -> Any:
        turn = self.wanted.get(block)
        return (0, 0, block.serial) if turn is None else (1, -turn, block.serial)


class Belady(Policy):
    def rank(self, block: Block) -> Any:
        after = block.info["number"]
        following = [prompt.number for prompt in self.future if prompt.number > after and block.key in prompt.keys]
        return -min(following, default=1 << 60), block.serial

    def used(self, blocks: list[Block], prompt: Prompt) -> None:
        super().used(blocks, prompt)
        for block in blocks:
            block.info["number"] = max(block.info.get("number", -1), prompt.number)


POLICIES: dict[str, type[Policy]] = {
    "lru": Policy,
    "marconi": Policy,  # without states
    "lfu": Lfu,
    "hits-per-token": HitsPerToken,
    "t-lru": TailLru,
    "slru": Slru,
    "s3-fifo": S3Fifo,
    "workload-aware": WorkloadAware,
    "queue-informed": QueueInformed,
    "belady": Belady,
}
OPTIONS = {"t-lru": {"threshold": TailLru.threshold, "next_prompt": TailLru.following}}


class Cache:
    """``capacity`` blocks of ``size`` tokens under one policy."""

    def __init__(self, capacity: int, size: int, policy: Policy) -> None:
        self.size, self.policy = size, policy
        self.loose = list(range(capacity, 0, -1))
        self.copies: dict[Any, list[Block]] = {}
        self.free: list[Block] = []
        self.held: dict[Prompt, list[Block]] = {}
        self.serial = 0
        self.evictions = 0
        if isinstance(policy, Slru):
            policy.next_serial = self.tick

    def tick(self) -> int:
        self.serial += 1
        return self.serial

    def find(self, prompt: Prompt) -> list[Block]:
        found: list[Block] = []
        for key in prompt.keys[: (prompt.tokens - 1) // self.size]:
            if key not in self.copies:
                break
            found.append(self.copies[key][0])
        return found

    def start(self, prompt: Prompt) -> tuple[int, list[int]] | None:
        """Hit blocks and the ids of new ones; ``None`` where there is no room."""
        hit = self.find(prompt)
        new = -(-prompt.tokens // self.size) - len(hit)
        idle = sum(not block.refs for block in hit)
        if new + idle > len(self.loose) + len(self.free):
            return None
        for block in hit:
            if not block.refs:
                self.free.remove(block)
            block.refs += 1
        taken = []
        for at in range(len(hit), len(hit) + new):
            block = Block(self.take(), None, at)
            if at < len(prompt.keys):
                block.key = prompt.keys[at]
            taken.append(block)
        for block in taken:
            if block.key is not None:
                self.copies.setdefault(block.key, []).append(block)
        self.held[prompt] = [*hit, *taken]
        return len(hit), [block.id for block in taken]

    def take(self) -> int:
        if self.loose:
            return self.loose.pop()
        block = self.policy.victim(self.free)
        self.policy.evicted(block)
        self.evictions += 1
        self.free.remove(block)
        self.copies[block.key].remove(block)
        if not self.copies[block.key]:
            del self.copies[block.key]
        return block.id

    def end(self, prompt: Prompt) -> None:
        blocks = self.held.pop(prompt)
        self.policy.used([block for block in blocks if block.key is not None], prompt)
        loose = []
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                if block.key is None:
                    loose.append(block.id)
                    continue
                block.serial = self.tick()
                self.free.append(block)
                self.policy.freed(block)
        self.loose += reversed(loose)

    def look(self, waiting: list[Prompt]) -> None:
        self.policy.look([self.find(prompt) for prompt in waiting])
