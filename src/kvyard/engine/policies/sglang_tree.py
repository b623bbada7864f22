"""Memory of an SGLang engine: its radix tree, what is beside it, and the slots that requests have for drafts."""

from math import lcm

from kvyard.blocks.spec import GroupSpec
from kvyard.blocks.state_slots import StateTracking
from kvyard.engine.config import EngineConfig
from kvyard.engine.policies.backend import DraftSlots, TreeSettings
from kvyard.engine.policies.settings import SglangSettings
from kvyard.integers import ceil_div
from kvyard.tiers.prefetches import PrefetchRules

ROUNDING = 1e-6
STATE_CHUNK = 64
"""Tokens between two states that kernels of recurrent layers produce."""
STATES_PER_REQUEST = 3
"""State slots for each request that may run: its own, the one that it goes on from, and one to copy to."""


def as_mocker(config: EngineConfig) -> bool:
    """Return true if passes are formed, and blocks cached, as in Dynamo's mocker."""
    return config.role != "both" or (config.sglang is not None and config.sglang.books_sampled)


def windows_of(config: EngineConfig) -> list[GroupSpec]:
    """Return the groups of sliding windows."""
    return [spec for spec in config.specs if spec.attention.is_window]


def states_of(config: EngineConfig) -> list[GroupSpec]:
    """Return the groups of recurrent layers."""
    return [spec for spec in config.specs if spec.is_state]


def tree(config: EngineConfig) -> TreeSettings | None:
    """Return the radix tree; ``None`` where blocks are cached as vLLM's. With windows, the memory of all blocks is divided."""
    if as_mocker(config):
        return None
    settings, blocks = config.sglang or SglangSettings(), config.num_gpu_blocks
    given = TreeSettings(settings.radix_eviction_policy, blocks)
    if states_of(config):
        slots = settings.max_mamba_cache_size or states_needed(config)
        given = given._replace(states=slots, tracking=_tracking(config))
    if windows_of(config):
        return _with_windows(config, settings, given)
    if states_of(config):
        return given
    plain = config.eviction == "lru" and not config.heed_hints and config.enable_prefix_caching
    if not plain:
        return None
    prefetch = _prefetch(settings) if config.tiers is not None and len(config.tiers.tiers) > 1 else None
    return given._replace(host_pages=_host_blocks(config), prefetch=prefetch)


def _prefetch(settings: SglangSettings) -> PrefetchRules:
    return PrefetchRules(
        settings.hicache_storage_prefetch_policy,
        settings.prefetch_threshold,
        settings.prefetch_timeout_base,
        settings.prefetch_timeout_per_ki_token,
        settings.hicache_storage_prefetch_retry_poll_interval,
        settings.hicache_storage_prefetch_retry_max_attempts,
    )


def _with_windows(config: EngineConfig, settings: SglangSettings, given: TreeSettings) -> TreeSettings:
    windows = windows_of(config)
    ratio, page = settings.swa_full_tokens_ratio, windows[0].block_size
    share = len(config.specs) - len(windows) - len(states_of(config)) + ratio * len(windows)
    pages = int(config.num_gpu_blocks / share + ROUNDING)
    assert windows[0].window is not None
    window_pages = int(pages * page * ratio) // page
    given = given._replace(pages=pages, window=windows[0].window - 1, window_pages=window_pages)
    if config.tiers is None:
        return given
    host_pages = max(1, int(_host_blocks(config) / share + ROUNDING))
    # SGLang multiplies both pools by one ratio, and adds a page to each.
    below = ((host_pages - 1) * page + 0.5) / (pages * page)
    return given._replace(host_pages=host_pages, window_host_pages=int(window_pages * page * below) // page + 1)


def _host_blocks(config: EngineConfig) -> int:
    """Return blocks that host memory has room for, if there is any."""
    if config.tiers is None or config.bytes_per_block is None:
        return 0
    return config.tiers.tiers[0].capacity(config.bytes_per_block)


def _tracking(config: EngineConfig) -> StateTracking | None:
    """Return positions of states inside requests, if there is an extra buffer for them."""
    settings = config.sglang or SglangSettings()
    if settings.mamba_radix_cache_strategy == "no_buffer" or not config.enable_prefix_caching:
        return None
    page, lazy = config.block_groups[0].block_size, settings.mamba_radix_cache_strategy == "extra_buffer_lazy"
    grid = lcm(max(STATE_CHUNK, page), page)
    return StateTracking(
        2 if config.decides_ahead and not lazy else 1,
        grid,
        lcm(grid, settings.mamba_track_interval),
        noted=lazy or config.speculative is not None,
        lazy=lazy,
    )


def states_needed(config: EngineConfig) -> int:
    """Return slots that all requests need at once, each with one that it goes on from and one to copy to."""
    tracking = _tracking(config)
    return config.max_num_seqs * (STATES_PER_REQUEST + (tracking.slots if tracking is not None else 0))


def draft_slots(config: EngineConfig) -> DraftSlots | None:
    """Return slots for drafts: twice what a pass writes, since with overlap it isn't known yet what the one before kept."""
    if config.speculative is None:
        return None
    settings, page = config.sglang or SglangSettings(), config.block_groups[0].block_size
    steps, branches = config.speculative.num_speculative_tokens, settings.speculative_eagle_topk
    width = settings.speculative_num_draft_tokens or steps + 1
    written = steps * branches
    if page > 1 and branches > 1:
        # Each branch begins with a copy of the page that it continues.
        written = ceil_div(page - 1 + steps, page) * page * branches
    return DraftSlots(width, 2 * max(written, width))
