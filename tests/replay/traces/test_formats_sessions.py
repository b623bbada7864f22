"""Traces of sessions: OpenTelemetry, TraceLab, RAGPulse, multi-round-qa, BLIS. What prompts share, who waits for whom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.replay.traces.support import SAMPLES, jsonl

from kvyard.replay.traces import TraceError, TraceRequest, open_trace

S = 1_000_000_000


def read(name: str, **options: Any) -> list[TraceRequest]:
    return list(open_trace(SAMPLES / name, **options))


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Blocks that two prompts share, front to back."""
    assert one.ids is not None and other.ids is not None
    return sum(1 for a, b in zip(one.ids, other.ids, strict=False) if a == b)


def test_otel_conversations_sub_agents_and_tools() -> None:
    found = {one.id: one for one in read("otel.jsonl")}
    assert list(found) == ["c0", "d0", "d1", "c1", "c2", "e0"]
    assert [(one.session, one.root) for one in found.values()] == [
        ("conv", None),
        ("conv/B", "conv"),
        ("conv/B", "conv"),
        ("conv", None),
        ("conv", None),
        ("t3", None),
    ]
    assert [one.after for one in found.values()] == [(), ("c0",), (), ("d1",), (), ()]
    assert [one.delay for one in found.values()] == [None, S, S, 2.5 * S, 60 * S, None]
    assert [one.tool_call for one in found.values()] == [True, False, False, False, False, False]
    assert shared(found["c0"], found["c1"]) == 4 and shared(found["d0"], found["d1"]) == 1
    assert shared(found["c1"], found["c2"]) == 2, "a shorter prompt shares what was found cached"
    assert shared(found["c0"], found["e0"]) == 2, "equal system instructions of 640 bytes"
    assert found["e0"].arrival == 75 * S, "since the first call"


def test_otel_says_what_it_leaves_out() -> None:
    trace = open_trace(SAMPLES / "otel.jsonl")
    assert len(list(trace)) == 6
    assert dict(trace.tally.left_out) == {
        "spans that call no model": 1,
        "calls that ended in an error": 1,
        "calls without token counts": 1,
    }


def plain_span(name: str, start: int, tokens: int, **fields: Any) -> dict[str, Any]:
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.output_tokens": 3,
    }
    times = {"start_time": f"2026-01-01T00:00:{start:02}Z", "end_time": f"2026-01-01T00:00:{start + 1:02}.5Z"}
    return {"span_id": name, "trace_id": "t", "attributes": attributes, **times, **fields}


def test_otel_plain_spans_as_lines_or_lists(tmp_path: Path) -> None:
    rows = [plain_span("a", 1, 70, session_id="s"), plain_span("b", 5, 150, session_id="s")]
    lines = list(open_trace(jsonl(tmp_path / "t.jsonl", *rows)))
    listed = list(open_trace(jsonl(tmp_path / "u.jsonl", {"spans": rows})))
    assert [(one.session, one.delay) for one in lines] == [("s", None), ("s", 2.5 * S)]
    assert [one.ids for one in lines] == [one.ids for one in listed]


def test_otel_parents_in_a_ring_or_a_long_chain(tmp_path: Path) -> None:
    ring = [plain_span("a", 1, 70, parent_id="b"), plain_span("b", 2, 70, parent_id="a")]
    assert len(list(open_trace(jsonl(tmp_path / "ring.jsonl", *ring)))) == 2
    chain = [plain_span(str(n), 1, 70, parent_id=str(n + 1)) for n in range(20_000)]
    chain[-1]["attributes"] = {**chain[-1]["attributes"], "gen_ai.conversation.id": "top"}
    found = list(open_trace(jsonl(tmp_path / "chain.jsonl", *chain)))
    assert {one.session for one in found} == {"top"}


