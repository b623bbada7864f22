"""What can't be read is named by file and line, with what would help; or counted and left out."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.replay.traces.support import SAMPLES, jsonl, mooncake

from kvyard.errors import KvyardError
from kvyard.replay.traces import FORMATS, TraceError, open_trace

WEKA = {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}
DYNAMO = {"request_id": "r", "request_received_ms": 5, "output_tokens": 1, "input_tokens": 3}


def dynamo(**request: object) -> dict[str, object]:
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {**DYNAMO, **request}}
    return {"event": event}


def weka(*requests: object, **session: object) -> dict[str, object]:
    return {"id": "a", "requests": list(requests), **session}


BAD_ROWS = {
    "negative input": (mooncake(0, -5), "input_length is -5"),
    "no input": (mooncake(0, 0), "input_length is 0: a prompt has at least one token"),
    "negative output": (mooncake(0, 5, -1), "output_length is -1"),
    "no output length": ({"timestamp": 0, "input_length": 5}, "output_length is missing"),
    "text for a number": (mooncake(0, "5"), "input_length"),
    "too few ids": (mooncake(0, 1025, hash_ids=[1, 2]), "2 ids of 512 tokens don't cover 1025 tokens: there must be 3"),
    "too many ids": (
        mooncake(0, 100, hash_ids=[1, 2]),
        "too many for 100 tokens: there must be 1, or an id stands for 64 tokens",
    ),
    "no ids for a prompt": (mooncake(0, 100, hash_ids=[]), "0 ids"),
    "a negative id": (mooncake(0, 100, hash_ids=[-1]), "hash_ids holds -1"),
    "an id of more than 64 bits": (
        mooncake(0, 100, hash_ids=[1 << 64]),
        "hash_ids holds 18446744073709551616: ids have",
    ),
    "time goes back": (mooncake(-1), "before that of an earlier row: sort the file by time, or pass --sort"),
    "no time": (mooncake(None), "timestamp is missing"),
    "delay on a first turn": (mooncake(9, session_id="s", delay=5), "first turn of session 's'"),
    "waits for nobody we know": (mooncake(9, wait_for=["x"]), "it waits for 'x'"),
    "not an object": ([1, 2], "expected `object`"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(kind: str, tmp_path: Path) -> None:
    row, why = BAD_ROWS[kind]
    path = jsonl(tmp_path / "t.jsonl", mooncake(1), row, mooncake(10))
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    assert f"{path}, line 2: " in str(caught.value)
    assert why in str(caught.value)
    assert caught.value.line == 2
    trace = open_trace(path, skip_bad=True)
    assert [one.id for one in trace] == ["1", "3"]
    assert trace.tally.skipped == 1
    assert why in trace.tally.examples[0]


@pytest.mark.parametrize(
    ("rows", "line", "why"),
    [
        ([mooncake(0, request_id="x"), mooncake(1, request_id="x")], 2, "'x' is taken"),
        ([mooncake(5, session_id="a"), mooncake(2, session_id="a")], 2, "put turns in order"),
        ([mooncake(5, session_id="a"), mooncake(6, session_id="a", delay=-3)], 2, "delay is -3"),
        ([weka({**WEKA, "in": 200})], 1, "request a:0: 1 hash_ids of 64 tokens where in is 200: there must be 3"),
        ([weka({**WEKA, "hash_ids": [-1]})], 1, "between 0 and"),
        ([weka({**WEKA, "hash_ids": [1 << 63]})], 1, "between 0 and"),
        ([weka({**WEKA, "think_time": -2}, WEKA)], 1, "think_time is -2"),
        ([weka({**WEKA, "out": -2})], 1, "out is -2"),
        ([weka(WEKA, hash_id_scope="galactic")], 1, "hash_id_scope is 'galactic'"),
        ([weka(WEKA, block_size=0)], 1, "block_size is 0"),
        ([weka(WEKA), weka(WEKA)], 2, "'a' is taken"),
        ([dynamo(), dynamo()], 2, "'r' is taken"),
        ([dynamo(output_tokens=-1)], 1, "output_tokens is -1"),
        ([dynamo(total_time_ms=-1)], 1, "total_time_ms is -1"),
        ([dynamo(replay={"trace_block_size": 0, "input_length": 5, "input_sequence_hashes": [1]})], 1, "is 0"),
        ([dynamo(replay={"trace_block_size": 4, "input_length": 5, "input_sequence_hashes": [1]})], 1, "don't cover"),
        ([{"chat_id": 1, "timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1]}], 1, "don't cover"),
        ([{"chat_id": 1, "timestamp": 0, "input_length": 40.5, "output_length": 1}], 1, "input_length"),
        ([{"input_toks": 2, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1]}], 1, "1 tokens where 2"),
        ([{"arrival": 0, "input": 5, "output": 1}, {"arrival": 1, "input": 5, "output": 1, "more": 1}], 2, "more"),
    ],
)
def test_bad_rows_of_other_kinds(rows: list[object], line: int, why: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", *rows)
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    assert f"{path}, line {line}: " in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,2", "2 fields where the header has 3"),
        ("x,2,3", "'arrival' is 'x': it must be a number"),
        ("nan,2,3", "'arrival' is nan: it must be finite"),
        ("1e400,2,3", "'arrival' is 1e400: it must be finite"),
        ("1,2.5,3", "'input' is 2.5: it must be a whole number"),
        ("1,inf,3", "'input' is inf: it must be finite"),
        ("1,-2,3", "input is -2"),
        ("0.5,2,3", "pass --sort"),
        ("\udcff,2,3", "not a line of CSV"),
    ],
)
def test_bad_rows_of_csv(row: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"arrival,input,output\n1,5,5\n{row}\n2,5.0,5\n".encode(errors="surrogateescape"))
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    assert f"{path}, line 3: " in str(caught.value)
    assert why in str(caught.value)
    trace = open_trace(path, skip_bad=True)
    assert [one.id for one in trace] == ["2", "4"]


@pytest.mark.parametrize("time", ["", "yesterday", "2023-13-16 18:15:46", "2023-11-16", "2023-11-16 25:00:00"])
def test_bad_wall_times(time: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{time},1,1\n")
    with pytest.raises(TraceError, match="line 2: TIMESTAMP is"):
        list(open_trace(path))


def refused(path: Path, why: str, **options: object) -> None:
    with pytest.raises(KvyardError) as caught:
        list(open_trace(path, **options))
    assert why in str(caught.value)
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "missing.jsonl", "no such file")
    refused(tmp_path / "missing.jsonl.gz", "no such file")
    (tmp_path / "empty.jsonl").touch()
    refused(tmp_path / "empty.jsonl", "the file is empty")
    refused(tmp_path / "empty.jsonl", "no requests in it", format="mooncake")
    (tmp_path / "blank.jsonl").write_text("\n\n  \n")
    refused(tmp_path / "blank.jsonl", "the file is empty")
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "a directory without .json files")
    (tmp_path / "secret.jsonl").touch(0o000)
    if (tmp_path / "secret.jsonl").stat().st_uid != 0:
        refused(tmp_path / "secret.jsonl", "can't be read")


def test_formats_that_are_none(tmp_path: Path) -> None:
    refused(jsonl(tmp_path / "a.jsonl", {"hello": 1}), "an object with hello; pass --format")
    (tmp_path / "b.csv").write_text("a,b,c\n1,2,3\n")
    refused(tmp_path / "b.csv", "the columns a, b, c; pass --format")
    refused(tmp_path / "b.csv", "unknown trace format 'nosuch': choose one of azure, bailian", format="nosuch")
    refused(tmp_path / "b.csv", "no column 'timestamp'", format="azure")
    (tmp_path / "c.bin").write_bytes(random.Random(1).randbytes(5000))
    refused(tmp_path / "c.bin", "neither JSON lines nor CSV")
    (tmp_path / "d.jsonl").write_text('{"timestamp": 0, "input_len')
    refused(tmp_path / "d.jsonl", "neither JSON lines nor CSV")


def test_csv_with_a_header_only(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival,input,output\n")
    refused(tmp_path / "t.csv", "no requests in it")


def test_nothing_but_bad_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(0, -1), mooncake(0, -2))
    refused(path, "no requests in it: 2 bad rows skipped, the first: ", skip_bad=True)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_packed_files_that_break_off(suffix: str, tmp_path: Path) -> None:
    data = b"".join(json.dumps(mooncake(i, hash_ids=[i])).encode() + b"\n" for i in range(3000))
    packed = gzip.compress(data) if suffix == ".gz" else lzma.compress(data)
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    refused(path, "breaks off")
    path.write_bytes(packed[: len(packed) // 3] + b"garbage" * 20 + packed[len(packed) // 3 :])
    refused(path, str(path))
    path.write_bytes(data)
    refused(path, "rename it if it isn't packed")
    path.write_bytes(packed[:5])
    refused(path, "fetch it again")


def test_lines_without_end_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvyard.replay.traces import files

    monkeypatch.setattr(files, "MAX_LINE", 100)
    path = tmp_path / "t.jsonl"
    path.write_text("x" * 1000)
    refused(path, "is this a text file?", format="mooncake")


@pytest.mark.parametrize(("option", "value"), [("trace_block_size", 0), ("limit", 0), ("limit", -1)])
def test_options_that_make_no_sense(option: str, value: int) -> None:
    refused(SAMPLES / "plain.csv", f"{option} must be at least 1, not {value}", **{option: value})


def test_sorting(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "t.jsonl",
        mooncake(50, session_id="a", request_id="a0"),
        mooncake(None, session_id="a", delay=1, request_id="a1"),
        mooncake(10, request_id="b"),
        mooncake(70, request_id="c"),
        mooncake(30, request_id="d"),
    )
    refused(path, "line 3: its time is 0.04 s before")
    found = list(open_trace(path, sort=True))
    assert [(one.id, one.arrival) for one in found] == [
        ("b", 0),
        ("d", 20_000_000),
        ("a0", 40_000_000),
        ("a1", 0),
        ("c", 60_000_000),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), cut=st.integers(0, 400), name=st.sampled_from(sorted(FORMATS.names())))
def test_garbage_never_ends_in_anything_but_a_sentence(data: bytes, cut: int, name: str, tmp_path: Path) -> None:
    sample = next(path for path in sorted(SAMPLES.iterdir()) if path.name.startswith(name))
    if sample.is_dir():
        sample = min(sample.iterdir())
    text = sample.read_bytes()
    text = (
        gzip.decompress(text) if sample.suffix == ".gz" else lzma.decompress(text) if sample.suffix == ".xz" else text
    )
    path = tmp_path / "t.data"
    path.write_bytes(text[:cut] + data + text[cut:5000])
    for skip_bad in (False, True):
        for chosen in (name, None):
            try:
                list(open_trace(path, chosen, skip_bad=skip_bad))
            except KvyardError as error:
                assert str(path) in str(error)


WEIRD = st.sampled_from(
    [None, True, -1, 0, 1.5, -2.5, 1e308, 1 << 63, 1 << 64, "", "x", "\ud800", [], [None], [[-1]], {}, {"id": 1}]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["bailian", "dynamo", "mooncake", "plain.jsonl", "sharegpt", "weka"]))
def test_fields_of_any_kind_end_in_a_sentence(data: st.DataObject, name: str, tmp_path: Path) -> None:
    sample = next(path for path in sorted(SAMPLES.iterdir()) if path.name.startswith(name))
    text = sample.read_bytes()
    text = (
        gzip.decompress(text) if sample.suffix == ".gz" else lzma.decompress(text) if sample.suffix == ".xz" else text
    )
    rows = [json.loads(line) for line in text.splitlines() if line.strip()][:4]
    at = data.draw(st.sampled_from(rows))
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(WEIRD)
        break
    path = jsonl(tmp_path / "t.jsonl", *rows)
    for skip_bad in (False, True):
        try:
            for one in open_trace(path, name.partition(".")[0], skip_bad=skip_bad):
                assert one.input_length > 0 and one.output_length >= 0 and one.arrival >= 0 and (one.delay or 0) >= 0
                assert one.ids is None or len(one.ids) == -(-one.input_length // one.id_block_size)
        except KvyardError as error:
            assert str(path) in str(error)
