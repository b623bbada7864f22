"""``describe`` against the published figures of public traces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests.replay.traces.support import CONVERSATION, SAMPLES, SHARED, jsonl, mooncake

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe, spread

TABLE = {
    "conversation": (288_500, 182_790, [0.0445, 0.2112, 0.3257, 0.3546, 0.3637], 0.3664, 0.3736),
    "synthetic": (121_877, 43_924, [0.0825, 0.4235, 0.6242, 0.6396, 0.6396], 0.6396, 0.6512),
}


def check_table(path: Path, name: str) -> None:
    reuse = describe(open_trace(path)).reuse
    assert reuse is not None
    blocks, unique, recent, bound_blocks, bound_tokens = TABLE[name]
    assert (reuse.blocks, reuse.unique) == (blocks, unique)
    assert [one.blocks for one in reuse.capacities] == [1000, 10000, 30000, 50000, 100000]
    assert [round(one.lru, 4) for one in reuse.capacities] == recent
    assert (round(reuse.infinite_blocks, 4), round(reuse.infinite_tokens, 4)) == (bound_blocks, bound_tokens)
    assert all(one.belady >= one.lru for one in reuse.capacities)


def test_the_conversation_trace() -> None:
    check_table(CONVERSATION, "conversation")
    info = describe(open_trace(CONVERSATION), bounds=False)
    assert (info.requests, round(info.duration)) == (12_031, 3_537)
    assert (round(info.input.mean), round(info.output.mean)) == (12_035, 343)
    assert sum(info.arrivals) == 12_031
    assert sum(info.arriving_tokens) == info.input.total
    assert info.reuse is None


@pytest.mark.skipif(not SHARED.exists(), reason="no traces beside the repository")
def test_the_synthetic_trace() -> None:
    path = SHARED / "mooncake" / "synthetic_trace.jsonl"
    check_table(path, "synthetic")
    info = describe(open_trace(path), bounds=False)
    assert (info.requests, round(info.input.mean), round(info.output.mean)) == (3_993, 15_325, 149)


@pytest.mark.skipif(not SHARED.exists(), reason="no traces beside the repository")
@pytest.mark.parametrize(("name", "requests", "seconds"), [("conv", 19_366, 3_502), ("code", 8_819, 3_436)])
def test_the_azure_traces(name: str, requests: int, seconds: int) -> None:
    info = describe(open_trace(SHARED / "azure" / f"AzureLLMInferenceTrace_{name}.csv"))
    assert (info.requests, round(info.duration)) == (requests, seconds)
    assert info.reuse is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SHARED.exists(), reason="no traces beside the repository")
def test_the_weka_sessions() -> None:
    trace = open_trace(SHARED / "weka" / "claude_code_710.jsonl.xz")
    info = describe(trace)
    assert (info.requests, info.sessions) == (49_334, 710)
    assert (round(info.input.total / 1e9, 2), info.output.total // 10**6) == (6.04, 21)
    assert info.reuse is not None and info.reuse.median_session_tokens is not None
    assert round(info.reuse.infinite_tokens, 4) == 0.9632
    assert round(info.reuse.median_session_tokens, 4) == 0.9545
    # The published medians leave sub-agents out.
    agents = [request for request in trace if request.root is None]
    assert spread([request.input_length for request in agents]).p50 == 104_644
    assert spread([request.output_length for request in agents]).p50 == 216


def test_sessions_are_counted_with_their_sub_agents() -> None:
    info = describe(open_trace(SAMPLES / "weka_sessions.jsonl.xz"))
    assert (info.sessions, info.requests, info.waiting) == (1, 53, 52)
    assert info.rate is None
    assert info.think is not None and info.think.max == 363_593


def test_sub_agents_of_dynamo_are_counted_with_their_callers() -> None:
    assert describe(open_trace(SAMPLES / "dynamo_request_trace.jsonl.gz")).sessions == 2


def test_tokens_are_made_blocks_of() -> None:
    info = describe(open_trace(SAMPLES / "sharegpt_tokens.jsonl"), token_block=32)
    assert info.reuse is not None
    assert (info.reuse.block_size, info.reuse.blocks) == (32, 9 + 9 + 9)


def test_requests_without_ids_are_left_out_of_reuse(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(0, hash_ids=[1]), mooncake(1), mooncake(2, hash_ids=[1]))
    reuse = describe(open_trace(path)).reuse
    assert reuse is not None
    assert (reuse.unknown, reuse.blocks, reuse.infinite_blocks) == (1, 2, 0.5)


def test_the_curve_rises_to_the_bound() -> None:
    reuse = describe(open_trace(CONVERSATION, limit=1000)).reuse
    assert reuse is not None
    assert all(low <= high for (_, low), (_, high) in pairwise(reuse.curve))
    assert reuse.curve[-1][1] == reuse.best[-1][1] == reuse.infinite_blocks
    assert reuse.distances[-1][1] == 1


def test_ids_that_are_not_cumulative_are_refused_or_chained(tmp_path: Path) -> None:
    rows = [mooncake(i, 1024, hash_ids=ids) for i, ids in enumerate([[1, 2], [3, 2], [1, 2]])]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    with pytest.raises(KvyardError, match="--chain-ids"):
        describe(open_trace(path))
    reuse = describe(open_trace(path, chain_ids=True)).reuse
    assert reuse is not None
    assert (reuse.unique, reuse.blocks) == (4, 6)


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    info = describe(open_trace(jsonl(tmp_path / "t.jsonl", mooncake())))
    assert (info.rate, info.peak, info.burstiness, info.arrivals) == (None, None, None, [])
