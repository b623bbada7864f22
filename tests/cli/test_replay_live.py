"""``kvyard replay --live``: what people see, and what is refused by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import typer
from tests.cli.support import exit_code
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION
from tests.server.mock.support import Served
from tests.server.support import PATIENCE

from kvyard.cli.replay import say_proof
from kvyard.engine.timing import FixedTiming
from kvyard.lab.rehearsal.run import Proof, Tolerance
from kvyard.replay.report.files import read_report
from kvyard.replay.report.numbers import spread
from kvyard.replay.traces.writing import write_trace

SIXTEEN = ["--trace-block-size", 16]
SMALL = ["--block-size", 16, "--num-gpu-blocks", 400, "--max-model-len", 6000, "--timing", "fixed:20,10"]


run = partial(exit_code, "replay")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(sessions(25, arrivals="poisson:rate=10", think="exponential:0.5"), path)
    return path


@pytest.mark.zmq
@pytest.mark.slow
def test_a_fleet_of_its_own(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    options = [
        "--live",
        "self",
        "--prove",
        "--speed",
        6,
        "--workers",
        2,
        "--router",
        "kv",
        "--report",
        report,
        "--slo",
        "ttft=500",
    ]
    code = run(trace, *SIXTEEN, *SMALL, *options)
    out, err = capsys.readouterr()
    assert code == ("NOT within the tolerance" in out), (
        "a machine that is too busy for the tolerance is told so, with exit code 1"
    )
    for words in (
        "25 requests",
        "live at a mock fleet, kv",
        "2 workers",
        "at 6 times the speed",
        "Goodput",
        "Lateness",
    ):
        assert words in out
    assert "Live = offline: all " in out and "25 routed" in out
    assert "written" in err
    found = read_report(report)
    assert found.live is not None and found.requests["finished"] == 25
    assert found.config["workers"][0]["count"] == 2  # type: ignore[index]


def test_a_run_beyond_the_tolerance_fails(capsys: pytest.CaptureFixture[str]) -> None:
    late, soon = (spread([ms]) for ms in (5000.0, 1.0))
    proof = Proof(
        difference=None, apart="", decisions={}, requests=1, first_token=soon, last_token=soon, tolerance=Tolerance()
    )
    say_proof(proof)
    with pytest.raises(typer.Exit) as end:
        say_proof(msgspec.structs.replace(proof, last_token=late))
    assert end.value.exit_code == 1
    assert "NOT within" in capsys.readouterr().out


def test_an_endpoint(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Served(
        engine={"num_gpu_blocks": 4096, "max_model_len": 8192, "timing": FixedTiming(prefill_ms=0.2, decode_ms=0.1)},
        served_model_name="tiny",
        mean_output_tokens=3,
    ) as served:
        assert (
            run(trace, *SIXTEEN, "--live", f"{served.url}/v1/", "--concurrency", 4, "--limit", 4, "--timeout", 60) == 0
        )
        out, _ = capsys.readouterr()
        assert "4 requests" in out and f"live at {served.url}" in out and "Not to be seen from outside" in out
        assert run(trace, *SIXTEEN, "--live", served.url, "--any-length", "--limit", 4, "--concurrency", 4) == 0
        assert "another length" in capsys.readouterr().out
        assert run(trace, *SIXTEEN, "--live", served.url, "--served-model-name", "huge", "--limit", 2) == 2
        assert "The model `huge` does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--live", "http://localhost:1", "--router", "kv"], "router is the endpoint's own business"),
        (["--live", "http://localhost:1", "--set", "watermark=0.1"], "watermark is the endpoint's own business"),
        (["--live", "http://localhost:1", "--prove"], "--prove"),
        (["--live", "http://localhost:1", "--bounds"], "--bounds"),
        (["--live", "http://localhost:1", "--speed", "0"], "speed must be a number above 0"),
        (
            ["--live", "elsewhere"],
            "elsewhere is no address of an endpoint: give one such as http://localhost:8000, or self",
        ),
        (["--live", "self", "--event-lag", "5ms"], "event_lag can't be set with --live"),
        (["--live", "self", "--peer-pull", "host"], "peer_pull can't be set with --live: workers of a live fleet know"),
        (["--live", "self", "--autoscale", "threshold"], "autoscale can't be set with --live: a live fleet has"),
        (["--live", "self", "--set", "plans=off"], "plans can't be set"),
        (["--live", "self", "--set", "samples=10"], "samples can't be set"),
        (["--live", "self", "--token-file", "x"], "--token-file is for --live URL"),
        (["--live", "self", "--served-model-name", "x"], "--served-model-name is for --live URL"),
        (["--live", "self", "--host-blocks", "1k", "--host-scope", "shared"], "say private"),
        (["--live", "self", "--timeout", "-1"], "timeout_s must be"),
        (["--live", "self", "--any-length"], "--any-length is for --live URL"),
        (["--speed", "2"], "--speed is for live runs"),
        (["--timeout", "2"], "--timeout is for live runs"),
        (["--prove"], "--prove is for live runs"),
        (["--token-file", "x"], "--token-file is for live runs"),
    ],
)
def test_is_refused_by_name(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONVERSATION, "--limit", 3, *options) == 2
    out, err = capsys.readouterr()
    assert words in err and not out


def test_tables_of_workers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text('[[workers]]\ncount = 1\n[[workers]]\ncount = 1\nname = "x"\n')
    assert run(CONVERSATION, "--live", "self", "--config", config) == 2
    assert "equal but for their roles" in capsys.readouterr().err
    config.write_text('[[workers]]\ncount = 2\nfail = "5s"\n')
    assert run(CONVERSATION, "--live", "self", "--config", config) == 2
    assert "leave fail out" in capsys.readouterr().err


def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    report, rows = tmp_path / "r.json", tmp_path / "q.jsonl"
    with Served(engine={"num_gpu_blocks": 40_000, "max_model_len": 200_000}) as served:
        options = ["--live", served.url, "--report", report, "--per-request", rows]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvyard", "replay", str(CONVERSATION), *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "KVYARD_TOKEN"},
        )
        try:
            eventually(
                lambda: (
                    served.metrics().get(
                        'vllm:request_success_total{engine="0",finished_reason="length",model_name="mock"}', 0
                    )
                    >= 4  # a client hears of an end a little later than the server knows it
                )
            )
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
        served.check()
    assert process.returncode == 130, err
    assert "Interrupted" in err and "The run was interrupted" in out
    found = read_report(report)
    assert not found.complete and 1 <= found.requests["finished"] <= found.requests["all"] < 12_031
    partial = tmp_path / "q.partial.jsonl"
    assert not rows.exists() and partial.name in out + err
    assert len(partial.read_text().splitlines()) == found.requests["all"]
