"""A recorder that makes vLLM's events from ours: for comparing with vLLM's own logs, and for vLLM itself.

vLLM announces every copy, one store per registration (even an empty one) and one removal per hash. Our sink receives runs;
this turns them back into vLLM's events, in the field order of its wire. ``kvyard.vllm`` derives from it to make vLLM's own
objects.
"""

from collections.abc import Sequence
from typing import Any

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.group import Group
from kvyard.blocks.request import Request
from kvyard.events.types import Tier
from kvyard.hashing import Chain, Key, Run, wire_hash

WireEvent = dict[str, Any]


class VllmRecorder:
    """A sink whose ``take`` returns the events that vLLM's pool would have queued."""

    def __init__(self, hashes_as_bytes: bool = False) -> None:
        self._hashes_as_bytes = hashes_as_bytes
        self.events: list[Any] = []
        """Events since the latest call of ``take``."""
        self._open: tuple[Request, Group, int, int] | None = None
        self._entered: list[int] = []
        self._groups: list[Group] = []

    def watch(self, groups: list[Group]) -> None:
        """Record for these groups, all of one manager."""
        self._groups = groups
        for group in groups:
            group.watch = self.registering

    def registering(self, request: Request, group: Group, first: int, last: int) -> None:
        """A registration of positions ``first`` to ``last`` begins (``Group.watch``).

        Equal where a prompt ends with a block: its last state is registered by itself, and announced like one that ends
        inside a block.
        """
        self.flush()
        self._open = (request, group, first, last)

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        if run.chain.block_size == self._groups[group].block_size:
            self._entered += range(run.start, run.stop)
            return
        # A block became known by a hash that ends inside it: a store of its own, of one hash unit.
        self.flush()
        self.store(self._groups[group], run.chain, [run.start], run.start, run.stop)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        for key in reversed(run.hashes):
            self.removed(key, group)

    def removed(self, key: Key, group: int) -> None:
        """Record the removal of one hash from ``group``."""
        hashes = [self.wire(key)]
        self.events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group})

    def cleared(self, tier: Tier | None = None) -> None:
        self.events.append({"type": "AllBlocksCleared"})

    def reported(self, request: Request, groups: list[Group], hit: Hit) -> None:
        """Record that the request asked to have its hits announced too."""
        for group, match in zip(groups, hit.groups, strict=True):
            if match.blocks:
                self.store(group, group.chain_of(request), range(match.blocks), 0, match.blocks)

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        self.flush()
        events, self.events = self.events, []
        return events

    def wire(self, key: Key) -> Key:
        """Return a hash as the wire has it: its low 64 bits, or all of its bytes."""
        return key if self._hashes_as_bytes else wire_hash(key)

    def flush(self) -> None:
        """Write out the registration that is being recorded, if any."""
        if self._open is not None:
            request, group, first, last = self._open
            self._open = None
            positions, self._entered = self._entered, []
            if first < last:
                self.store(group, group.chain_of(request), positions, first, last)
            elif positions:
                end = (first + 1) * group.block_size // group.hash_block_size
                self.store(group, request.chain, [end - 1], end - 1, end)

    def store(self, group: Group, chain: Chain, positions: Sequence[int], first: int, last: int) -> None:
        """Record a store of the blocks at ``positions``, with the text of all from ``first`` to ``last``."""
        space = chain.namespace
        event: WireEvent = {
            "type": "BlockStored",
            "block_hashes": [self.wire(chain.keys[position]) for position in positions],
            "parent_block_hash": self.wire(chain.keys[first - 1]) if first else None,
            "token_ids": chain.tokens_of(first, last),
            "block_size": chain.block_size,
            "lora_id": space.lora_id,
            "medium": "GPU",
            "lora_name": space.lora_name,
        }
        if positions:
            event["extra_keys"] = [chain.extras_of(position, position + 1)[0] for position in positions]
        event["group_idx"] = group.index
        event["kv_cache_spec_kind"] = group.spec.attention.wire
        if group.spec.attention.is_window:
            event["kv_cache_spec_sliding_window"] = group.spec.window
        self.events.append(event)
