"""Why tests of vLLM's don't pass here, or can't be asked: by what they say."""

from __future__ import annotations

import re

NOT_APPLICABLE = {
    r"LocalEntryNotFoundError|Cannot find an appropriate cached snapshot|offline mode": "needs a model from Hugging Face",
    r"LlavaProcessor|image processor": "processes an image, which needs torchvision",
    r"greater than the derived max_model_len": "needs the real model's configuration",
    r"does not support ray": "runs an engine by ray, which vLLM doesn't on CPU",
    r"Available memory on node": "starts an engine that wants half of this machine's memory",
    r"CUDA|cuda|GPU|NVIDIA|Triton|triton|accelerator device": "needs a GPU",
}
"""With vLLM's own classes."""

FAILED = {
    r"UnsupportedError: .*residency metrics": "residency metrics: refused at start",
    r"UnsupportedError: .*role": "groups with a role (HiSparse): refused at start",
    r"UnsupportedError: .*works on vLLM's block pool": "a connector that works on vLLM's block pool itself: refused at start",
    r"UnsupportedError: .*extra_retained_tokens=[1-9]": "windows with extra_retained_tokens: refused at start",
    r"UnsupportedError": "settings that kvyard's manager has no rule for: refused at start",
    r"object has no (attribute|setter)|Mapping.*does not support item|does not support item (assignment|deletion)": (
        "calls or changes a part of vLLM's manager that kvyard's doesn't have"
    ),
}
"""With kvyard's."""

BY_NAME = {
    "test_pure_swa_retention_interval_caches_sparse_tails": "asks for the name of vLLM's coordinator class",
    "test_block_stored_event_group_idx_out_of_bounds": "puts an event of a group that doesn't exist into vLLM's queue",
    "test_eagle_group_registers_unaligned_tail": "replaces a method of vLLM's group managers",
    "test_a_junction_past_the_prompt_falls_back": "calls a private method of vLLM's group manager",
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
