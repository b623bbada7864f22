"""vLLM's CPU tier with kvyard's eviction policies: the same tokens, the same bytes, and the hits that were predicted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.real.cpu_tier import BLOCK_BYTES, conversations, expect, predict
from tests.real.engine import MODELS, ROOT

HERE = Path(__file__).parent
BLOCKS, HOST_BLOCKS, COUNT = 50, 150, 200
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def measured(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return vLLM's results on the same requests, without a tier and with one under several policies."""
    folder = tmp_path_factory.mktemp("tier")
    subprocess.run([vllm_python, ROOT / "scripts" / "tiny_models.py", MODELS], check=True)
    model = folder / "llama"
    model.mkdir()
    (model / "config.json").write_bytes((MODELS / "llama" / "config.json").read_bytes())
    requests = folder / "requests.jsonl"
    requests.write_bytes(b"\n".join(map(msgspec.json.encode, conversations(COUNT, 1))))
    jobs = []
    for policy in ("none", "lru", "kvyard-lru", "kvyard-priority"):
        extra: dict[str, Any] | None = None
        if policy != "none":
            extra = {
                "spec_name": "CopyOffloadingSpec",
                "spec_module_path": "kvyard.vllm.offloading",
                "cache_policy_module_path": "kvyard.vllm.eviction",
                "eviction_policy": policy,
                "cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES,
                "verify_bytes": True,
            }
        jobs.append(
            {
                "model": str(model),
                "requests": str(requests),
                "blocks": BLOCKS + 1,
                "wave": 1,
                "extra": extra,
                "out": str(folder / f"{policy}.json"),
            }
        )
    (folder / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([vllm_python, HERE / "run_cpu_tier.py", folder / "jobs.json"], env=ENVIRONMENT, check=True)
    return {Path(job["out"]).stem: json.loads(Path(job["out"]).read_text()) for job in jobs}


def found(result: dict[str, Any]) -> list[tuple[int, int]]:
    """Tokens that each request found on the device and in the host."""
    return [(row["cached"] - row["loaded"], row["loaded"]) for row in result["rows"]]


def test_tokens_are_the_same_and_every_block_comes_back_as_it_was(measured: dict[str, dict[str, Any]]) -> None:
    plain = [row["tokens"] for row in measured["none"]["rows"]]
    changed, tried = measured["none"]["telling"]
    assert changed >= 0.7 * tried, "else equal tokens say nothing"
    for policy in ("lru", "kvyard-lru", "kvyard-priority"):
        result = measured[policy]
        assert result["chunks"] == HOST_BLOCKS
        assert [row["tokens"] for row in result["rows"]] == plain
        assert result["copies"]["verified"] == result["copies"]["loaded"] > 500
        assert [device for device, _ in found(result)] == [device for device, _ in found(measured["none"])]


def test_our_lru_is_vllms(measured: dict[str, dict[str, Any]], vllm_python: Path) -> None:
    assert found(measured["kvyard-lru"]) == found(measured["lru"])
    for seed in (1, 2):
        script = [vllm_python, HERE / "compare_policies.py", "30000", str(seed)]
        done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "30000 operations equal" in done.stdout and " 0 chunks" not in done.stdout


@pytest.mark.parametrize("order", ["lru", "priority"])
def test_hits_are_what_was_predicted(measured: dict[str, dict[str, Any]], order: str) -> None:
    """On the device to the token. In the host a few differ, and vLLM's rule for when a chunk counts as used explains each."""
    requests = conversations(COUNT, 1)
    ours = predict(requests, blocks=BLOCKS, host_blocks=HOST_BLOCKS, order=order)
    theirs = found(measured[f"kvyard-{order}"])
    device = [tokens for tokens, _ in theirs]
    assert expect(requests, device, host_blocks=HOST_BLOCKS, order=order) == theirs
    equal = sum(a == b for a, b in zip(ours, theirs, strict=False))
    promised, loaded = (sum(host for _, host in side) for side in (ours, theirs))
    print(f"\n{order}: {equal} of {COUNT} requests exact; {promised} tokens predicted from the host, {loaded} loaded")
    assert [device for device, _ in ours] == [device for device, _ in theirs]
    assert equal >= 0.93 * COUNT
    assert abs(promised - loaded) <= 0.05 * loaded


def test_the_priority_order_loads_more_where_requests_say_what_goes_on(measured: dict[str, dict[str, Any]]) -> None:
    lru, priority = (sum(host for _, host in found(measured[f"kvyard-{order}"])) for order in ("lru", "priority"))
    assert priority > 1.1 * lru
