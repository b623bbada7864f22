"""The batcher beside the event manager of TensorRT-LLM's KV cache manager V2: events per window, as recorded from the original.

``scripts/compare_trtllm_events.py`` recorded ``data/trtllm_v2_events.jsonl`` (seeds 2001 to 2012) with the event manager of
15 July 2026, and asks it again if a checkout is given.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvyard.events.batcher import Batcher, Lane

RECORDED = Path(__file__).parent / "data" / "trtllm_v2_events.jsonl"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_trtllm_events.py"
WALKS: list[dict[str, Any]] = [json.loads(line) for line in RECORDED.read_text().splitlines()]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_trtllm_events", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differing(script: ModuleType) -> int:
    """Number of recorded walks in which the batcher's events differ from V2's."""
    different = 0
    for walk in WALKS:
        ours = script.by_kvyard(walk["windows"], walk["prompts"], walk["iterations"])
        fewer = all(len(mine) <= len(theirs) for mine, theirs in zip(ours, walk["events"], strict=True))
        different += not fewer or script.renumbered(ours) != script.renumbered(walk["events"])
    return different


def test_events_of_each_window_are_those_of_trtllm(script: ModuleType) -> None:
    assert len(WALKS) == 12
    assert sum(len(events) for walk in WALKS for events in walk["events"]) > 1000
    assert differing(script) == 0


def keeps_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of the same window doesn't end a batch of removals."""
    entered = Batcher.entered

    def late(self: Batcher, *args: Any) -> None:
        lanes = [(lane, lane.leaving) for lane in self._lanes]
        for lane in self._lanes:
            lane.leaving = None
        entered(self, *args)
        for lane, leaving in lanes:
            lane.leaving = leaving

    monkeypatch.setattr(Batcher, "entered", late)


def turns_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removals are announced in another order."""
    release = Batcher._release

    def turned(self: Batcher, lane: Lane) -> None:
        if lane.leaving is not None:
            lane.leaving.reverse()
        release(self, lane)

    monkeypatch.setattr(Batcher, "_release", turned)


@pytest.mark.source
@pytest.mark.parametrize("mistake", [keeps_removals, turns_removals])
def test_a_mistake_is_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    mistake(monkeypatch)
    assert differing(script) > 6
