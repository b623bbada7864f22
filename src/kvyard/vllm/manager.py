"""vLLM's ``KVCacheManager`` over kvyard's block manager: what vLLM 0.32's scheduler, connectors and engine core ask of it.

Names and signatures are vLLM's (pinned in ``interface-0.32.txt``); what happens behind them is kvyard's. Block ids go to the
real model runner, so a wrong one is a wrong answer: ``scripts/inside_vllm.py`` compares every token, hit and event with
those of vLLM's own manager.
"""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from kvyard.blocks import BlockManager, Hit
from kvyard.blocks.attention.state import AlignedStateGroup
from kvyard.blocks.group import NO_HIT, Group, GroupHit
from kvyard.blocks.table import BlockTable
from kvyard.integers import ceil_div
from kvyard.vllm.block_lists import BlockIds, HeldBlocks, HitBlocks
from kvyard.vllm.counterpart import Counterpart
from kvyard.vllm.engine_events import EngineEvents
from kvyard.vllm.facades import CoordinatorFacade, CopyEnd, DetachedBlocks, PoolFacade
from kvyard.vllm.groups import group_specs
from kvyard.vllm.version import UnsupportedError

logger = init_logger("vllm.kvyard")


class Manager:
    """In the place of vLLM's ``KVCacheManager``."""

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        """Raises ``UnsupportedError`` for settings that kvyard's block manager doesn't have, ``ConfigError`` for groups
        that can't live together.
        """
        if metrics_collector is not None:
            raise UnsupportedError("kvyard.vllm.Scheduler has no residency metrics: leave --kv-cache-metrics out")
        specs = group_specs(kv_cache_config, dcp_world_size)
        for spec, group in zip(specs, kv_cache_config.kv_cache_groups, strict=True):
            if pcp_world_size > 1 and not spec.is_full and (spec.is_state or group.kv_cache_spec.dcp_sharded):
                raise UnsupportedError(
                    "prefill context parallelism (pcp above 1) is for full attention alone, as in vLLM"
                )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = None
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.retained_hit_group_ids = ()
        self.num_kv_cache_groups = len(specs)
        self.kv_cache_event_metadata = tuple(
            (get_kv_cache_spec_kind(group.kv_cache_spec).value, get_kv_cache_spec_sliding_window(group.kv_cache_spec))
            for group in kv_cache_config.kv_cache_groups
        )
        self._events = EngineEvents(self.kv_cache_event_metadata) if enable_kv_cache_events else None
        blocks = BlockManager(
            kv_cache_config.num_blocks,
            specs,
            caching=enable_caching,
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            watermark=watermark,
            retention_interval=kv_cache_config.prefix_cache_retention_interval,
            use_eagle=use_eagle,
            num_prefill_lookahead=num_prefill_lookahead,
            junction_checkpoints=enable_mamba_shared_prefix_checkpoint,
            context_shards=dcp_world_size,
            sink=self._events,
        )
        if self._events is not None:
            self._events.watch(blocks.groups)
        self.blocks = blocks
        """kvyard's block manager."""
        self._states = [group for group in blocks.groups if isinstance(group, AlignedStateGroup)]
        for group in self._states:
            group.report_kept_states()
        self.mamba_shared_prefix_checkpoint = blocks.marks_junctions
        self.watermark_blocks = blocks.watermark_blocks
        self.block_pool = PoolFacade(blocks, enable_caching, hash_block_size, enable_kv_cache_events)
        self.coordinator = CoordinatorFacade(blocks, kv_cache_config)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in specs))
        self._requests: dict[str, Counterpart] = {}
        self._hash_block_size = hash_block_size
        self._zeroed = [
            kv_cache_config.needs_kv_cache_zeroing and not spec.is_state and spec.attention.cacheable for spec in specs
        ]
        self._to_zero: list[list[int]] = [[] for _ in specs]

    # -- statistics ----------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return self.blocks.usage

    def make_prefix_cache_stats(self) -> Any:
        """Return the statistics since the last call; ``None`` if they are not kept."""
        if not self.log_stats:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Return true if the request may be looked up."""
        return bool(self.enable_caching and not request.skip_reading_prefix_cache)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count a request that is let in, unless it wasn't looked up."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    # -- lookup --------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """Return the longest cached prefix: its blocks, its tokens, and how far another group has this text (0: no further)."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        hit = self.blocks.lookup(self._follow(request).update(False))
        if not hit.tokens:
            return self.empty_kv_cache_blocks, 0, hit.shared_prefix_boundary
        if self._events is not None and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self._events.owner = request
            self._events.reported(hit.request, self.blocks.groups, hit)
        return HitBlocks(self.blocks, hit), hit.tokens, hit.shared_prefix_boundary

    def get_computed_blocks_for_connector(self, request: Any) -> tuple[Any, int, int, bool]:
        """Like ``get_computed_blocks`` for a connector, which may bring states. Beside states the hit is full attention's;
        the last value is true if a group has less, so that the hit holds only with what the connector brings.
        """
        full = next((group.index for group in self.blocks.groups if group.is_full), None)
        if full is None or not any(group.spec.is_state for group in self.blocks.groups):
            return *self.get_computed_blocks(request), False
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0, False
        ours = self._follow(request).update(False)
        hits, lengths = self.blocks.coordinator.lookup_each(ours)
        tokens = lengths[full]
        if max(lengths) > tokens:
            return *self.get_computed_blocks(request), False
        blocks = HitBlocks(self.blocks, Hit(ours, tokens, hits, 0, self.blocks.pool.version))
        return blocks if tokens else self.empty_kv_cache_blocks, tokens, 0, min(lengths) < tokens

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        """Return a lookup's result cut at ``num_computed_tokens``, which all block sizes divide; states may end before it.

        Raises ``AssertionError`` as vLLM does where a group can't be cut there.
        """
        counts = []
        for group, listed in zip(self.blocks.groups, blocks.get_block_ids(), strict=True):
            if not group.shares:
                counts.append(0)
                continue
            count = num_computed_tokens // group.block_size
            assert num_computed_tokens % group.block_size == 0, f"{num_computed_tokens} tokens end inside a block"
            assert group.spec.is_state or count <= len(listed), (
                f"group {group.index} has {len(listed)} of {count} blocks"
            )
            counts.append(min(count, len(listed)))
        if not isinstance(blocks, HitBlocks):
            return self.create_kv_cache_blocks(
                tuple(list(listed)[:count] for listed, count in zip(blocks.blocks, counts, strict=True))
            )
        hit = blocks.hit
        cut = [
            GroupHit(count, group_hit.low, group_hit.nodes, group_hit.tail if count == group_hit.blocks else None)
            for count, group_hit in zip(counts, hit.groups, strict=True)
        ]
        kept = Hit(hit.request, num_computed_tokens, cut, hit.shared_prefix_boundary, hit.version)
        return HitBlocks(self.blocks, kept)

    # -- allocation ----------------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Return slots for ``num_new_tokens`` more tokens: the new blocks, or ``None`` if they can't be had.

        Raises ``ValueError`` (a ``RequestError``), changing nothing, for a call that makes no sense.
        """
        counterpart = self._requests.get(request.request_id) or self._follow(request)
        if (
            new_computed_blocks is None
            and not num_external_computed_tokens
            and num_new_tokens > 0
            and request.num_computed_tokens + num_new_tokens + num_lookahead_tokens <= counterpart.ours.quiet_until
        ):
            # A step that fits, frees nothing and completes no block: most of them.
            return self.empty_kv_cache_blocks
        ours = counterpart.update(request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED))
        hit = new_computed_blocks.hit if isinstance(new_computed_blocks, HitBlocks) else None
        if hit is None and num_new_computed_tokens:
            nothing = [NO_HIT] * len(self.blocks.groups)
            hit = Hit(ours, num_new_computed_tokens, nothing, 0, self.blocks.pool.version)
        if self._events is not None:
            self._events.owner = request
        taken = self.blocks.allocate(
            ours,
            num_new_tokens,
            hit,
            external=num_external_computed_tokens,
            lookahead=num_lookahead_tokens,
            encoder=num_encoder_tokens,
            delay_caching=delay_cache_blocks,
            must_fit=full_sequence_must_fit,
            reserved=reserved_blocks,
            has_running=has_scheduled_reqs,
        )
        if self._events is not None:
            self._events.flush()
        if taken is None:
            return None
        if self.kv_cache_config.needs_kv_cache_zeroing:
            self._note_blocks_to_zero(taken, ours.tables, hit, num_external_computed_tokens, skip_zeroing_group_ids)
        return BlockIds(taken) if any(taken) else self.empty_kv_cache_blocks

    def free(self, request: Any) -> None:
        """Free the request's blocks; a request without any is no error."""
        counterpart = self._requests.pop(request.request_id, None)
        if counterpart is not None:
            if request.request_id in self.blocks.requests:
                self.blocks.free(counterpart.ours)
            counterpart.forget()

    def pop_blocks_for_free(self, request: Any) -> list[DetachedBlocks]:
        """Remove the request but keep its blocks, until ``block_pool.free_blocks`` receives the result."""
        counterpart = self._requests.pop(request.request_id, None)
        if counterpart is None or request.request_id not in self.blocks.requests:
            return []
        tables = self.blocks.detach(counterpart.ours)
        counterpart.forget()
        return [DetachedBlocks(tables)]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that are never read again after ``processed_computed_tokens`` tokens."""
        ours = self.blocks.requests.get(request_id)
        if ours is not None:
            self.blocks.drop_stale(ours, processed_computed_tokens)

    # -- caching -------------------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register the blocks of the first ``num_computed_tokens`` tokens."""
        counterpart = self._requests.get(request.request_id)
        if not self.enable_caching or counterpart is None or num_computed_tokens <= counterpart.ours.registered_until:
            return
        running = request.status == RequestStatus.RUNNING
        ours = counterpart.update(running)
        if self._events is not None:
            self._events.owner = request
        self.blocks.cache(ours, num_computed_tokens)
        if self._events is not None:
            self._events.flush()
        if running:
            self.blocks.note_limits(ours)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Unregister these blocks; requests that hold them keep them."""
        self.blocks.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Evict everything cached, if no request holds a block; returns true if it did."""
        if not self.blocks.reset():
            used = self.blocks.pool.num_blocks - 1 - self.blocks.pool.free
            logger.warning("The prefix cache is not reset: %d blocks are held", used)
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        return self._events.take() if self._events is not None else []

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return the length of the request's own prefix that others can find."""
        ours = self.blocks.requests.get(request.request_id)
        if ours is None:
            return 0
        each = zip(self.blocks.groups, ours.tables, strict=True)
        return min((_cached_tokens(group, table) for group, table in each if group.shares), default=0)

    # -- what a request holds ------------------------------------------------------------------------------------------

    def get_blocks(self, request_id: str) -> Any:
        """Return the blocks that a request holds."""
        ours = self.blocks.requests.get(request_id)
        return self.empty_kv_cache_blocks if ours is None else HeldBlocks(self.blocks, ours)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the request's block ids per group, 0 for the null block."""
        ours = self.blocks.requests.get(request_id)
        return tuple([] for _ in self.blocks.groups) if ours is None else tuple(self.blocks.block_ids(ours))

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Return the block ids without slots past ``num_computed_tokens``, except for states and encoders, which have none."""
        clipped = []
        for group, ids in zip(self.blocks.groups, self.get_block_ids(request_id), strict=True):
            whole = group.spec.is_state or not group.spec.attention.cacheable
            clipped.append(ids if whole else ids[: ceil_div(num_computed_tokens, group.block_size)])
        return tuple(clipped)

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[Any], ...]) -> Any:
        """Return vLLM's wrapper of ``blocks``."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros: vLLM has no cascade attention any more."""
        return [0] * self.num_kv_cache_groups

    # -- each step -----------------------------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Begin a step: states registered in the previous one may be read now."""
        self.blocks.begin_step()

    def take_new_block_ids(self) -> list[int]:
        """Drain the new blocks that must be zeroed before they are used."""
        if not any(self._to_zero):
            return []
        taken = [block_id for ids in self._to_zero for block_id in ids]
        self._to_zero = [[] for _ in self._to_zero]
        return taken

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Have the request's blocks from ``start_token`` on zeroed: a load has failed that would have filled them."""
        for group, ids in zip(self.blocks.groups, self.get_block_ids(request_id), strict=True):
            if self._zeroed[group.index]:
                self._to_zero[group.index] += ids[start_token // group.block_size :]

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Drain the copies that the engine must run before the step, and their ends, which ``block_pool.free_blocks`` is to
        receive once the copies have run.
        """
        pairs = [pair for group in self.blocks.groups for pair in group.take_copies()]
        copies = [KVCacheBlockCopy(source.ids[0], target.ids[0]) for source, target in pairs]
        return copies, [CopyEnd(extent) for pair in pairs for extent in pair]

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Drain the states that connectors may store, by request: group, block, and tokens that the state is after."""
        offloads: dict[str, list[tuple[int, int, int]]] = {}
        for group in self._states:
            for kept in group.take_kept_states():
                offloads.setdefault(kept.request_id, []).append((group.index, kept.block_id, kept.tokens))
        return offloads

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """Return the state that a request's prompt ended with inside a block, if the request ends there: as above, once."""
        ours = self.blocks.requests.get(request.request_id)
        if ours is None:
            return []
        offloads = []
        for group in self._states:
            kept = group.take_own_end(ours.tables[group.index])
            if kept is not None and not request.num_in_flight_tokens and request.num_computed_tokens == kept.tokens:
                offloads.append((group.index, kept.block_id, kept.tokens))
        return offloads

    # -- inside --------------------------------------------------------------------------------------------------------

    def _follow(self, request: Any) -> Counterpart:
        counterpart = self._requests.get(request.request_id)
        if counterpart is None:
            root = kv_cache_utils.NONE_HASH if self.enable_caching else None
            counterpart = Counterpart(request, self._hash_block_size, root)
            self._requests[request.request_id] = counterpart
        return counterpart

    def _note_blocks_to_zero(
        self,
        taken: Sequence[Sequence[int]],
        tables: Sequence[BlockTable],
        hit: Hit | None,
        external: int,
        skipped: tuple[int, ...],
    ) -> None:
        for group, (ids, table) in enumerate(zip(taken, tables, strict=True)):
            if not self._zeroed[group]:
                continue
            if external and group not in skipped:
                adopted = hit.groups[group].blocks if hit is not None else 0
                ids = [block_id for block_id in table.ids()[adopted:] if block_id]
            self._to_zero[group] += ids


def _cached_tokens(group: Group, table: BlockTable) -> int:
    """Return the tokens up to the end of the last findable block of ``table``."""
    ends = [0]
    for extent in table:
        if extent.node is not None:
            ends.append(extent.stop * group.block_size)
        elif extent.marks is not None:
            ends.append(extent.marks.runs[0].stop * group.hash_block_size)
    return max(ends)
