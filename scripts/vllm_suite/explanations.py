"""Why tests of vLLM's don't pass here, or can't be asked: by what they say."""

from __future__ import annotations

import re

NOT_APPLICABLE = {
    r"LocalEntryNotFoundError|Cannot find an appropriate cached snapshot|offline mode": "needs a model from Hugging Face",
    r"LlavaProcessor|image processor": "processes an image, which needs torchvision",
    r"greater than the derived max_model_len": "needs the real model's configuration",
    r"CUDA|cuda|GPU|NVIDIA|Triton|triton": "needs a GPU",
}
"""With vLLM's own classes."""

FAILED = {
    r"UnsupportedError: .*MambaSpec": "prefill checkpoints of states (num_prefill_checkpoint_blocks): refused at start",
    r"UnsupportedError: .*shared-prefix checkpoints": "shared-prefix checkpoints of states: refused at start",
    r"UnsupportedError: .*CircularBufferSpec": "circular buffers: refused at start",
    r"UnsupportedError: .*prefill context parallelism": "prefill context parallelism: refused at start",
    r"UnsupportedError: .*residency metrics": "residency metrics: refused at start",
    r"UnsupportedError: .*role": "groups with a role (HiSparse): refused at start",
    r"UnsupportedError: .*works on vLLM's block pool": "a connector that works on vLLM's block pool itself: refused at start",
    r"UnsupportedError: .*replay windows": "windows that are computed again after a hit: refused at start",
    r"UnsupportedError: .*connectors for models with states": "connectors for models with states: refused at start",
    r"UnsupportedError": "settings that kvyard's manager has no rule for: refused at start",
    r"object has no attribute|Mapping.*does not support item|does not support item (assignment|deletion)": (
        "calls or changes a part of vLLM's manager that kvyard's doesn't have"
    ),
    r"enable_partial_hash_hits": "hits inside a block under decode context parallelism with states: not found, computed again",
}
"""With kvyard's."""

STATES_TO_CONNECTORS = (
    "states at block boundaries are handed to connectors: kvyard refuses connectors for models with states"
)
CHANGES_A_COPY = "changes a part of vLLM's manager of which kvyard shows a copy"
BY_NAME = {
    "test_finished_partial_tail_uses_table_source_once": STATES_TO_CONNECTORS,
    "test_boundary_state_offloads_block_aligned_prompt": STATES_TO_CONNECTORS,
    "test_boundary_state_offer_includes_more_mamba_groups_than_two": STATES_TO_CONNECTORS,
    "test_boundary_states_offered_past_prompt_for_resumed_prefill": STATES_TO_CONNECTORS,
    "test_retention_snapshots_handed_off_with_exact_block_ids": STATES_TO_CONNECTORS,
    "test_snapshot_handoff_dense_default_retention": STATES_TO_CONNECTORS,
    "test_mamba_boundary_handoffs_do_not_pin_obsolete_blocks": STATES_TO_CONNECTORS,
    "test_eagle_with_sliding_window": CHANGES_A_COPY,
    "test_prefill_hybrid_model": CHANGES_A_COPY,
    "test_pure_swa_retention_interval_caches_sparse_tails": "asks for the class of vLLM's coordinator",
    "cross_attn": "looks for vLLM's class for cross-attention",
}
"""Known by the test's name, where what it says isn't enough."""


def explain(test: str, reason: str) -> str | None:
    """Why ``test`` didn't pass, if ``reason`` is a known one."""
    for name, why in BY_NAME.items():
        if name in test:
            return why
    for known in (FAILED, NOT_APPLICABLE):
        for pattern, why in known.items():
            if re.search(pattern, reason, re.DOTALL):
                return why
    return None
