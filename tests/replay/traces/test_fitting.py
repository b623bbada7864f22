"""A workload fitted to a trace generates traces with its statistics."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from tests.replay.traces.support import SAMPLES

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.agents import AgentWorkload, generate_agents
from kvyard.replay.traces.fitting import AgentFigures, AgentSamples, table
from kvyard.replay.traces.laws import number_law

LOOSE = {"sessions", "sub_agents", "agent_turns", "restarts", "think_p50", "think_mean", "tool_mean"}
"""Figures of few samples or heavy tails."""


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tree": "1x4096", "turns": "fixed:30", "tools": 0.95, "sub_agents": 0.0, "restarts": 0.0},
        {"tree": "", "output": "fixed:50", "growth": "uniform:100,5000", "restarts": 0.08, "context": 50_000},
    ],
)
def test_a_fitted_trace_has_the_given_ones_statistics(given: dict[str, object]) -> None:
    trace = generate_agents(AgentWorkload(requests=6000, seed=11, **given))
    samples = AgentSamples(trace)
    wanted = samples.figures()
    fitted = AgentSamples(generate_agents(replace(samples.workload(), seed=12))).figures()
    for name in AgentFigures.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(wanted, name), rel=0.35 if name in LOOSE else 0.15), name


def test_a_fit_recovers_the_generated_workload() -> None:
    workload = AgentWorkload(
        requests=4000,
        turns="fixed:20",
        growth="fixed:700",
        tool_time="fixed:3",
        tools=1.0,
        restarts=0.0,
        tree="1x6400",
        first="fixed:300",
        arrivals="constant:2",
        sub_agents=0.0,
    )
    fitted = AgentSamples(generate_agents(workload)).workload()
    assert set(fitted.turns.removeprefix("table:").split(",")) == {"20"}
    assert set(fitted.growth.removeprefix("table:").split(",")) == {"700"}
    assert set(fitted.tool_time.removeprefix("table:").split(",")) == {"3"}
    assert (fitted.tools, fitted.restarts, fitted.sub_agents, fitted.tree) == (1.0, 0.0, 0.0, "1x6400")
    assert fitted.arrivals == "gamma:rate=2,cv=0.01"


def test_a_table_has_the_mean_and_the_percentiles_of_what_it_was_made_of() -> None:
    drawn = random.Random(4)
    values = [drawn.lognormvariate(3, 2) for _ in range(5_000)]
    numbers = [float(one) for one in table(values).removeprefix("table:").split(",")]
    assert len(numbers) == 100
    assert sum(numbers) / 100 == pytest.approx(sum(values) / len(values), rel=1e-4)
    ordered = sorted(values)
    assert all(ordered[50 * part] <= numbers[part] <= ordered[50 * part + 49] * 1.0001 for part in range(100))
    law = number_law(table(values), "x")
    assert {law(drawn) for _ in range(50)} <= set(numbers)


def test_the_sample_of_weka_can_be_fitted() -> None:
    samples = AgentSamples(open_trace(SAMPLES / "weka_sessions.jsonl.xz"))
    wanted = samples.figures()
    assert (wanted.sessions, wanted.requests) == (1, 53)
    assert len(list(generate_agents(samples.workload()))) == 53


@pytest.mark.parametrize(
    ("name", "why"), [("mooncake_synthetic.jsonl", "has no session"), ("burstgpt_sessions.csv", "has no ids")]
)
def test_traces_that_agents_cannot_be_fitted_to(name: str, why: str) -> None:
    with pytest.raises(KvyardError, match=why):
        AgentSamples(open_trace(SAMPLES / name))
