"""``kvyard validate``: what people see, and what they see when something is wrong."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.lab.test_validate import ENGINE, engine_log, records, vllm_bench, workload
from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.test_page import sound, titled

from kvyard.replay.traces.writing import write_trace

SETTINGS = ["--block-size", "16", "--num-gpu-blocks", "400", "--set", "max_num_seqs=8"]
RIGHT = [*SETTINGS, "--timing", "fixed:18,6"]
SLOW = [*SETTINGS, "--timing", "fixed:36,6"]


run = partial(exit_code, "validate")


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return vllm_bench(tmp_path, records())


def test_a_table(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench, *RIGHT) == 0
    out = capsys.readouterr().out
    assert "60 requests · replayed against measured, mean: TTFT ±0.0%, TPOT ±0.0%, E2E ±0.0%" in out
    assert "Times: fixed" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["error", *["±0.0%"] * 4] in lines and ["off,", "each", *["0.0%"] * 4] in lines
    assert re.search(r"Output tokens per second +[\d.]+ +[\d.]+ +±0.0%", out)
    assert "\x1b" not in out


def test_json_and_rows(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench, *SLOW, "--json", "--label", "mine", "--per-request", tmp_path / "rows.jsonl") == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["kind"], value["run"], value["requests"]) == ("kvyard validation", "mine", 60)
    assert value["latency"]["ttft"]["error"]["mean"] > 0.5 and value["hit_share"] is None
    assert set(value["latency"]["ttft"]) == {"measured", "replayed", "error", "scatter"}
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 60 and "pairs" not in value
    mean = sum(row["ttft"][1] for row in rows) / 60
    assert mean == pytest.approx(value["latency"]["ttft"]["replayed"]["mean"])


def test_a_limit_on_the_error(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench, *RIGHT, "--within", "5") == 0
    assert run(bench, *SLOW, "--within", "5") == 1
    assert re.search(r"error of TTFT, TPOT and E2E is [\d.]+%, more than 5%", capsys.readouterr().err)


def test_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = engine_log(tmp_path, records(shared=True))
    write_trace(workload(), tmp_path / "trace.jsonl")
    assert run(log, *RIGHT, "--workload", tmp_path / "trace.jsonl", "--trace-block-size", "16") == 0
    out = capsys.readouterr().out
    hits = re.search(r"Prompt tokens found cached +([\d.]+%) +([\d.]+%)", out)
    assert hits is not None and hits[1] == hits[2] != "0.00%"
    assert "Taken from the run: max_num_seqs" not in out


def test_refusals(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.json").write_text("")
    for argv, words in (
        ([tmp_path / "no.json"], "no such file"),
        ([tmp_path / "empty.json"], "it is empty"),
        ([bench, "--model", "llama-3.1-8b", "--num-gpu-blocks", "400"], "add gpu, one of"),
        ([bench, *RIGHT, "--set", "speedup=2"], "speedup changes when requests come"),
        ([bench, *RIGHT, "--html", tmp_path / "no" / "v.html"], "can't write"),
        ([bench, *SETTINGS, "--timing", "nonsense"], "nonsense"),
    ):
        assert run(*argv) == 2
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
    assert run() == 2


@pytest.mark.browser
@pytest.mark.timeout(400)
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True)])
def test_the_page_in_a_browser(tab: Tab, bench: Path, tmp_path: Path, width: int, dark: bool) -> None:
    assert run(bench, *SLOW, "--html", tmp_path / "v.html") == 0
    tab.open(tmp_path / "v.html", width, dark=dark)
    sound(tab, 8, width)
    assert all(len(titles) == 2 for titles in titled(tab))
    dots = tab.ask("[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('circle.dot').length)")
    single = sum(one.output_length == 1 for one in workload())
    assert dots == [60, 60 - single, 60, 0, 0, 0, 0, 0] and ENGINE["block_size"] == 16