def test_tracelab_rounds() -> None:
    found = {one.id: one for one in read("tracelab.jsonl")}
    assert list(found) == ["a0", "a1", "b0", "a2"], "by their start"
    assert [one.delay for one in found.values()] == [None, 2 * S, None, 60 * S]
    assert [one.arrival for one in found.values()] == [0, 5 * S, 10 * S, 66 * S]
    assert [one.tool_call for one in found.values()] == [True, False, False, False]
    assert shared(found["a0"], found["b0"]) == 4, "what was cached for both first rounds of a project"
    assert shared(found["a0"], found["a1"]) == 5, "a longer prompt goes on, though the provider had evicted it"
    assert shared(found["a1"], found["a2"]) == 2, "a shorter one shares what was cached"


def test_tracelab_csv_for_replays() -> None:
    found = read("tracelab_replay.csv")
    assert [(one.session, one.delay, one.input_length) for one in found] == [
        ("0", None, 200),
        ("0", 50_000_000, 300),
        ("1", None, 130),
    ]
    assert shared(found[0], found[1]) == 3 and shared(found[0], found[2]) == 0


def test_ragpulse_shares_to_the_token() -> None:
    first, reordered, other, again = (read("ragpulse")[index] for index in (0, 2, 1, 3))
    assert [one.id for one in read("ragpulse")] == ["1", "3", "2", "4"], "in order of time, which its rows aren't in"
    assert len(first.tokens or ()) == 57

    def common(one: TraceRequest, two: TraceRequest) -> int:
        assert one.tokens is not None and two.tokens is not None
        return next(n for n, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)) if a != b)

    assert common(first, reordered) == 21, "passages in another order share the system prompt only"
    assert common(first, other) == 44, "all but the question"
    assert common(first, again) == 42 and again.session == first.session and again.delay is None
    assert read("ragpulse/0_trace.jsonl") == read("ragpulse")


def test_multi_round_qa() -> None:
    found = read("multi_round_qa.csv")
    assert [(one.id, one.session, one.arrival, one.delay) for one in found] == [
        ("2", "1", 0, None),
        ("5", "2", 1 * S, None),
        ("3", "1", 3 * S, 2.5 * S),
        ("6", "2", 4 * S, 2.5 * S),
        ("4", "1", 10.25 * S, 6.25 * S),
    ]
    assert shared(found[0], found[2]) == 3 and shared(found[2], found[4]) == 3 and shared(found[0], found[1]) == 0


def test_blis_rounds_that_accumulate(tmp_path: Path) -> None:
    trace = open_trace(SAMPLES / "blis.csv")
    found = list(trace)
    assert [(one.id, one.input_length, one.session, one.delay) for one in found] == [
        ("0", 192, "s1", None),
        ("1", 198, None, None),
        ("2", 192 + 32 + 40, "s1", 2_500_000),
        ("3", 75, None, None),
    ]
    assert [one.arrival for one in found] == [0, 500_000, 8_000_000, 8_600_000]
    assert [one.tenant for one in found] == ["gold", "lead", "gold", "lead"] and found[1].lora == "ad"
    assert shared(found[0], found[1]) == 2 and shared(found[0], found[2]) == 3, "the prefix group; the prompt before"
    assert dict(trace.tally.left_out) == {"requests with status timeout": 1}
    shutil.copy(SAMPLES / "blis.csv", tmp_path)
    alone = list(open_trace(tmp_path / "blis.csv"))
    assert alone[2].input_length == 168 and shared(alone[0], alone[2]) == 2, "without a header, rounds are independent"


OTLP = {"traceId": "t", "spanId": "s", "startTimeUnixNano": "5", "endTimeUnixNano": "9", "attributes": []}


def otlp(**span: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{**OTLP, **span}]}]}]}


def called(**tokens: Any) -> list[dict[str, Any]]:
    values = {"gen_ai.operation.name": {"stringValue": "chat"}, "gen_ai.usage.output_tokens": {"intValue": 1}}
    return [{"key": key, "value": value} for key, value in {**values, **tokens}.items()]


