"""SGLang as a backend: which queue, passes and tree its settings make, and what it is refused with."""

from math import lcm

import msgspec

from kvyard.blocks.spec import ConfigError, GroupSpec
from kvyard.blocks.state_slots import StateTracking
from kvyard.engine.config import EngineConfig
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads
from kvyard.engine.policies.backend import SchedulerBackend, TreeSettings
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mocker import MockerPasses, PrefixQueue
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_passes import SglangPasses
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.engine.queue import ArrivalQueue, Queue
from kvyard.integers import ceil_div
from kvyard.tiers.hicache import check as check_hicache

UNUSED = {
    "max_loras": "a limit of adapters per pass is modelled for vllm",
    "max_num_batched_tokens": "it has sglang.max_prefill_tokens and sglang.chunked_prefill_size",
    "long_prefill_token_threshold": "it has sglang.chunked_prefill_size",
    "long_prefill_token_threshold_adaptive": "it has sglang.chunked_prefill_size",
    "max_num_scheduled_tokens": "it has sglang.max_prefill_tokens and sglang.chunked_prefill_size",
    "enable_chunked_prefill": "it has sglang.chunked_prefill_size, which -1 turns off",
    "scheduling_policy": "it has sglang.schedule_policy",
    "preemption_mode": "it retracts the request with the least output",
    "scheduler_reserve_full_isl": "it admits by a budget of free tokens",
    "watermark": "it admits by a budget of free tokens",
}
ROUNDING = 1e-6
STATE_CHUNK = 64
"""Tokens between two states that kernels of recurrent layers produce."""
STATES_PER_REQUEST = 3
"""State slots for each request that may run: its own, the one that it goes on from, and one to copy to."""


def queue(config: EngineConfig) -> Queue:
    """Kept in the order in which it was last sorted; by arrival for the mocker's rules."""
    if _as_mocker(config):
        sorts = config.sglang is not None and config.sglang.schedule_policy == "lpm" and config.enable_prefix_caching
        return PrefixQueue() if sorts else ArrivalQueue()
    return WaitingQueue()


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """SGLang's own rules, or those of Dynamo's mocker."""
    loads = jobs.may_load and not isinstance(jobs.loads, TreeLoads)
    return MockerPasses(jobs, config) if loads or _as_mocker(config) else SglangPasses(jobs, config)


def _as_mocker(config: EngineConfig) -> bool:
    return config.role != "both" or (config.sglang is not None and config.sglang.books_sampled)


