"""How many LoRA adapters a pass may have, and who overtakes because of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvyard.blocks.spec import ConfigError
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.timing import FixedTiming
from kvyard.engine.watcher import Watcher
from kvyard.hashing import Namespace, TokenChain, algorithm

MS = 1_000_000
CONFIG = EngineConfig(block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1), max_loras=1)


class Admissions(Watcher):
    """Who was admitted, in order, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        self.seen.append((job.id, now))


def job(name: str, adapter: str | None, answer: int = 3) -> Job:
    space = Namespace(lora_name=adapter)
    chain = TokenChain(list(range(20)), 16, algorithm("sha256_cbor"), space)
    return Job(name, chain, answer, sample=lambda low, high: [7] * (high - low))


def order(config: EngineConfig, rows: list[tuple[int, Job]], *, plans: bool) -> list[tuple[str, int]]:
    """Admissions of jobs that arrive at these instants."""
    watcher = Admissions()
    core = make_core(config, watcher=watcher, plans=plans)
    left = sorted(rows, key=lambda row: row[0])
    while left or core.next_decision() is not None:
        decision = core.next_decision()
        now = min(when for when in (decision, left[0][0] if left else None) if when is not None)
        core.advance(now)
        while left and left[0][0] == now:
            core.submit(left.pop(0)[1], now)
        core.begin(now)
        core.scheduler.check_integrity()
    return watcher.seen


@pytest.mark.parametrize("plans", [False, True])
def test_one_adapter_too_many_waits_and_those_behind_it_do_not(plans: bool) -> None:
    rows = [(0, job("a1", "a")), (0, job("b1", "b")), (0, job("a2", "a")), (0, job("plain", None)), (0, job("b2", "b"))]
    seen = order(CONFIG, rows, plans=plans)
    assert [name for name, _ in seen] == ["a1", "a2", "plain", "b1", "b2"]
    assert seen[2][1] == 0 and seen[3][1] > 0
    again = [(0, job(row.id, row.chain.namespace.lora_name)) for _, row in rows]
    both = order(replace(CONFIG, max_loras=2), again, plans=plans)
    assert [name for name, _ in both] == ["a1", "b1", "a2", "plain", "b2"]


@pytest.mark.parametrize("plans", [False, True])
def test_an_arrival_with_a_running_adapter_overtakes_a_waiting_one_and_cuts_the_plan(plans: bool) -> None:
    rows = [(0, job("a1", "a", 200)), (0, job("b1", "b")), (50 * MS + 1, job("a2", "a"))]
    seen = dict(order(CONFIG, rows, plans=plans))
    assert seen["a2"] == 51 * MS, "at the end of the pass in which it came"
    assert seen["b1"] > 200 * MS, "when no pass has the other adapter any more"


@pytest.mark.parametrize("backend", ["sglang", "trtllm"])
def test_max_loras_is_vllms_and_at_least_one(backend: str) -> None:
    with pytest.raises(ConfigError, match="max_loras is not a setting of backend"):
        EngineConfig(backend=backend, max_loras=2).check()
    with pytest.raises(ConfigError, match="at least 1"):
        EngineConfig(max_loras=0).check()