def tokens(value: object) -> list[dict[str, Any]]:
    return called(**{"gen_ai.usage.input_tokens": value})


ROUND = json.loads((SAMPLES / "tracelab.jsonl").read_text().splitlines()[0])
RAG = json.loads((SAMPLES / "ragpulse" / "0_trace.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (otlp(startTimeUnixNano="soon"), "a span's time is 'soon'"),
        (otlp(endTimeUnixNano="1"), "span s ends before it starts"),
        (otlp(spanId=""), "a span without span_id"),
        (otlp(attributes=tokens({"intValue": "many"})), "intValue is 'many'"),
        (otlp(attributes=tokens({"stringValue": "many"})), "gen_ai.usage.input_tokens is 'many'"),
        (otlp(attributes=tokens({"intValue": 0})), "a prompt has at least one token"),
        (otlp(attributes=tokens({"intValue": 1 << 30})), "prefixes are worked out for at most"),
        ({**ROUND, "timing_events": []}, "timing_events has no times"),
        (
            {**ROUND, "timing_events": [{"event_type": "text", "timestamp": "noon"}]},
            "timing_events.timestamp is 'noon'",
        ),
        ({**ROUND, "input_tokens_total": 1 << 30}, "prefixes are worked out for at most"),
        ({**ROUND, "output_tokens": -1}, "output_tokens is -1"),
    ],
)
def test_bad_rows(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", row)
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    assert f"{path}, line 1: " in str(caught.value) and why in str(caught.value)
    with pytest.raises(TraceError, match="no requests in it"):
        list(open_trace(path, skip_bad=True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"input_length": 5}, "line 2: input_length is 5, and the prompt's parts have 50 tokens"),
        ({"input_length": 1 << 30}, "at most 4096 for the template"),
        ({"hash_ids": {"sys_prompt": [99]}}, "sys_prompt holds 99, of which no file"),
        ({"timestamp": "noon"}, "timestamp is 'noon'"),
    ],
)
def test_bad_rows_of_ragpulse(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "ragpulse", tmp_path / "t")
    jsonl(tmp_path / "t" / "0_trace.jsonl", RAG, {**RAG, **change})
    with pytest.raises(TraceError) as caught:
        list(open_trace(tmp_path / "t"))
    assert why in str(caught.value)
    assert len(list(open_trace(tmp_path / "t", skip_bad=True))) == 1


def test_ragpulse_without_its_lengths(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "ragpulse", tmp_path / "t")
    (tmp_path / "t" / "2_passages.jsonl").write_text('{"passage_id": 0, "token_length": -4}\n')
    with pytest.raises(TraceError, match=r"2_passages.jsonl, line 1: a row must have an id and a token_length from 0"):
        list(open_trace(tmp_path / "t"))
    (tmp_path / "t" / "2_passages.jsonl").unlink()
    with pytest.raises(TraceError, match=r"0_trace.jsonl: 2_passages.jsonl isn't beside it"):
        list(open_trace(tmp_path / "t"))


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("multi_round_qa.csv", "9,9,0,0,1,1,5.0,4.0", "finish_time is before launch_time"),
        ("multi_round_qa.csv", "9,9,0,0,,1,5.0,6.0", "user_id is empty"),
        ("multi_round_qa.csv", "1e9,9,0,0,1,1,5.0,6.0", "prefixes are worked out for at most"),
        ("tracelab_replay.csv", "0,3,-5,9,1,0", "prefix_len is -5"),
        ("tracelab_replay.csv", "0,3,5,9,1,-2", "tool_wait_after_ms is -2"),
    ],
)
def test_bad_rows_of_tables(name: str, row: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = (SAMPLES / name).read_text()
    path.write_text(f"{text}{row}\n")
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    assert f"{path}, line {len(text.splitlines()) + 1}: " in str(caught.value) and why in str(caught.value)
    assert len(list(open_trace(path, skip_bad=True))) == len(text.splitlines()) - 1