def tree(config: EngineConfig) -> TreeSettings | None:
    """The radix tree; ``None`` where blocks are cached as vLLM's. With windows, the memory of all blocks is divided."""
    if _as_mocker(config):
        return None
    settings, blocks = config.sglang or SglangSettings(), config.num_gpu_blocks
    windows = _windows(config)
    if windows:
        ratio, page = settings.swa_full_tokens_ratio, windows[0].block_size
        share = len(config.specs) - len(windows) + ratio * len(windows)
        pages = int(blocks / share + ROUNDING)
        assert windows[0].window is not None
        window_pages = int(pages * page * ratio) // page
        given = TreeSettings(settings.radix_eviction_policy, pages, windows[0].window - 1, window_pages)
        if config.tiers is None:
            return given
        host_pages = max(1, int(_host_blocks(config) / share + ROUNDING))
        # SGLang multiplies both pools by one ratio, and adds a page to each.
        below = ((host_pages - 1) * page + 0.5) / (pages * page)
        return given._replace(host_pages=host_pages, window_host_pages=int(window_pages * page * below) // page + 1)
    if _states(config):
        tracking = _tracking(config)
        slots = settings.max_mamba_cache_size or _states_needed(config)
        return TreeSettings(settings.radix_eviction_policy, blocks, states=slots, tracking=tracking)
    plain = config.eviction == "lru" and not config.heed_hints and config.enable_prefix_caching
    if not plain:
        return None
    return TreeSettings(settings.radix_eviction_policy, blocks, host_pages=_host_blocks(config))


def _host_blocks(config: EngineConfig) -> int:
    """Blocks that host memory has room for, if there is any."""
    if config.tiers is None or config.bytes_per_block is None:
        return 0
    return config.tiers.tiers[0].capacity(config.bytes_per_block)


def _tracking(config: EngineConfig) -> StateTracking | None:
    """Positions of states inside requests, if there is an extra buffer for them."""
    settings = config.sglang or SglangSettings()
    if settings.mamba_radix_cache_strategy != "extra_buffer" or not config.enable_prefix_caching:
        return None
    page = config.block_groups[0].block_size
    grid = lcm(max(STATE_CHUNK, page), page)
    return StateTracking(2 if config.decides_ahead else 1, grid, lcm(grid, settings.mamba_track_interval))


def _states_needed(config: EngineConfig) -> int:
    """Slots that all requests need at once, each with one that it goes on from and one to copy to."""
    tracking = _tracking(config)
    return config.max_num_seqs * (STATES_PER_REQUEST + (tracking.slots if tracking is not None else 0))


def _states(config: EngineConfig) -> list[GroupSpec]:
    """The groups of recurrent layers."""
    return [spec for spec in config.specs if spec.is_state]


def _windows(config: EngineConfig) -> list[GroupSpec]:
    """The groups of sliding windows."""
    return [spec for spec in config.specs if spec.attention.is_window]


MOCKER_READS = (
    "schedule_policy",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "clip_max_new_tokens",
    "schedule_conservativeness",
    "books_sampled",
)
"""Settings that the mocker's rules read; they know the policies fifo and lpm."""


def _check_groups(config: EngineConfig) -> None:
    """Raise ``ConfigError`` unless there is full attention, with or without sliding windows of one size."""
    windows = _windows(config)
    if _states(config):
        _check_states(config)
        return
    if config.tiers is not None:
        if tree(config) is None or not config.enable_prefix_caching:
            raise ConfigError(
                "lower tiers with backend sglang are HiCache's: they need prefix caching and eviction lru, and neither hints "
                "nor roles nor books_sampled"
            )
        check_hicache(config.tiers)
        if windows and config.tiers.policy == "on_eviction":
            raise ConfigError("with sliding windows, backend sglang is modelled with write_through and after_hits")
        config = msgspec.structs.replace(config, tiers=None)
    if not windows:
        config.check_plain_model()
        return
    full = [spec for spec in config.specs if spec not in windows]
    if not full or not all(spec.is_full for spec in full):
        raise ConfigError("backend sglang is modelled for full attention, with or without sliding windows beside it")
    if len({spec.window for spec in windows}) > 1:
        raise ConfigError("backend sglang has windows of one size: SGLang keeps one sliding_window_size for a model")
    if len({spec.block_size for spec in config.specs}) > 1:
        raise ConfigError("backend sglang has one page size: give all groups the same block_size")
    if _as_mocker(config):
        raise ConfigError("workers with roles and books_sampled are modelled for one group of full attention")
    if config.eviction != "lru" or config.heed_hints:
        raise ConfigError(
            "with sliding windows, backend sglang evicts by sglang.radix_eviction_policy and heeds no hints"
        )
    config.check_no_extras()
    given = tree(config)
    assert given is not None
    page, window = windows[0].block_size, ceil_div(windows[0].window or 1, windows[0].block_size)
    if given.window_pages < 2 * window + 3:
        raise ConfigError(
            f"sglang.swa_full_tokens_ratio leaves {given.window_pages * page} window tokens, too few for two windows of "
            f"{windows[0].window}: raise it, or num_gpu_blocks"
        )


def _check_states(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what SGLang refuses with states, and for what isn't modelled with them."""
    states, settings = _states(config), config.sglang or SglangSettings()
    full = [spec for spec in config.specs if spec not in states]
    if not full or not all(spec.is_full for spec in full):
        raise ConfigError("backend sglang is modelled for states beside full attention: leave out sliding windows")
    page = full[0].block_size
    if settings.mamba_radix_cache_strategy == "extra_buffer":
        if settings.mamba_track_interval < 1 or settings.mamba_track_interval % page:
            raise ConfigError(
                f"sglang.mamba_track_interval ({settings.mamba_track_interval}) must be a multiple of the page size ({page})"
            )
    elif page != 1:
        raise ConfigError(
            "SGLang caches states at the end of requests with pages of one token only: give full attention block_size 1, or "
            "set sglang.mamba_radix_cache_strategy to extra_buffer"
        )
    elif config.decides_ahead:
        raise ConfigError(
            "SGLang caches states at the end of requests without overlap only: set async_scheduling to false, or "
            "sglang.mamba_radix_cache_strategy to extra_buffer"
        )
    if _as_mocker(config):
        raise ConfigError("workers with roles and books_sampled are modelled for one group of full attention")
    if config.tiers is not None:
        raise ConfigError("backend sglang isn't modelled with states in host memory: leave out lower tiers")
    if config.eviction != "lru" or config.heed_hints:
        raise ConfigError("with states, backend sglang evicts by sglang.radix_eviction_policy and heeds no hints")
    config.check_no_extras()
    slots, needed = settings.max_mamba_cache_size, _states_needed(config)
    if slots is not None and slots < needed:
        raise ConfigError(
            f"sglang.max_mamba_cache_size is {slots}, too few for {config.max_num_seqs} requests: give {needed}, or lower "
            "max_num_seqs"
        )


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what it isn't modelled with."""
    _check_groups(config)
    config.refuse(UNUSED)
    given, usual = config.sglang or SglangSettings(), SglangSettings()
    given.check(config.specs[0].block_size)
    changed = [name for name in given.__struct_fields__ if getattr(given, name) != getattr(usual, name)]
    if _as_mocker(config):
        unread = [name for name in changed if name not in MOCKER_READS]
        if unread or given.schedule_policy not in ("fifo", "lpm") or given.chunked_prefill_size == -1:
            name = (
                unread[0]
                if unread
                else "chunked_prefill_size"
                if given.chunked_prefill_size == -1
                else "schedule_policy"
            )
            raise ConfigError(
                f"sglang.{name} is {getattr(given, name)!r}, which workers with roles and books_sampled can't have: "
                "leave it out"
            )
    elif not _states(config) and (unused := next((name for name in changed if "mamba" in name), None)):
        raise ConfigError(f"sglang.{unused} is for models with states of recurrent layers: leave it out")
    elif "radix_eviction_policy" in changed and tree(config) is None:
        raise ConfigError(
            "sglang.radix_eviction_policy is for a cache with eviction lru, prefix caching and no hints: leave one of them out"
        )


SGLANG = SchedulerBackend(block_size=1, check=check, queue=queue, policy=policy, spare_blocks=1, tree=tree)
