"""Hints in traces: read, written, counted, refused by place, and made from the trace's own future."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvyard
from kvyard.blocks import Hints, Retention
from kvyard.clock import MS, SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces import Trace, TraceError, TraceRequest, open_trace
from kvyard.replay.traces.conversations import WAYS, conversations
from kvyard.replay.traces.hinting import parse_hints, with_hints
from kvyard.replay.traces.info import describe
from kvyard.replay.traces.writing import write_trace

ROOT = Path(__file__).resolve().parents[3]
CONVERSATION = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
WEKA = ROOT.parent / "shared" / "traces" / "weka" / "claude_code_710.jsonl.xz"


def lines(path: Path, *rows: dict[str, object]) -> Path:
    plain = {"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}
    path.write_text("".join(json.dumps(plain | row) + "\n" for row in rows))
    return path


SAID = (
    {"conversation": "a", "session_end": True},
    {"conversation": 7, "ttl": 1500},
    {"ttl": 2.5, "ttl_then": "first", "retention": 80},
    {"retention": [{"start": 4, "priority": 10, "duration": 30}], "tool_call": True},
    {},
)
MEANT = [
    Hints("a", session_end=True),
    Hints("7", ttl=1500 * MS),
    Hints("", ttl=2_500_000, ttl_then="first", retention=(Retention(0, None, 80),)),
    Hints("", retention=(Retention(4, None, 10, 30 * MS),)),
    Hints(),
]


def test_hints_are_read_and_written_again(tmp_path: Path) -> None:
    trace = open_trace(lines(tmp_path / "a.jsonl", *SAID))
    assert [one.hints for one in trace] == MEANT
    written = write_trace(trace, tmp_path / "b.jsonl")
    assert "hints are read by kvyard only" in written.notes
    again = open_trace(tmp_path / "b.jsonl")
    assert [(one.hints, one.tool_call) for one in again] == [(one.hints, one.tool_call) for one in trace]
    found = describe(again)
    assert found.hints == {"session end": 1, "time to live": 2, "retention priority": 2}
    assert found.tool_calls == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"session_end": 1}, "session_end"),
        ({"ttl": -5}, "ttl"),
        ({"ttl": 0}, "above 0"),
        ({"ttl": 5, "session_end": True}, "not both"),
        ({"ttl_then": "first"}, "without a ttl"),
        ({"ttl": 5, "ttl_then": "never"}, "ttl_then"),
        ({"retention": 101}, "0 to 100"),
        ({"conversation": 1.5}, "conversation"),
    ],
)
def test_malformed_hints_are_refused_by_place(tmp_path: Path, wrong: dict[str, object], why: str) -> None:
    trace = open_trace(lines(tmp_path / "a.jsonl", {}, wrong))
    with pytest.raises(TraceError, match=f"a.jsonl, line 2.*{why}"):
        list(trace)


def test_a_conversation_is_what_follows_the_last_block_that_many_share() -> None:
    # Everyone begins with 1, 2; conversation n goes on with 10 n, 10 n + 1, ... turn by turn.
    rows = [
        TraceRequest(f"r{n}.{turn}", 0, 64, 1, [1, 2, *range(10 * n, 10 * n + turn)], 16)
        for n in range(10, 10 + WAYS)
        for turn in (1, 2, 3)
    ]
    rows.append(TraceRequest("common", 0, 32, 1, [1, 2], 16))
    rows.append(TraceRequest("unknown", 0, 32, 1))
    names = conversations(rows)
    assert names[0] == names[1] == names[2] != names[3]
    assert len(set(names)) == WAYS + 2
    few = conversations(rows[: 3 * (WAYS - 1)])
    assert len(set(few)) == 1, "fewer ways than that are turns of one"


def test_sessions_are_conversations_where_there_are_any() -> None:
    rows = [TraceRequest(f"r{at}", 0, 32, 1, [1, 2], 16, session=f"s{at % 2}") for at in range(4)]
    assert conversations(rows) == ["s0", "s1", "s0", "s1"]


@pytest.fixture(scope="module")
def conversation() -> list[TraceRequest]:
    return list(open_trace(CONVERSATION))


def test_the_conversation_trace_has_as_many_as_were_counted_by_hand(conversation: list[TraceRequest]) -> None:
    """next.md, A.1: 7,373 of the 12,031 requests are the last of their conversation."""
    assert len(set(conversations(conversation))) == 7373


def test_recall_and_false_rate_are_what_was_asked_for(conversation: list[TraceRequest]) -> None:
    rows = conversation[:2000]
    trace = Trace("t", "mooncake", lambda tally: iter(rows))
    names = conversations(rows)
    last = set({name: at for at, name in enumerate(names)}.values())

    def said(spec: str, seed: int = 0) -> set[int]:
        return {at for at, one in enumerate(with_hints(trace, spec, seed)) if one.hints.session_end}

    half = said("session-end:recall=0.5,false=0.1")
    assert len(half & last) / len(last) == pytest.approx(0.5, abs=0.03)
    assert len(half - last) / (2000 - len(last)) == pytest.approx(0.1, abs=0.03)
    assert said("session-end") == last
    assert said("session-end:recall=0.25") < said("session-end:recall=0.5") < last, "nested"
    assert said("session-end:recall=0.5", 1) != said("session-end:recall=0.5") == said("session-end:recall=0.5")


def test_times_to_live_go_by_tool_calls_where_the_trace_knows_them() -> None:
    def rows(calls: bool) -> Trace:
        made = [TraceRequest(f"r{at}", 0, 9, 1, [at], 16, session="s", tool_call=calls and at == 1) for at in range(3)]
        return Trace("t", "", lambda tally: iter(made))

    def kept(calls: bool) -> list[int | None]:
        return [one.hints.ttl for one in with_hints(rows(calls), "ttl:seconds=2,then=first")]

    assert kept(True) == [None, 2 * SECOND, None]
    assert kept(False) == [2 * SECOND, 2 * SECOND, None], "else all whose session goes on"
    both = [one.hints for one in with_hints(rows(True), "session-end+ttl:seconds=2")]
    assert [(one.session_end, one.ttl) for one in both] == [(False, None), (False, 2 * SECOND), (True, None)]


def test_own_times_to_live_go_by_the_sessions_past_gaps() -> None:
    """A gap is known when it is over: the request that ends it is the first that may use it."""
    gaps = {"s": (None, 2, 5, 1, 8), "t": (None, 40, None)}
    rows = [
        TraceRequest(f"{name}{at}", 0, 9, 1, [at], 16, session=name, delay=None if gap is None else gap * SECOND)
        for name, own in gaps.items()
        for at, gap in enumerate(own)
    ]
    trace = Trace("t", "", lambda tally: iter(rows))

    def kept(text: str) -> list[float | None]:
        return [None if one.hints.ttl is None else one.hints.ttl / SECOND for one in with_hints(trace, text)]

    # Of each session the last request knows of no other.
    assert kept("own-ttl") == [None, 6, 15, 15, None, None, 120, None]
    assert kept("own-ttl:gaps=2,seconds=9") == [9, 4, 10, 10, None, 9, 80, None]
    assert kept("own-ttl:recall=0") == [None] * 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("own-ttl:gaps=0", "gaps is above 0"),
        ("session", "choose session-end or ttl"),
        ("session-end:recall=2", "0 to 1"),
        ("session-end:recal=1", "recall, false"),
        ("session-end:recall=much", "a number"),
        ("ttl", "for how long"),
        ("ttl:seconds=5,then=last", "ordinary or first"),
        ("session-end+session-end", "twice"),
    ],
)
def test_invalid_hints_are_refused(text: str, why: str) -> None:
    with pytest.raises(KvyardError, match=why):
        parse_hints(text)
    with pytest.raises(KvyardError, match=why):
        kvyard.replay([TraceRequest("a", 0, 10, 1)], hints=text)


def test_a_replay_uses_the_hints_of_a_trace_only_with_heed_hints(tmp_path: Path) -> None:
    rows = [{"timestamp": at * 1000, "input_length": 512, "hash_ids": [id_]} for at, id_ in enumerate((1, 2, 3, 4, 1))]
    rows[1]["session_end"] = True
    path = lines(tmp_path / "a.jsonl", *rows)
    settings = {"workers": 1, "block_size": 16, "num_gpu_blocks": 100}
    assert kvyard.replay(path, **settings).records[-1].cached < 256
    assert kvyard.replay(path, heed_hints=True, **settings).records[-1].cached == 496


def test_made_hints_gain_reuse_and_recall_0_changes_nothing() -> None:
    settings = {"workers": 1, "limit": 800, "num_gpu_blocks": 24576, "block_size": 64, "router": "round-robin"}
    plain = kvyard.replay(CONVERSATION, **settings).report
    none = kvyard.replay(CONVERSATION, hints="session-end:recall=0", **settings).report
    full = kvyard.replay(CONVERSATION, hints="session-end", **settings).report
    assert none.reuse["all"] == plain.reuse["all"]
    assert none.latency == plain.latency
    assert full.reuse["all"].value > 1.05 * plain.reuse["all"].value
    assert full.latency["ttft"].mean < plain.latency["ttft"].mean


@pytest.mark.slow
@pytest.mark.skipif(not WEKA.exists(), reason="the Weka sessions are not here (../shared/traces/weka)")
def test_wekas_sessions_know_their_tool_calls() -> None:
    assert describe(open_trace(WEKA, limit=5000), bounds=False).tool_calls > 2000
