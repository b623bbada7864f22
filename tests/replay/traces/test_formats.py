"""Each format's reader on a sample of it."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from tests.replay.traces.support import CONVERSATION, SAMPLES, jsonl, mooncake, plain

from kvyard.hashing import TraceChain
from kvyard.replay.traces import TraceError, TraceRequest, open_trace

S = 1_000_000_000


def read(name: str) -> list[TraceRequest]:
    return list(open_trace(SAMPLES / name))


@pytest.mark.parametrize(
    ("name", "format", "requests", "id_block_size", "has_prefixes", "has_sessions"),
    [
        ("azure_conv.csv", "azure", 5, 0, False, False),
        ("bailian.jsonl", "bailian", 5, 16, True, True),
        ("blis.csv", "blis", 4, 64, True, True),
        ("burstgpt.csv", "burstgpt", 4, 0, False, False),
        ("burstgpt_sessions.csv", "burstgpt", 4, 0, False, True),
        ("dynamo_request_trace.jsonl.gz", "dynamo", 17, 16, True, True),
        ("mooncake_synthetic.jsonl", "mooncake", 5, 512, True, False),
        ("multi_round_qa.csv", "multi_round_qa", 5, 64, True, True),
        ("otel.jsonl", "otel", 6, 64, True, True),
        ("plain.csv", "plain", 3, 0, False, False),
        ("plain.jsonl", "plain", 2, 0, False, False),
        ("ragpulse", "ragpulse", 4, 0, True, True),
        ("tracelab.jsonl", "tracelab", 4, 64, True, True),
        ("tracelab_replay.csv", "tracelab", 3, 64, True, True),
        ("sharegpt_tokens.jsonl", "sharegpt", 3, 0, True, False),
        ("weka_sessions.jsonl.xz", "weka", 53, 64, True, True),
    ],
)
def test_each_format_is_recognised_by_its_first_record(
    name: str, format: str, requests: int, id_block_size: int, has_prefixes: bool, has_sessions: bool
) -> None:
    trace = open_trace(SAMPLES / name)
    assert trace.format == format
    assert trace.id_block_size == id_block_size
    first = trace.first
    assert (first.ids is not None or first.tokens is not None, first.session is not None) == (
        has_prefixes,
        has_sessions,
    )
    found = list(trace)
    assert len(found) == requests
    assert plain(list(open_trace(SAMPLES / name, format))) == plain(found), "named or told, read again or once"
    check_contract(found)


def check_contract(requests: list[TraceRequest]) -> None:
    """Check what the replay relies on."""
    seen: set[str] = set()
    time = 0
    assert requests[0].arrival == 0
    for one in requests:
        assert one.id not in seen
        seen.add(one.id)
        assert set(one.after) <= seen
        assert one.input_length >= 1 and one.output_length >= 0 and one.arrival >= 0
        if one.delay is None:
            assert one.arrival >= time
            time = one.arrival
        else:
            assert one.delay >= 0 and (one.session is not None or one.after)
        if one.ids is not None:
            assert len(one.ids) == -(-one.input_length // one.id_block_size) and min(one.ids) >= 0
            TraceChain(one.ids, one.id_block_size, one.input_length, 16, own=len(seen)).hashes(
                0, one.input_length // 16
            )
        if one.tokens is not None:
            assert len(one.tokens) == one.input_length


def test_mooncake() -> None:
    first, _, third, *_ = read("mooncake_synthetic.jsonl")
    assert first == TraceRequest("1", 0, 40160, 6, list(range(79)), 512)
    assert (third.id, third.arrival) == ("3", 40_000_000)


def test_mooncake_sessions(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "t.jsonl",
        mooncake(100, session_id="a"),
        mooncake(150.5, session_id=7, request_id="b0", delay=0),
        mooncake(None, session_id="a", delay=12.5),
        mooncake(400, session_id="a", priority=3),
        mooncake(900, session_id="a", delay_ms=1),
        mooncake(None, wait_for=["b0"], delay=2, lora="x", salt="y", model="m"),
        {"created_time": 1000, "input_tokens": 3, "output_tokens": 4, "session_id": "c"},
    )
    found = list(open_trace(path))
    assert [(one.id, one.arrival, one.session, one.delay, one.after) for one in found] == [
        ("1", 0, "a", None, ()),
        ("b0", 50_500_000, "7", None, ()),
        ("3", 0, "a", 12_500_000, ()),
        ("4", 300_000_000, "a", 0, ()),  # the turn before it has no time, so nothing is known of a pause
        ("5", 800_000_000, "a", 1_000_000, ()),
        ("6", 0, None, 2_000_000, ("b0",)),
        ("7", 900_000_000, "c", None, ()),
    ]
    assert found[3].priority == 3
    assert (found[5].lora, found[5].salt, found[5].model) == ("x", "y", "m")
    check_contract(found)


def test_mooncake_turns_without_delay_wait_as_long_as_their_times_differ(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(10, session_id="a"), mooncake(35, session_id="a"))
    assert [one.delay for one in open_trace(path)] == [None, 25_000_000]


def test_mooncake_sessions_without_any_times(tmp_path: Path) -> None:
    rows = [mooncake(None, session_id=name, delay=delay) for name, delay in (("a", None), ("a", 5), ("b", None))]
    assert [one.arrival for one in open_trace(jsonl(tmp_path / "t.jsonl", *rows))] == [0, 0, 0]


def test_mooncake_with_another_block_size(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(0, 100, hash_ids=[1, 2]))
    with pytest.raises(TraceError, match="pass --trace-block-size 64"):
        list(open_trace(path))
    assert open_trace(path, trace_block_size=64).id_block_size == 64


def test_azure_times_to_the_last_digit() -> None:
    from kvyard.replay.traces.formats.wall_time import wall_time

    assert [one.arrival for one in read("azure_conv.csv")] == [0, 4314579000, 4541877000, 4710427000, 5892655000]
    assert wall_time("2024-05-10 00:00:00.009930+00:00") == wall_time("2024-05-10T02:00:00.00993+0200")
    assert wall_time("2024-05-10 00:00:00Z") - wall_time("2024-05-09 23:59:59.999999999Z") == 1
    assert wall_time("1970-01-01 00:00:01-01:00") == 3601 * S


def test_burstgpt_leaves_failed_requests_out() -> None:
    trace = open_trace(SAMPLES / "burstgpt.csv")
    assert [one.arrival // S for one in trace] == [0, 40, 113, 180]
    assert dict(trace.tally.left_out) == {"failed: no response tokens": 1}
    assert {one.ids for one in trace} == {None}


def test_burstgpt_sessions_keep_their_times() -> None:
    found = read("burstgpt_sessions.csv")
    assert [(one.session, one.delay) for one in found] == [("17", None), ("18", None), ("17", None), (None, None)]


def test_bailian_chains_ids_and_follows_chats() -> None:
    first, other, turn, branch, orphan = read("bailian.jsonl")
    assert all(one.ids is not None for one in (first, other, turn, branch, orphan))
    assert first.ids[:2] == turn.ids[:2] == branch.ids[:2] and other.ids[0] == first.ids[0]
    assert len({other.ids[1], turn.ids[3], orphan.ids[0]}) == 3, "block 7 behind three different prefixes"
    assert (turn.session, turn.after) == ("159", ())
    assert (branch.session, branch.after) == ("162", ("159",)), "a second answer to the same chat is not its next turn"
    assert (orphan.session, orphan.after) == ("163", ()), "its parent came before the file began"


def test_sharegpt_has_real_tokens() -> None:
    first = read("sharegpt_tokens.jsonl")[0]
    assert first.tokens is not None and first.output_tokens is not None
    assert (first.tokens[:3], len(first.output_tokens), first.ids) == ([678, 25, 4323], first.output_length, None)


@pytest.mark.parametrize("name", ["plain.csv", "plain.jsonl", "mooncake_synthetic.jsonl"])
def test_files_from_windows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (SAMPLES / name).read_bytes().replace(b"\n", b"\r\n"))
    assert list(open_trace(tmp_path / name)) == read(name)


def test_plain_skips_blank_lines() -> None:
    assert [(one.id, one.arrival) for one in read("plain.jsonl")] == [("1", 0), ("3", 750_000_000)]
    assert [one.arrival for one in read("plain.csv")] == [0, 250_000_000, 1_500_000_000]


def test_weka_forks_and_joins() -> None:
    found = {one.id.removeprefix("trace_0277:"): one for one in read("weka_sessions.jsonl.xz")}
    spawned, joined, next_turn = found["1"], found["34"], found["35"]
    assert (spawned.session, spawned.after) == ("trace_0277/agent_001", ("trace_0277:0",))
    assert spawned.delay == 60_444_000_000, "from the end of who called it"
    assert joined.after == ("trace_0277:4",), "the one sub-agent that had ended by then"
    assert joined.delay == 92_886_000_000, "from the end of that sub-agent"
    assert (next_turn.after, next_turn.delay) == ((), 8 * S), "the recorded think time"
    assert (found["50"].session, found["50"].root) == ("trace_0277/agent_004", "trace_0277")
    assert (found["0"].session, found["0"].root) == ("trace_0277", None)


def test_weka_ids_are_unique_to_a_session(tmp_path: Path) -> None:
    def session(name: str, scope: str = "local") -> dict[str, object]:
        request = {"t": 0, "type": "n", "in": 130, "out": 1, "hash_ids": [5, 6]}
        return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": [request, {**request, "t": 9.5}]}

    def ids(*sessions: dict[str, object]) -> list[list[int]]:
        return [list(one.ids or ()) for one in open_trace(jsonl(tmp_path / "t.jsonl", *sessions))]

    a0, a1, b0, b1 = ids(session("a"), session("b"))
    assert a0[:2] == a1[:2] and b0[:2] == b1[:2]
    assert not set(a0) & set(b0)
    assert len({a0[2], a1[2], b0[2], b1[2]}) == 4, "what lies behind the last whole block is nobody's"
    a0, a1, b0, b1 = ids(session("a", "global"), session("b", "global"))
    assert a0[:2] == a1[:2] == b0[:2] == b1[:2] == [5, 6]
    assert len({a0[2], a1[2], b0[2], b1[2]}) == 4


@pytest.mark.parametrize("first", [0, 100])
def test_weka_times_inside_sub_agents(first: float, tmp_path: Path) -> None:
    """From the marker in kv-cache-tester's files, from the start of the session in AgentX's."""
    turn = {"type": "n", "in": 64, "out": 1, "hash_ids": [1], "api_time": 2}
    agent = {"t": 100, "type": "subagent", "requests": [{**turn, "t": first}, {**turn, "t": first + 10}]}
    session = {"id": "a", "requests": [{**turn, "t": 0}, agent, {**turn, "t": 200}]}
    found = list(open_trace(jsonl(tmp_path / "t.jsonl", session)))
    assert [one.arrival // S for one in found] == [0, 100, 110, 200]
    assert [one.delay and one.delay // S for one in found] == [None, 98, 8, 88]
    assert [one.session for one in found] == ["a", "a/1", "a/1", "a"]
    assert [one.after for one in found] == [(), ("a:0",), (), ("a:2",)]


def test_weka_as_a_directory_of_files(tmp_path: Path) -> None:
    record = lzma.decompress((SAMPLES / "weka_sessions.jsonl.xz").read_bytes())
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "b.json").write_bytes(record.replace(b"trace_0277", b"other"))
    (tmp_path / "sessions" / "a.json.gz").write_bytes(gzip.compress(record))
    (tmp_path / "sessions" / "notes.txt").write_text("not a session")
    found = list(open_trace(tmp_path / "sessions"))
    assert len(found) == 106
    assert found[0].session == "trace_0277" and found[53].session == "other"
    assert len(list(open_trace(tmp_path / "sessions" / "b.json"))) == 53


def test_dynamo_is_sorted_by_when_requests_came() -> None:
    found = read("dynamo_request_trace.jsonl.gz")
    assert [one.arrival for one in found] == sorted(one.arrival for one in found)
    joined = next(one for one in found if len(one.after) == 3)
    assert joined.session is not None and joined.session.endswith(":root")
    spawned = [one for one in found if len(one.after) == 1]
    assert {one.after for one in spawned} == {(spawned[0].after[0],)} and len(spawned) == 3
    assert all(one.delay is not None and one.delay < S for one in spawned)
    assert {one.root for one in found} == {None, joined.session}
    assert all((one.root is None) == one.session.endswith(":root") for one in found if one.session is not None)
    assert max(found[1].ids or ()) > 1 << 63, "hashes are 64 bits wide"


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_packed_files(suffix: str, tmp_path: Path) -> None:
    data = (SAMPLES / "mooncake_synthetic.jsonl").read_bytes()
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == ".gz" else lzma.compress(data))
    assert list(open_trace(path)) == read("mooncake_synthetic.jsonl")


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    rows = [mooncake(i, hash_ids=[i]) for i in range(5)]
    path = jsonl(tmp_path / "t.jsonl", *rows, {"broken": True})
    requests = iter(open_trace(path))
    assert [next(requests).arrival for _ in range(5)] == [i * 1_000_000 for i in range(5)]
    with pytest.raises(TraceError, match="line 6"):
        next(requests)
    assert len(list(open_trace(path, limit=5))) == 5


def test_the_whole_conversation_trace() -> None:
    trace = open_trace(CONVERSATION)
    found = list(trace)
    assert len(found) == 12_031
    check_contract(found[:300])
    assert max(max(one.ids or ()) for one in found) == 182_789
