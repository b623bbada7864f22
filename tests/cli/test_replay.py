"""``kvyard replay``: what people see, and what they see when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION, SAMPLES, jsonl, mooncake
from tests.waiting import eventually

from kvyard.cli.app import main
from kvyard.cli.replay import patient
from kvyard.replay.report.files import read_report
from kvyard.replay.traces.writing import write_trace

run = partial(exit_code, "replay")


def test_ends_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONVERSATION, "--limit", 60, "--workers", 2, "--slo", "ttft=500,itl=20", "--bounds") == 0
    out, err = capsys.readouterr()
    for words in (
        "60 requests",
        "2 workers",
        "routed by least-time",
        "Time to first token",
        "Goodput",
        "at best",
        "Reused",
    ):
        assert words in out
    assert not err


def test_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("r.json", "q.jsonl", "p.html")]
    options = ["--report", files[0], "--per-request", files[1], "--html", files[2], "--label", "my run", "-q"]
    assert (
        run(CONVERSATION, "--limit", 40, "--workers", 2, "--num-gpu-blocks", "2k", "--host-blocks", "5k", *options) == 0
    )
    assert capsys.readouterr() == ("", "")
    report = read_report(files[0])
    assert report.label == "my run" and report.requests["finished"] == 40
    assert report.tiers["host"].capacity_blocks == 2 * 5000
    assert len(files[1].read_text().splitlines()) == 40
    assert "my run" in files[2].read_text()


def test_flags_file_and_set_come_together(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('router = "random"\nworkers = 3\nhost_blocks = "1k"\n')
    report = tmp_path / "r.json"
    options = ["--config", file, "--router", "kv", "--set", "temperature=0.5", "--set", "host-latency=1ms", "-q"]
    assert run(CONVERSATION, "--limit", 20, *options, "--report", report, "--event-lag", "50ms", "--seed", 7) == 0
    config = json.loads(report.read_text())["config"]
    assert config["router"]["policy"] == "kv" and config["router"]["temperature"] == 0.5
    assert config["event_lag"] == 50_000_000 and config["seed"] == 7
    kind = config["workers"][0]
    assert kind["count"] == 3 and kind["engine"]["tiers"]["tiers"][0]["link"]["outward"]["first_byte_ns"] == 1_000_000


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((3, 3, 4)):
        path = tmp_path / f"{number}.json"
        assert run(CONVERSATION, "--limit", 60, "--workers", 4, "--seed", seed, "-q", "--report", path) == 0
        texts.append(path.read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list-settings") == 0
    out = capsys.readouterr().out
    assert "host_blocks " in out and "temperature " in out and "groups " in out
    assert run("--help") == 0
    assert "--host-bandwidth GB/S" in capsys.readouterr().out


def test_a_session_trace_without_a_clock_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    path = SAMPLES / "weka_sessions.jsonl.xz"
    assert run(path, "--workers", 2, "--limit", 30) == 0
    assert "--concurrency N" in capsys.readouterr().err
    assert run(path, "--workers", 2, "--concurrency", 2, "--limit", 30) == 0
    assert not capsys.readouterr().err


def test_some_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONVERSATION, "--limit", 30, "--workers", 1, "--num-gpu-blocks", 200, "--router", "random") == 0
    out, err = capsys.readouterr()
    assert "rejected" in out and "requests were rejected, the first" in err


def test_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(
        tmp_path / "t.jsonl", mooncake(0, hash_ids=[1]), mooncake(1, -5, hash_ids=[1]), mooncake(2, hash_ids=[2])
    )
    assert run(path) == 2
    assert "line 2" in capsys.readouterr().err
    assert run(path, "--skip-bad", "--workers", 1) == 0
    out, err = capsys.readouterr()
    assert "2 requests" in out and "1 bad rows skipped, the first" in err


def test_cards_and_models_as_people_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu", "h100", "--model", "qwen3-30b-a3b", "-tp", 2, "-pp", 2, "-dp", 2, "-ep", "--quantization", "fp8"]
    more = ["--kv-cache-dtype", "fp8", "--host-us", 300, "--timing", "roofline", "--workers", 1, "--limit", 3]
    report = tmp_path / "r.json"
    assert run(CONVERSATION, *asked, *more, "--report", report) == 0
    assert "roofline of qwen3-30b-a3b on h100 TP2 PP2 DP2 EP fp8 weights fp8 cache" in capsys.readouterr().out
    timing = json.loads(report.read_text())["config"]["workers"][0]["engine"]["timing"]
    assert timing["host_us"] == 300 and timing["deployment"]["data_parallel_size"] == 2


def test_help_has_flags_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    heads = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    parts = ["Fleet", "Traffic", "Router", "Engine", "Live runs", "How the trace is read", "Model, card and time"]
    split = "Prefill and decode apart"
    assert heads == [
        "Arguments",
        *parts[:6],
        "Flow control",
        split,
        parts[6],
        "Memory below the device",
        "Output",
        "Options",
    ]
    heads.remove(split)
    assert "--prefill" in text.partition(f"\n{split}:\n")[2].partition("\n\n")[0]
    under = {head: text.partition(f"\n{head}:\n")[2].partition("\n\n")[0] for head in heads}
    for flag, head in (
        ("--gpu", 6),
        ("-tp", 6),
        ("--host-us", 6),
        ("--max-num-seqs", 3),
        ("--prove", 4),
        ("--sort", 5),
    ):
        named = {one: re.findall(r"^  (-.*?)(?:  |$)", under[one], re.MULTILINE) for one in heads}
        assert [one for one in heads if f" {flag} " in f" {' '.join(named[one])} ".replace(",", "")] == [parts[head]], (
            flag
        )


CARD = ["--gpu", "h100", "--model", "llama-3.1-70b"]
WRONG = [
    ([CONVERSATION, "--gpu", "h1000", "--model", "llama-3.1-8b"], "did you mean h100 or h200 or a100? Choose one of"),
    ([CONVERSATION, "--gpu", "h100", "--model", "lama-3.1-8b"], "did you mean llama-3.1-8b or llama-3.1-70b"),
    ([CONVERSATION, *CARD], "tensor_parallel_size 2 would do"),
    ([CONVERSATION, *CARD, "-tp", "3"], "tensor_parallel_size may be 1, 2, 4, 8, 16, 32, 64"),
    ([CONVERSATION, *CARD, "-tp", "4", "-pp", "81"], "pipeline_parallel_size may be 1 to 80"),
    ([CONVERSATION, *CARD, "-tp", "4", "-ep"], "has no experts"),
    ([CONVERSATION, *CARD, "-tp", "4", "--weight-dtype", "int3"], "unknown type of weights 'int3'"),
    ([CONVERSATION, "-tp", "4"], "tensor_parallel_size is for a model"),
    ([CONVERSATION, "--dp-size", "2", "--set", "data_parallel_size=2"], "dp_size is set twice"),
    (["no-such-file.jsonl"], "no such file"),
    (["EMPTY"], "empty"),
    (["BLANK"], "empty"),
    (["STRANGE"], "--format"),
    (["NEGATIVE"], "line 1: output_length is -3"),
    ([CONVERSATION, "--format", "pcap"], "unknown trace format"),
    ([CONVERSATION, "--workers", "0"], "at least one worker"),
    ([CONVERSATION, "--workers", "two"], "whole number"),
    ([CONVERSATION, "--num-gpu-blocks", "2", "--limit", "20"], "none of the 20 requests fits"),
    ([CONVERSATION, "--max-model-len", "100", "--limit", "20"], "none of the 20 requests fits"),
    ([CONVERSATION, "--set", "hostblocks=3"], "did you mean host_blocks"),
    ([CONVERSATION, "--set", "host_blocks"], "write NAME=VALUE"),
    ([CONVERSATION, "--host-blocks", "3", "--set", "host_blocks=3"], "set twice"),
    ([CONVERSATION, "--host-blocks", "3", "--host-bytes", "3GiB"], "give one of the two"),
    ([CONVERSATION, "--model", "llama-3.1-8b"], "how many blocks"),
    ([CONVERSATION, "--prefill-workers", "2"], "prefill and decode go together"),
    ([CONVERSATION, "--autoscaling", "on"], "autoscaling: say autoscale"),
    ([CONVERSATION, "--set", "planner=x"], "planner: say autoscale"),
    ([CONVERSATION, "--config", "no.toml"], "can't read no.toml"),
    ([CONVERSATION, "--slo", "fast"], "ttft=500"),
    ([CONVERSATION, "--per-request", "x.csv"], ".jsonl or .parquet"),
    ([CONVERSATION, "--report", "no/such/dir/x.json"], "make it first"),
    ([CONVERSATION, "--html", "."], "is a directory"),
    ([CONVERSATION, "--event-lag", "50"], "with its unit"),
    ([CONVERSATION, "--timing", "profile:tpu"], "unknown profile"),
    ([CONVERSATION, "--no-such-flag"], "No such option"),
    ([], "Missing argument"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG, ids=lambda value: str(value)[-40:] if isinstance(value, str) else "")
def test_wrong_input_gets_a_sentence(
    argv: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "EMPTY": "",
        "BLANK": "\n\n",
        "STRANGE": '{"a": 1}\n',
        "NEGATIVE": json.dumps(mooncake(0, 512, -3, hash_ids=[1])) + "\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert words in err.replace("\n", " ") and "Traceback" not in err and not out
    assert not list(tmp_path.glob("*.json*"))


def test_no_traceback_from_the_real_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvyard.cli.app", "replay", "no-such-file"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and not done.stderr:  # the module has no main of its own
        code = "from kvyard.cli.app import main; main(['replay', 'no-such-file'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "Error: no-such-file: no such file\n" and not done.stdout


@pytest.mark.timeout(400)
def test_ctrl_c_leaves_a_valid_report(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    write_trace(sessions(20_000, arrivals="poisson:rate=20", turns="fixed:1"), trace, "mooncake")
    code = "import sys; from kvyard.cli.app import main; main(sys.argv[1:])"
    report = tmp_path / "r.json"
    argv = [
        "replay",
        str(trace),
        "--trace-block-size",
        "16",
        "--workers",
        "2",
        "--block-size",
        "16",
        "--set",
        "plans=off",
    ]
    seen = tmp_path / "seen"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("of an earlier run")
    # The bar isn't drawn without a terminal, so a file says when the run is under way.
    watch = (
        "import kvyard.replay.progress as p, pathlib; told = p.ProgressBar.update\n"
        "def say(self, came, through, now):\n"
        f"    told(self, came, through, now); through > 20 and pathlib.Path({str(seen)!r}).touch()\n"
        "p.ProgressBar.update = say\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", watch + code, *argv, "--report", str(report), "--per-request", str(rows)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: seen.exists() or process.poll() is not None, seconds=100)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Interrupted" in err and "Traceback" not in err
    assert "The run was interrupted" in out
    found = read_report(report)
    assert not found.complete and 20 < found.requests["finished"] < found.requests["all"] < 20_000
    assert rows.read_text() == "of an earlier run", "what isn't whole doesn't take the place of what may be"
    partial = rows.with_name("rows.partial.jsonl")
    assert f"written: {partial}" in err and err.count("\n") == 3, "two files, and that it was interrupted"
    assert partial.read_bytes().count(b"\n") == found.requests["all"]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_effect_between_steps_and_a_second_one_immediately(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with patient() as obey:
        assert signal.getsignal(number) is not before
        obey()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            obey()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_ids_that_name_blocks_and_not_prefixes_are_refused_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = ([1, 2, 3], [4, 2, 3], [2, 1, 3], [3, 1, 2])
    rows = [mooncake(10 * at, 1536, hash_ids=ids) for at, ids in enumerate(orders)]
    trace = jsonl(tmp_path / "blocks.jsonl", *rows)
    options = ["--workers", 1, "--num-gpu-blocks", 200]
    assert run(trace, *options) == 2
    err = capsys.readouterr().err
    assert "blocks.jsonl: in request 2, id 2 follows 4, and in an earlier one it follows 1" in err
    assert "--chain-ids" in err
    assert run(trace, "--chain-ids", "-q", *options) == 0


def test_pools_of_one_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = jsonl(tmp_path / "t.jsonl", *(mooncake(at, 600, model="ab"[at % 2]) for at in range(12)))
    file = tmp_path / "f.toml"
    file.write_text(
        'block_size = 16\n[[pools]]\nname = "a"\nworkers = 1\n[[pools]]\nname = "b"\n[[pools.workers]]\ncount = 2\n'
    )
    written = [tmp_path / name for name in ("r.json", "q.jsonl", "p.html")]
    options = ["--report", written[0], "--per-request", written[1], "--html", written[2]]
    assert run(trace, "--config", file, "--jobs", 1, *options) == 0
    out, err = capsys.readouterr()
    assert "12 requests" in out and "3 workers" in out
    assert [line.split()[:3] for line in out.splitlines() if line.split()[:1] in (["a"], ["b"])] == [
        ["a", "6", "1"],
        ["b", "6", "2"],
    ]
    assert err.count("written: ") == 3
    report = read_report(written[0])
    assert [worker.name for worker in report.workers] == ["a/w0", "b/w0", "b/w1"]
    assert len(written[1].read_text().splitlines()) == 12
    for words, argv in {
        "--jobs is for fleets of pools": [trace, "--jobs", 2],
        "--bounds is for a fleet without pools": [trace, "--config", file, "--bounds"],
        "asks for the model 'b', and the fleet's pools are 'a'": [trace, "--config", tmp_path / "one.toml"],
    }.items():
        (tmp_path / "one.toml").write_text('[[pools]]\nname = "a"\n')
        assert run(*argv) == 2
        assert words in capsys.readouterr().err


def test_listed_settings_have_the_options_of_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--list-settings"])
    listed = capsys.readouterr().out
    for words in (
        "least-time: stickiness=1  Weight of",
        "slru: protected=0.8  Share",
        "threshold: in_flight=8  Requests",
    ):
        assert words in listed
