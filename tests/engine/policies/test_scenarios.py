"""Tight spots, as NVIDIA Dynamo's mocker has them: to ten nanoseconds, since it adds up floats and we don't."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.engine.driving import Row, replay

from kvyard.engine.config import EngineConfig
from kvyard.engine.policies.settings import SglangSettings

SCENARIOS = json.loads((Path(__file__).parent / "data" / "scenarios.json").read_text())


def seen(log, count):
    """Per request: its admissions, its first token and its end."""
    found = []
    for name in (f"r{at}" for at in range(count)):
        entries = [[now, cached] for job, now, cached, _ in log.of("admitted") if job == name]
        first = next(end for job, _, end in log.of("produced") if job == name)
        last = next(now for job, now, *_ in log.of("ended") if job == name)
        found.append([entries, first, last])
    return found


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "single steps"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_the_mocker_has_it(name, plans):
    scenario = SCENARIOS[name]
    config = msgspec.convert(scenario["engine"], EngineConfig)
    if config.backend == "sglang":
        config = replace(config, sglang=replace(config.sglang or SglangSettings(), books_sampled=True))
    rows = [Row(arrival * 1_000_000, length, out, tuple(ids)) for arrival, length, out, ids in scenario["rows"]]
    found = seen(replay(config, rows, plans=plans), len(rows))
    for (entries, first, last), (peer_entries, peer_first, peer_last) in zip(found, scenario["peer"], strict=True):
        assert [cached for _, cached in entries] == [cached for _, cached in peer_entries]
        times, peer_times = [now for now, _ in entries], [now for now, _ in peer_entries]
        assert [*times, first, last] == pytest.approx([*peer_times, peer_first, peer_last], abs=10)
