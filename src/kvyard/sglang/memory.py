"""Pools, allocators and the tree of an SGLang under test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvyard.sglang.storage import without_threads

DEVICE = "cpu"


def make_allocator(settings: dict[str, Any]) -> Any:
    """Return the allocator of token slots, with tensors of keys and values only where HiCache copies them."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    size, page, dtype = settings["num_tokens"], settings["page_size"], torch.float16
    kv_cache: Any = SimpleNamespace(device=DEVICE, size=size, page_size=page)
    if "hicache" in settings:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        kv_cache = MHATokenToKVPool(size, page, dtype, 1, 8, 1, DEVICE, enable_memory_saver=False)
    if "sliding_window_size" in settings:
        swa = int(size * settings["swa_full_tokens_ratio"]) // page * page
        pool = window_pool()
        if "hicache" in settings:
            from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

            pool = SWAKVPool(size, swa, page, dtype, 1, 8, [1], [0], DEVICE)
        return SWATokenToKVPoolAllocator(size, swa, page, dtype, DEVICE, pool, need_sort=False)
    if page == 1:
        return TokenToKVPoolAllocator(size, dtype, DEVICE, kv_cache, need_sort=False)
    return PagedTokenToKVPoolAllocator(size, page, dtype, DEVICE, kv_cache, need_sort=False)


def make_tree(settings: dict[str, Any], scheduler: Any) -> Any:
    """Return the radix tree of a scheduler that has its pools, with HiCache below it where the log has that."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    components = [ComponentType.FULL]
    if "sliding_window_size" in settings:
        components.append(ComponentType.SWA)
    if "max_mamba_cache_size" in settings:
        components.append(ComponentType.MAMBA)
    params = CacheInitParams(
        disable=settings["disable_radix_cache"],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        page_size=settings["page_size"],
        eviction_policy=settings["radix_eviction_policy"],
        enable_kv_cache_events=True,
        chunked_prefill_size=settings["chunked_prefill_size"],
        sliding_window_size=settings.get("sliding_window_size"),
        tree_components=tuple(components),
        tree_core_backend=settings.get("tree_core"),
        enable_mamba_extra_buffer=tracks_states(settings),
        enable_mamba_extra_buffer_lazy=tracks_lazily(settings),
        is_eagle=scheduler.spec_algorithm.is_eagle(),
    )
    tree = UnifiedRadixCache(params)
    if "hicache" in settings:
        from sglang.srt.mem_cache.pool_host import base, common

        common._cuda_host_register = lambda *_: None
        base.host_memory_budget_bytes = lambda requested: requested  # 10 GB of the machine's must be free otherwise
        if "storage" in settings["hicache"]:
            from sglang.srt.runtime_context import get_parallel

            get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_dcp_rank=0)
            without_threads()
        tree.init_hicache(scheduler.server_args, params)
    return tree


def window_pool() -> Any:
    """Stands for the tensors of full and window attention: it knows which token of one is which of the other."""
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    class WindowPool(BaseSWAKVPool):
        def __init__(self) -> None:
            self.full_to_swa_index_mapping: Any = None

        def register_mapping(self, full_to_swa_index_mapping: Any) -> None:
            self.full_to_swa_index_mapping = full_to_swa_index_mapping

        def translate_loc_from_full_to_swa(self, kv_indices: Any) -> Any:
            return self.full_to_swa_index_mapping[kv_indices]

    WindowPool.__abstractmethods__ = frozenset()
    return WindowPool()


def rows_with_states(rows: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return rows of requests beside a pool of tiny Mamba states."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
    )
    drafts = settings.get("speculative")
    return HybridReqToTokenPool(
        **rows,
        mamba_size=settings["max_mamba_cache_size"],
        mamba_spec_state_size=rows["size"] if drafts is not None else 0,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=tracks_states(settings),
        enable_mamba_extra_buffer_lazy=tracks_lazily(settings),
        speculative_num_draft_tokens=drafts["num_draft_tokens"] if drafts is not None else None,
        speculative_eagle_topk=drafts["eagle_topk"] if drafts is not None else None,
        enable_overlap_schedule=settings["overlap"],
    )


def tracks_states(settings: dict[str, Any]) -> bool:
    """True if requests have a buffer for states inside them, which SGLang gives them with prefix caching only."""
    strategy = settings.get("mamba_radix_cache_strategy", "no_buffer")
    return strategy != "no_buffer" and not settings["disable_radix_cache"]


def tracks_lazily(settings: dict[str, Any]) -> bool:
    """True if the second slot of that buffer is taken only where a state is written."""
    return tracks_states(settings) and settings["mamba_radix_cache_strategy"] == "extra_buffer_lazy"
