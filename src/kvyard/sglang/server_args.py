"""Arguments of an SGLang server that stand for the settings of a log."""

from __future__ import annotations

import json
from typing import Any

EVICTION_RATIO = 0.9
"""Share of its limit that a folder of files is emptied to: SGLang's default."""
BYTES_PER_TOKEN = 32
"""Of the keys and values that stand for a model's: one layer, one head of 8."""


def hicache_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a server with HiCache, if the log has it."""
    hicache = settings.get("hicache")
    if hicache is None:
        return {}
    # SGLang adds a page to what the ratio comes to.
    tokens = (hicache["host_pages"] - 1) * settings["page_size"]
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": (tokens + 0.5) / settings["num_tokens"],
        "hicache_size": 0,
        "hicache_write_policy": hicache["write_policy"],
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        **_storage_args(hicache.get("storage"), settings["page_size"]),
    }


def _storage_args(storage: dict[str, Any] | None, page: int) -> dict[str, Any]:
    """Return arguments of a server with files below HiCache's host memory, if the log has them."""
    if storage is None:
        return {}
    names = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")
    extra = {name: storage[name] for name in names}
    if storage["pages"] is not None:
        extra |= {"max_size": storage["pages"] * page * BYTES_PER_TOKEN, "eviction_ratio": EVICTION_RATIO}
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": storage["prefetch_policy"],
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "hicache_storage_prefetch_retry_poll_interval": storage["retry_poll_interval"],
        "hicache_storage_prefetch_retry_max_attempts": storage["retry_max_attempts"],
    }


def state_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a server whose model has states of recurrent layers, if the log has them."""
    names = ("max_mamba_cache_size", "mamba_radix_cache_strategy", "mamba_track_interval")
    return {name: settings[name] for name in names if name in settings}


def draft_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a server with draft tokens, if the log has them."""
    drafts = settings.get("speculative")
    if drafts is None:
        return {}
    return {f"speculative_{name}": value for name, value in drafts.items()}
