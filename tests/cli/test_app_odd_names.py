"""Names that aren't UTF-8 or have escapes in them, sizes and numbers that no fleet has, and an end by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvyard.cli.app import main
from kvyard.cli.plain_stream import PlainStream
from kvyard.errors import KvyardError
from kvyard.replay import replay
from kvyard.replay.report.answers import answers
from kvyard.replay.settings import make_config
from kvyard.router import RouterConfig
from kvyard.router.policies import make_policy


def row(at: int) -> str:
    return json.dumps({"timestamp": at, "input_length": 100, "output_length": 5, "hash_ids": [at]}) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(map(row, range(4))))
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 日本\n\ttab\r\n", "plain, größer, 日本\n\ttab\r\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
        ("hidden\rshown", "hidden\\rshown"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("a\u202etxt.exe", "a\\u202etxt.exe"),
        ("\r\x1b[K3 of 5", "\r\x1b[K3 of 5"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    out = StringIO()
    stream = PlainStream(out)
    assert stream.write(text) == len(text)
    stream.writelines([text])
    assert out.getvalue() == 2 * shown


def test_file_names_are_printed_without_escapes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvyard", "replay", str(tmp_path / "\x1b[2Jx.jsonl")]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"\x1b" not in done.stderr and b"\\x1b[2J" in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_names_that_are_not_utf_8(trace: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    odd = tmp_path / os.fsdecode(b"tr\xffce.jsonl")
    trace.rename(odd)
    names = {name: str(tmp_path / os.fsdecode(b"\xfe." + name.encode())) for name in ("json", "html", "jsonl")}
    given = ("--workers", "1", "--report", names["json"], "--html", names["html"], "--per-request", names["jsonl"])
    assert run("replay", str(odd), *given) == 0
    report = json.loads(Path(names["json"]).read_bytes())
    assert report["trace"]["name"].endswith("tr\ufffdce.jsonl")
    assert Path(names["html"]).stat().st_size and len(Path(names["jsonl"]).read_text().splitlines()) == 4
    capfdbinary.readouterr()
    assert run("replay", str(odd), "--workers", "1", "--json") == 0
    assert json.loads(capfdbinary.readouterr().out)["trace"]["name"] == report["trace"]["name"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 99999999999999}, "at most 100,000 ranks in all, not 99,999,999,999,999"),
        ({"workers": 10, "dp_size": 99999999999}, "at most 100,000 ranks"),
        ({"max_num_batched_tokens": 5_000_000_000}, "max_num_batched_tokens must be at most 16,777,216"),
        ({"num_gpu_blocks": 1 << 50}, "num_gpu_blocks must be at most"),
        ({"block_size": 1 << 30}, "block_size must be at most 1,048,576"),
        ({"max_model_len": 1 << 40}, "max_model_len must be at most 1,073,741,824"),
        ({"host_bytes": "999999999TiB", "bytes_per_block": 1}, "bytes of a private tier must be at most"),
        ({"host_blocks": 1 << 50, "bytes_per_block": 1}, "num_blocks of a tier must be at most"),
        ({"speedup": "1e-320"}, "speedup is '1e-320': it must be 0, or from 1e-12 to 1e"),
        ({"digest_error": 1e-320}, "digest_error"),
        ({"reserve_output": 1e308}, "reserve_output"),
    ],
)
def test_sizes_and_numbers_that_cannot_be_meant(settings: dict[str, object], said: str) -> None:
    with pytest.raises(KvyardError, match=said.replace("+", "\\+")):
        make_config(settings)


def test_times_beyond_64_bits_are_refused(trace: Path) -> None:
    with trace.open("a") as file:
        file.write(row(100_000))
    for settings in ({"speedup": 1e-12}, {"timing_speedup": 1e-12}):
        with pytest.raises(KvyardError, match="292 years"):
            replay(trace, workers=1, **settings)


def test_a_large_cache_takes_no_memory_and_no_time_is_a_time(trace: Path) -> None:
    small, large = (replay(trace, workers=1, num_gpu_blocks=blocks).report for blocks in (1 << 20, 1 << 36))
    assert large.requests == small.requests
    assert answers(replay(trace, workers=1, timing_speedup=1e15).report)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"schedule_policy": 5}, "sglang.schedule_policy must be text, and is a whole number"),
        ({"chunked_prefill_size": "big"}, "chunked_prefill_size of sglang is 'big': it must be a whole number"),
        ({"lof": 3}, "unknown setting 'lof' of sglang"),
        ("x", "sglang is 'x': it must be a table"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_a_sentence(value: object, said: str) -> None:
    with pytest.raises(KvyardError, match=said):
        make_config({"backend": "sglang", "sglang": value})


def test_a_tables_settings_are_set_one_by_one_too(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('backend = "sglang"\nworkers = 1\n[sglang]\nschedule_policy = "lof"\n')
    more = ("--set", "sglang.max-prefill-tokens=4k", "--set", "sglang.chunked_prefill_size=2048")
    report = tmp_path / "report.json"
    assert run("replay", str(trace), "--config", str(file), *more, "--report", str(report)) == 0
    table = json.loads(report.read_text())["config"]["workers"][0]["engine"]["sglang"]
    assert (table["schedule_policy"], table["max_prefill_tokens"], table["chunked_prefill_size"]) == ("lof", 4000, 2048)
    assert run("replay", str(trace), "--set", "sglang.nope=1") == 2
    assert run("replay", str(trace), "--set", "nope.x=1") == 2


def test_an_option_that_is_no_number_is_refused_in_a_sentence() -> None:
    for value in ("much", None, True):
        with pytest.raises(KvyardError, match="stickiness of the routing policy least-time must be a number"):
            make_policy(RouterConfig(options={"stickiness": value}))  # type: ignore[dict-item]


def test_an_end_by_sigterm_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvyard", "trace", "generate", str(tmp_path / "t.jsonl"), "--requests", "100m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        eventually(lambda: process.poll() is not None or any(path.stat().st_size for path in tmp_path.glob("*.part")))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and b"Traceback" not in said
    assert not list(tmp_path.iterdir())
