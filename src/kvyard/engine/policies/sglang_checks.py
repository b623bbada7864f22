"""Checks of settings for SGLang as a backend: those that SGLang refuses, and those that aren't modelled."""

import msgspec

from kvyard.blocks.spec import ConfigError
from kvyard.engine.config import EngineConfig
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_tree import as_mocker, draft_slots, states_needed, states_of, tree, windows_of
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
MOCKER_READS = (
    "schedule_policy",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "clip_max_new_tokens",
    "schedule_conservativeness",
    "books_sampled",
)
"""Settings that the mocker's rules read; they know the policies fifo and lpm."""


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what it isn't modelled with."""
    if config.speculative is not None:
        _check_drafts(config)
        config = msgspec.structs.replace(config, speculative=None)
    else:
        _refuse_settings(config, "speculative", "draft tokens: give num_speculative_tokens, too")
    _check_groups(config)
    if states_of(config):
        _check_states(config)
    else:
        _refuse_settings(config, "mamba", "models with states of recurrent layers: leave it out")
    if config.tiers is None or len(config.tiers.tiers) == 1:
        _refuse_settings(config, "prefetch_", "storage behind host memory: give a second tier, too")
    config.refuse(UNUSED)
    given = config.sglang or SglangSettings()
    given.check(config.specs[0].block_size)
    if as_mocker(config):
        _check_mocker(given)
    elif "radix_eviction_policy" in _changed(config) and tree(config) is None:
        raise ConfigError(
            "sglang.radix_eviction_policy is for a cache with eviction lru, prefix caching and no hints: leave one of them out"
        )


def _changed(config: EngineConfig) -> list[str]:
    """Return names of SGLang's settings that have other values than by default."""
    given, usual = config.sglang or SglangSettings(), SglangSettings()
    return [name for name in given.__struct_fields__ if getattr(given, name) != getattr(usual, name)]


def _refuse_settings(config: EngineConfig, part: str, purpose: str) -> None:
    """Raise ``ConfigError`` if a setting was given whose name contains ``part``: it is for something that isn't there."""
    unused = next((name for name in _changed(config) if part in name), None)
    if unused is not None:
        raise ConfigError(f"sglang.{unused} is for {purpose}")


def _check_mocker(given: SglangSettings) -> None:
    usual = SglangSettings()
    name = next(
        (
            name
            for name in given.__struct_fields__
            if name not in MOCKER_READS and getattr(given, name) != getattr(usual, name)
        ),
        None,
    )
    if name is None and given.chunked_prefill_size == -1:
        name = "chunked_prefill_size"
    if name is None and given.schedule_policy not in ("fifo", "lpm"):
        name = "schedule_policy"
    if name is not None:
        raise ConfigError(
            f"sglang.{name} is {getattr(given, name)!r}, which workers with roles and books_sampled can't have: leave it out"
        )


