"""``kvyard trace``: what people see, and what they see when something is wrong."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.traces.support import CONVERSATION, SAMPLES, jsonl, mooncake

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace

run = partial(exit_code, "trace")


def test_info_prints_the_published_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", CONVERSATION) == 0
    out = capsys.readouterr().out
    assert "12,031" in out and "288,500 of 512 tokens looked up, 182,790 different" in out
    assert "0.3664 of blocks, 0.3736 of prompt tokens" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  ") and line.strip()[:1].isdigit()]
    assert [(size, recent) for size, recent, _ in rows] == [
        ("1,000", "0.0445"),
        ("10,000", "0.2112"),
        ("30,000", "0.3257"),
        ("50,000", "0.3546"),
        ("100,000", "0.3637"),
    ]
    assert all(float(best) >= float(recent) for _, recent, best in rows)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_trace_may_come_through_a_pipe(
    pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the copy stays for as long as this process
    rows = [mooncake(at, 600) for at in range(3)]
    source, drain = os.pipe()
    with os.fdopen(drain, "wb") as pipe:
        pipe.write(pack(jsonl(tmp_path / "t.jsonl", *rows).read_bytes()))
    with os.fdopen(source):
        assert run("info", f"/dev/fd/{source}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


def test_a_shell_that_completes_a_line_reads_no_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, drain = os.pipe()
    with os.fdopen(drain, "wb") as pipe:
        pipe.write(b"x")
    monkeypatch.setenv("_KVYARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kvyard trace info /dev/fd/{source} --js")
    monkeypatch.setenv("COMP_CWORD", "4")
    with os.fdopen(source, "rb") as pipe:
        assert run() == 0 and "--json" in capsys.readouterr().out.split()
        assert pipe.read() == b"x"


def test_a_library_that_is_given_a_pipe_says_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KvyardError, match=r"a pipe can be read once, .*: write it to a file first"):
        open_trace(tmp_path / "pipe")


@pytest.mark.parametrize(("columns", "all_of_them"), [("112", True), ("111", False)])
def test_info_has_fewer_columns_where_there_is_less_room(
    columns: str, all_of_them: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run("info", SAMPLES / "plain.csv") == 0
    out = capsys.readouterr().out
    assert ("p95" in out, "std" in out, "p99" in out) == (all_of_them, all_of_them, True)


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", CONVERSATION, "--json", "--limit", 100, "--capacity", "0,1k,1.5m") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["requests"] == 100
    assert [one["blocks"] for one in value["reuse"]["capacities"]] == [0, 1000, 1_500_000]
    assert value["reuse"]["capacities"][0] == {"blocks": 0, "lru": 0.0, "belady": 0.0}
    assert value["reuse"]["capacities"][2]["lru"] == value["reuse"]["infinite_blocks"]


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir() if path.suffix not in (".md", ".yaml")))
def test_info_of_every_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", SAMPLES / name) == 0
    out = capsys.readouterr().out
    assert "requests" in out
    assert ("not known: the trace doesn't say what prompts share" in out) == (
        open_trace(SAMPLES / name).first.ids is None and open_trace(SAMPLES / name).first.tokens is None
    )


def test_info_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(0), mooncake(1, -1), mooncake(2, hash_ids=[4]))
    assert run("info", path, "--skip-bad") == 0
    out = capsys.readouterr().out
    assert "1 bad rows skipped" in out and "line 2: input_length is -1" in out
    assert "1 requests without ids are left out" in out
    assert run("info", SAMPLES / "burstgpt.csv") == 0
    assert "1 rows left out: failed: no response tokens" in capsys.readouterr().out


def test_convert_slice_and_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", CONVERSATION, tmp_path / "a.jsonl", "--limit", 50) == 0
    assert "a.jsonl: 50 requests" in capsys.readouterr().err
    assert run("slice", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", "--skip", 10, "--first", 20) == 0
    assert run("slice", tmp_path / "a.jsonl", tmp_path / "b2.jsonl", "--from", 3, "--until", "9.5") == 0
    assert run("scale", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl.xz", "--speedup", 4) == 0
    before, after = list(open_trace(tmp_path / "b.jsonl.gz")), list(open_trace(tmp_path / "c.jsonl.xz"))
    assert len(before) == 20 and [one.arrival / 4 for one in before] == [one.arrival for one in after]
    times = [one.arrival / 1e9 for one in open_trace(tmp_path / "a.jsonl")]
    assert len(list(open_trace(tmp_path / "b2.jsonl"))) == sum(3 <= time < 9.5 for time in times) > 0
    assert run("convert", tmp_path / "a.jsonl", tmp_path / "d.jsonl", "--to", "vllm-custom") == 0
    assert "vllm bench serve --dataset-name custom" in capsys.readouterr().err
    assert run("scale", tmp_path / "a.jsonl", tmp_path / "e.jsonl", "--arrivals", "constant:10", "--speedup", 2) == 0
    assert [one.arrival for one in open_trace(tmp_path / "e.jsonl")] == [50_000_000 * i for i in range(50)]
    assert run("slice", SAMPLES / "weka_sessions.jsonl.xz", tmp_path / "w.jsonl", "--sessions", 1) == 0
    assert "an id stands for 64 tokens, as each row says" in capsys.readouterr().err
    assert run("info", tmp_path / "w.jsonl") == 0


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--requests", 40, "--turns", "geometric:3", "--tree", "1x600/3x200", "--arrivals", "onoff:5,2,3")
    assert run("generate", tmp_path / "a.jsonl", *options, "--seed", 3) == 0
    assert run("generate", tmp_path / "b.jsonl", *options, "--seed", 3) == 0
    assert run("generate", tmp_path / "c.jsonl", *options, "--seed", 4) == 0
    texts = [(tmp_path / f"{name}.jsonl").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    assert run("info", tmp_path / "a.jsonl") == 0
    assert "sessions" in capsys.readouterr().out


def test_generate_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--requests", 60, "--sub-agents", "0.2", "--seed", 3)
    assert run("generate", "agent", tmp_path / "a.jsonl", *options) == 0
    assert run("generate", "agent", tmp_path / "b.jsonl", *options) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert run("info", tmp_path / "a.jsonl") == 0
    capsys.readouterr()
    sample = SAMPLES / "weka_sessions.jsonl.xz"
    assert (
        run("generate", "agent", tmp_path / "c.jsonl", "--fit", sample, "--requests", 200, "--output", "fixed:7") == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("c.jsonl: 200 requests")
    (output,) = (line.split() for line in lines if line.startswith("  output_mean"))
    assert output[2] == "7" and output[3].endswith("%"), "set by hand, and far from the trace"


def test_a_file_may_be_called_as_a_command(tmp_path: Path) -> None:
    assert run("generate", tmp_path / "agent", "--requests", 5) == 0
    assert (tmp_path / "agent").exists()


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("formats") == 0
    out = capsys.readouterr().out
    for name in ("azure", "bailian", "burstgpt", "dynamo", "mooncake", "plain", "sharegpt", "weka", "vllm-custom"):
        assert f"\n  {name} " in out


def test_html(tmp_path: Path) -> None:
    assert run("info", SAMPLES / "plain.csv", "--html", tmp_path / "t.html") == 0
    assert '<div class="chart" data-figure="3">' in (tmp_path / "t.html").read_text()


def bad_files(where: Path) -> dict[str, tuple[list[object], str]]:
    """Return bad files, and a piece of the answer to each."""
    rows = [mooncake(i, hash_ids=[i]) for i in range(2000)]
    whole = lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    files = {
        "empty.jsonl": b"",
        "garbage.jsonl": bytes(range(256)) * 20,
        "cut.jsonl.xz": whole[: len(whole) // 2],
        "negative.jsonl": json.dumps(mooncake(0, -1)).encode(),
        "uncovered.jsonl": json.dumps(mooncake(0, 1500, hash_ids=[1])).encode(),
        "unsorted.jsonl": b"\n".join(json.dumps(mooncake(time)).encode() for time in (5, 4)),
        "content.jsonl": b"\n".join(
            json.dumps(mooncake(0, 1024, hash_ids=ids)).encode() for ids in ([1, 2], [3, 2], [1, 2])
        ),
    }
    for name, data in files.items():
        (where / name).write_bytes(data)
    good = SAMPLES / "plain.csv"
    return {
        "missing": (["info", where / "nowhere.jsonl"], "no such file"),
        "empty": (["info", where / "empty.jsonl"], "the file is empty"),
        "garbage": (["info", where / "garbage.jsonl"], "neither JSON lines nor CSV"),
        "garbage named": (["info", where / "garbage.jsonl", "--format", "mooncake"], "line 1"),
        "cut": (["info", where / "cut.jsonl.xz"], "breaks off"),
        "negative": (["info", where / "negative.jsonl"], "line 1: input_length is -1"),
        "uncovered": (["info", where / "uncovered.jsonl"], "line 1: 1 ids of 512 tokens don't cover 1500 tokens"),
        "unsorted": (["info", where / "unsorted.jsonl"], "line 2: its time is"),
        "not cumulative": (["info", where / "content.jsonl"], "--chain-ids"),
        "unknown format": (["info", good, "--format", "csv"], "unknown trace format 'csv'"),
        "wrong format": (["info", good, "--format", "weka"], "line 1"),
        "capacity": (["info", good, "--capacity", "10,lots"], "--capacity is 'lots': it must be a whole number"),
        "negative capacity": (["info", good, "--capacity=-5"], "a number of blocks can't be negative"),
        "unknown target": (["convert", good, where / "x", "--to", "yaml"], "'yaml' is no format that kvyard writes"),
        "over itself": (["convert", good, good], "what is read"),
        "no change": (["scale", good, where / "x"], "pass --speedup, or --arrivals"),
        "too slow": (["scale", good, where / "x", "--speedup", "0"], "above 0"),
        "nothing in it": (["slice", good, where / "x", "--skip", "10"], "no requests in it"),
        "no law": (["generate", where / "x", "--requests", "5", "--input", "big"], "unknown law 'big'"),
        "no sessions": (
            ["generate", "agent", where / "x", "--fit", SAMPLES / "plain.csv"],
            "has no session: agents are fitted to traces",
        ),
        "no number": (["generate", where / "x", "--requests", "none"], "none"),
        "unknown option": (["info", good, "--colour"], "--colour"),
    }


def test_wrong_input_gets_a_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, (argv, why) in bad_files(tmp_path).items():
        assert run(*argv) == 2, kind
        err = capsys.readouterr().err
        assert why in err, (kind, err)
        assert "Traceback" not in err, kind
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("*.part"))


def test_help_is_quick_and_reading_needs_no_numpy() -> None:
    script = (
        "import sys; from kvyard.replay.traces import open_trace; "
        f"next(iter(open_trace({str(CONVERSATION)!r}))); print('numpy' in sys.modules)"
    )
    run_ = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run_.stdout.split() == ["False"]
