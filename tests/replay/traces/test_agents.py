"""Generated agents: the same by seed, with the structure that was asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.replay.traces.test_formats import check_contract

from kvyard.errors import KvyardError
from kvyard.replay.traces.agents import AgentWorkload, generate_agents
from kvyard.replay.traces.request import TraceRequest


def made(**given: object) -> list[TraceRequest]:
    return list(generate_agents(AgentWorkload(**{"requests": 400, **given})))


def common(one: TraceRequest, other: TraceRequest) -> int:
    assert one.ids is not None and other.ids is not None
    return sum(1 for a, b in zip(one.ids, other.ids, strict=False) if a == b)


def sessions(requests: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    found: dict[str, list[TraceRequest]] = {}
    for request in requests:
        assert request.session is not None
        found.setdefault(request.session, []).append(request)
    return found


def test_equal_seeds_make_equal_traces() -> None:
    first = made(seed=3, rollouts="fixed:2", fork="geometric:3", sub_agents=0.1)
    assert first == made(seed=3, rollouts="fixed:2", fork="geometric:3", sub_agents=0.1)
    assert first != made(seed=4, rollouts="fixed:2", fork="geometric:3", sub_agents=0.1)
    assert len(first) == 400
    check_contract(first)


def test_one_law_leaves_the_numbers_of_others() -> None:
    plain, other = made(sub_agents=0.0), made(sub_agents=0.0, output="fixed:9")
    assert [one.input_length for one in plain] == [one.input_length for one in other]
    assert {one.output_length for one in other} == {9}


def test_skills_are_shared_by_those_who_load_them() -> None:
    found = made(turns="fixed:1", tree="1x640/3x128", first="fixed:100", sub_agents=0.0)
    shared = {common(one, other) for one in found[:40] for other in found[:40] if one is not other}
    assert shared == {10, 12}, "the system prompt, or the skill below it too; 64 tokens to a block"
    assert {one.input_length for one in found} == {868}


def test_tools_and_people_take_their_times() -> None:
    found = made(tools=0.5, tool_time="fixed:2", think="fixed:30", sub_agents=0.0)
    for turns in sessions(found).values():
        assert turns[0].delay is None
        for before, turn in pairwise(turns):
            assert turn.delay == (2 if before.tool_call else 30) * 1_000_000_000
    share = sum(one.tool_call for one in found) / 400
    assert 0.35 < share < 0.6


def test_the_next_turn_waits_for_all_sub_agents() -> None:
    found = made(sub_agents=0.3, fan_out="fixed:3", agent_turns="fixed:2", turns="fixed:5", agent_tree="1x640")
    lines = sessions(found)
    helpers = {name: turns for name, turns in lines.items() if turns[0].root is not None and len(turns) == 2}
    assert len(helpers) > 20
    joined = [one for one in found if len(one.after) == 3]
    for turn in joined:
        called = [next(turns for turns in helpers.values() if turns[-1].id == name) for name in turn.after]
        assert {turns[0].after for turns in called} == {called[0][0].after}
        assert {turns[0].root for turns in called} == {turn.session}
    assert len({common(one[0], other[0]) for one, other in pairwise(helpers.values())}) == 1, "one system prompt"


@pytest.mark.parametrize("fork", [1, 3])
def test_rollouts_sample_one_prompt_and_go_on_apart(fork: int) -> None:
    found = made(turns="fixed:5", rollouts="fixed:4", fork=f"fixed:{fork}", sub_agents=0.0, restarts=0.0, requests=340)
    lines = sessions(found)
    trunk = lines["s0"]
    assert len(trunk) == 5
    for number in (1, 2, 3):
        turns = lines[f"s0.{number}"]
        assert len(turns) == 6 - fork and turns[0].root == "s0"
        assert turns[0].ids == trunk[fork - 1].ids, "the very prompt"
        whole = trunk[fork - 1].input_length // 64
        if fork < 5:
            assert common(turns[1], trunk[fork]) == whole, "and no more"
        assert turns[0].after == (() if fork == 1 else (trunk[fork - 2].id,))
        assert turns[0].arrival == trunk[fork - 1].arrival


def test_contexts_are_rewritten_where_they_would_get_too_long() -> None:
    found = made(
        context=30_000, restart="fixed:12000", kept="fixed:8192", growth="fixed:2000", restarts=0.0, sub_agents=0.0
    )
    assert max(one.input_length for one in found) <= 30_000
    rewritten = [
        (before, turn)
        for turns in sessions(found).values()
        for before, turn in pairwise(turns)
        if turn.input_length < before.input_length
    ]
    assert rewritten and {common(*pair) for pair in rewritten} == {128}


def test_turns_and_first_prompts_in_pairs() -> None:
    found = made(paired=True, turns="table:1,4", first="table:900,200", tree="", sub_agents=0.0)
    kinds = {(len(turns), turns[0].input_length) for turns in list(sessions(found).values())[:-1]}
    assert kinds == {(1, 900), (4, 200)}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"requests": 0}, "requests must be at least 1"),
        ({"tools": 1.5}, "tools is a share of turns"),
        ({"tree": "1x300000"}, "shared prefixes of 300,000 tokens don't fit into a context of 200,000"),
        ({"agent_tree": "x"}, "agent_tree: 'x' is no level"),
        ({"context": 10**9}, "context must be at most"),
        ({"growth": "table:1,x"}, "growth: table takes numbers"),
        ({"growth": "table:-1"}, "growth: numbers of a table can't be negative"),
        ({"think": "empirical:f"}, "is for lengths only"),
        ({"paired": True}, "turns must be a table, as in table:3,5,9, not 'geometric:mean=20'"),
        ({"paired": True, "turns": "table:1", "first": "table:1,2"}, "turns has 1 numbers and first 2"),
        ({"tree": "9999999x1"}, "has more than 1,000,000 children"),
    ],
)
def test_workloads_that_make_no_sense(given: dict[str, object], why: str) -> None:
    with pytest.raises(KvyardError, match=why):
        made(**given)
