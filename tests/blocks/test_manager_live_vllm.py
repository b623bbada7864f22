"""Our manager against a vLLM that runs right here: random configurations and walks that nobody has recorded.

Needs vLLM (``make peers``); the oracle drives it by operations on stdin. Golden logs hold
for what was recorded; this asks new questions. KVYARD_LIVE_SEED (default 0) chooses which.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.blocks.record_golden import Walker
from tests.blocks.walks import difference, draw_family
from tests.peers import VLLM_ORACLE, peer_python, why_not

from kvyard.lab.conform import Replayer
from kvyard.lab.conform.log import ABOUT_VLLM

PYTHON = peer_python("vllm")
SEED = int(os.environ.get("KVYARD_LIVE_SEED", "0"))

Operation = dict[str, Any]


class VllmRaised(Exception):
    """vLLM failed half-way through an allocation that we refused. It is of no use after that."""


class Live:
    """vLLM and ours behind one ``apply``; the walk sees vLLM's answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.ours: Replayer | None = None
        self.operations: list[Operation] = []

    def vllm(self, op: Operation) -> Operation:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(op) + "\n")
        self.process.stdin.flush()
        answer: Operation = json.loads(self.process.stdout.readline())
        return answer

    def apply(self, op: Operation) -> Operation:
        self.operations.append(op)
        answer = self.vllm(op)
        if op["op"] == "config":
            assert "error" not in answer, (op, answer)
            self.ours = Replayer(op)
            expected = {name: value for name, value in answer.items() if name not in ABOUT_VLLM}
            assert expected == self.ours.configured()
            return answer
        assert self.ours is not None
        ours = json.loads(json.dumps(self.ours.apply(op)))
        self.ours.manager.check_integrity()
        if "error" in answer:
            assert "Cannot get" in answer["error"] and ours["allocated"] is False, (
                self.operations[0],
                op,
                answer,
                ours,
            )
            raise VllmRaised
        assert answer == ours, f"{self.operations[0]}\n{self.operations[-8:]}\n{difference(answer, ours)}"
        return answer


@pytest.fixture(scope="module")
def vllm() -> Iterator[subprocess.Popen[str]]:
    if PYTHON is None:
        pytest.skip(why_not("vllm"))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [PYTHON, VLLM_ORACLE], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    )
    with process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_walks_that_nobody_recorded(vllm: subprocess.Popen[str], part: int) -> None:
    """Half of them over tight pools with aligned states and many drafts, where predictions are at their worst."""
    done = 0
    for number in range(30):
        rng = random.Random(f"{SEED}/{part}/{number}")
        family = draw_family(rng.choice)
        if part % 2:
            while not any(group.get("mode") == "align" for group in family.config["groups"]):
                family = draw_family(rng.choice)
            family.config["num_blocks"] = rng.choice([8, 10, 12, 14, 18]) + 4 * len(family.config["groups"])
            family.drafts, family.lookahead = rng.choice([4, 8, 12]), rng.choice([4, 8, 16])
            family.reserve, family.overlap = rng.choice([0, 0.3, 0.6]), 0
        try:
            for _ in Walker(Live(vllm).apply, family, number).run(40):
                pass
            done += 1
        except VllmRaised:
            pass
    assert done > 20, "vLLM raised in most of the walks: that compares little"
