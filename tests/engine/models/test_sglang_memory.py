"""SGLang's memory against what it logged as it started (shared/published/start_logs.csv, rows 76 and 124)."""

from __future__ import annotations

import pytest

from kvyard.engine.models.memory import GIB
from kvyard.engine.models.sglang_memory import static_share
from kvyard.replay.settings import make_config


def tokens(**settings: object) -> int:
    """Tokens of one worker's cache."""
    return make_config({"backend": "sglang", "workers": 1, **settings}).workers[0].engine.capacity_tokens


def test_the_default_share_leaves_what_sglang_left() -> None:
    # 275.75 GB free on a Blackwell card, chunks of 16,384: 25.28 GB were left beside weights and cache.
    assert (1 - static_share(int(275.75 * GIB), 16384, 1)) * 275.75 == pytest.approx(25.28, rel=0.02)


def test_a_large_card_keeps_ten_gibibytes_at_least() -> None:
    assert static_share(80 * GIB, 2048, 1) == pytest.approx(0.875)
    assert static_share(40 * GIB, 2048, 1) > static_share(40 * GIB, 8192, 1) > 0.6


def test_a_share_of_ones_own_is_of_weights_and_cache_alone() -> None:
    # Qwen3-235B in FP8 on 4 H100 at 0.93 had 367,404 tokens.
    given = tokens(model="qwen3-235b-a22b-fp8", gpu="h100", tensor_parallel_size=4, gpu_memory_utilization=0.93)
    assert given == pytest.approx(367_404, rel=0.05)


def test_a_card_alone_holds_as_much_as_its_runs_show() -> None:
    # Qwen3-32B on one H100 under 0.5.8: 16 requests in flight, of which five of 1,024 + 512 tokens ran and two of 2,048 + 512.
    assert 2 * (2048 + 512) < 5 * (1024 + 256) < tokens(model="qwen3-32b", gpu="h100") < 3 * (2048 + 512)


def test_the_default_depends_on_the_card_and_not_on_vllms_share() -> None:
    default = tokens(model="qwen3-32b", gpu="h100", tensor_parallel_size=2)
    assert default < tokens(model="qwen3-32b", gpu="h100", tensor_parallel_size=2, gpu_memory_utilization=0.9)