def _check_drafts(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for drafts that SGLang, or its model here, can't have."""
    drafts, settings = config.speculative, config.sglang or SglangSettings()
    assert drafts is not None
    if as_mocker(config):
        raise ConfigError("workers with roles and books_sampled are modelled without draft tokens: leave them out")
    if config.enable_prefix_caching and tree(config) is None:
        raise ConfigError("draft tokens with backend sglang need its radix tree: eviction lru, and no hints")
    if settings.enable_mixed_chunk and not drafts.eagle:
        raise ConfigError(
            "SGLang turns enable_mixed_chunk off with drafters other than EAGLE: leave it out, or set eagle to true"
        )
    slots = draft_slots(config)
    assert slots is not None
    if states_of(config) and settings.mamba_track_interval < slots.width:
        raise ConfigError(
            f"sglang.mamba_track_interval ({settings.mamba_track_interval}) must be at least the {slots.width} tokens that a "
            "request verifies in a pass"
        )
    steps, width = drafts.num_speculative_tokens, settings.speculative_num_draft_tokens
    if width is not None and width < 2:
        raise ConfigError(f"sglang.speculative_num_draft_tokens must be at least 2, got {width}")
    if width is not None and settings.speculative_eagle_topk == 1 and width != steps + 1:
        raise ConfigError(
            f"SGLang verifies {steps + 1} tokens with {steps} drafts in a row, not {width}: leave out "
            "sglang.speculative_num_draft_tokens, or set sglang.speculative_eagle_topk"
        )


def _check_groups(config: EngineConfig) -> None:
    """Raise ``ConfigError`` unless there is full attention, with or without sliding windows of one size."""
    windows, states = windows_of(config), states_of(config)
    if config.tiers is not None:
        if states:
            raise ConfigError("backend sglang isn't modelled with states in host memory: leave out lower tiers")
        if tree(config) is None or not config.enable_prefix_caching:
            raise ConfigError(
                "lower tiers with backend sglang are HiCache's: they need prefix caching and eviction lru, and neither hints "
                "nor roles nor books_sampled"
            )
        check_hicache(config.tiers)
        if windows and len(config.tiers.tiers) > 1:
            raise ConfigError("backend sglang isn't modelled with storage behind the host beside sliding windows")
        if windows and config.tiers.policy == "on_eviction":
            raise ConfigError(
                "with sliding windows, backend sglang is modelled with write_through and after_hits: with write_back, SGLang "
                "0.5.23 itself can stop with requests that it never runs"
            )
        config = msgspec.structs.replace(config, tiers=None)
    if not windows and not states:
        config.check_plain_model()
        return
    full = [spec for spec in config.specs if spec not in windows and spec not in states]
    if not full or not all(spec.is_full for spec in full):
        raise ConfigError(
            "backend sglang is modelled for full attention, with or without sliding windows and states of recurrent layers "
            "beside it"
        )
    if as_mocker(config):
        raise ConfigError("workers with roles and books_sampled are modelled for one group of full attention")
    if config.eviction != "lru" or config.heed_hints:
        beside = "sliding windows" if windows else "states"
        raise ConfigError(f"with {beside}, backend sglang evicts by sglang.radix_eviction_policy and heeds no hints")
    config.check_no_extras()
    if windows:
        _check_windows(config)


def _check_windows(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for sliding windows that SGLang can't have, or that have no room."""
    windows, states = windows_of(config), states_of(config)
    if len({spec.window for spec in windows}) > 1:
        raise ConfigError("backend sglang has windows of one size: SGLang keeps one sliding_window_size for a model")
    if len({spec.block_size for spec in config.specs if spec not in states}) > 1:
        raise ConfigError("backend sglang has one page size: give all groups the same block_size")
    given = tree(config)
    assert given is not None
    page, window = windows[0].block_size, ceil_div(windows[0].window or 1, windows[0].block_size)
    if given.window_pages < 2 * window + 2:
        raise ConfigError(
            f"sglang.swa_full_tokens_ratio leaves {given.window_pages * page} window tokens, too few for two windows of "
            f"{windows[0].window}: raise it, or num_gpu_blocks"
        )


def _check_states(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what SGLang refuses with states, and for what isn't modelled with them."""
    settings, page = config.sglang or SglangSettings(), config.block_groups[0].block_size
    if settings.mamba_radix_cache_strategy != "no_buffer":
        _check_tracking(config, settings, page)
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
    slots, needed = settings.max_mamba_cache_size, states_needed(config)
    if slots is not None and slots < needed:
        raise ConfigError(
            f"sglang.max_mamba_cache_size is {slots}, too few for {config.max_num_seqs} requests: give {needed}, or lower "
            "max_num_seqs"
        )


def _check_tracking(config: EngineConfig, settings: SglangSettings, page: int) -> None:
    """Raise ``ConfigError`` for states inside requests that SGLang can't keep."""
    interval = settings.mamba_track_interval
    if interval < 1 or interval % page:
        raise ConfigError(f"sglang.mamba_track_interval ({interval}) must be a multiple of the page size ({page})")
    if settings.mamba_radix_cache_strategy == "extra_buffer_lazy" and not config.decides_ahead:
        raise ConfigError(
            "SGLang's extra_buffer_lazy requires the overlap schedule: set async_scheduling to true, or "
            "sglang.mamba_radix_cache_strategy to extra_buffer"
        )
