"""``kvyard calibrate``: from a live engine, from files, and what is refused."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from benchmarks.h200_engine import DATA
from tests.cli.support import exit_code
from tests.lab.test_validate import aiperf, recording, records, vllm_bench
from tests.server.mock.support import Served

from kvyard.cli.app import main
from kvyard.engine.timing import FixedTiming
from kvyard.engine.timing.profile import load_profile

run = partial(exit_code, "calibrate")


def test_a_live_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with Served(token="secret") as served:
        key = tmp_path / "key"
        key.write_text("secret\n")
        code = run(
            served.url,
            *("-o", str(path), "--token-file", str(key), "--max-prompt", "128", "--max-batch", "4", "--rounds", "2"),
            *("--no-async-scheduling", "--max-num-batched-tokens", "2048"),
        )
    assert code == 0
    out, err = capsys.readouterr()
    assert "probe 1 of" in err
    assert "a prompt of 16" in err
    assert f"written: {path}" in err
    assert "mean, unseen" in out
    assert "Not seen, and so not known" in out
    assert "Passes are decided when they start: as you say." in out
    assert "--set block_size=16 --set num_gpu_blocks=512 --set max_num_batched_tokens=2048" in out
    profile = load_profile(path=path)
    assert profile.name == "mock"
    assert profile.request_ms > 0  # HTTP takes some time here


@pytest.mark.parametrize("write", [vllm_bench, aiperf, recording])
def test_files_of_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path, write: object) -> None:
    assert callable(write)
    log = write(tmp_path, records())
    path = tmp_path / "mine.json"
    assert run("--from", str(log), "-o", str(path), "--max-num-batched-tokens", "2048") == 0
    out = capsys.readouterr().out
    assert "tokens only" in out or write is vllm_bench
    assert load_profile(path=path).errors["all"].unseen < 0.2


@pytest.mark.slow
def test_a_log_shows_whether_passes_are_decided_ahead(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run("--from", str(DATA / "runA.json.xz"), "-o", str(path)) == 0
    assert "Passes are decided when they start" in capsys.readouterr().out
    assert load_profile(path=path).held_out["ttft"] < 0.05


def test_files_of_passes_are_what_profile_fit_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    sweep = str(tmp_path / "sweep.jsonl")
    lines = (DATA / "sweep.jsonl").read_text().splitlines()
    Path(sweep).write_text("\n".join(lines[::9]))
    assert run("--from", sweep, "-o", str(one)) == 0
    with pytest.raises(SystemExit) as exit_:
        main(["profile", "fit", sweep, "-o", str(other)])
    assert exit_.value.code == 0
    assert one.read_bytes() == other.read_bytes()


class _InOnePiece(http.server.BaseHTTPRequestHandler):
    """A server that lists a model and doesn't stream."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer({"data": [{"id": "m"}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"choices": [{"text": "x", "finish_reason": "length"}]})

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def in_one_piece() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _InOnePiece) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_engines_that_cant_be_probed(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(token="secret") as served, in_one_piece() as plain:
        for argv, words in (
            ((served.url,), "HTTP 401: "),
            ((served.url,), "; give its API key with --token-file"),
            ((plain, "--model", "other"), "doesn't serve other: it has m"),
            ((plain,), "answers in one piece: calibrate needs streamed answers"),
            (("http://127.0.0.1:9",), "http://127.0.0.1:9 can't be reached: no connection"),
            (("localhost",), "localhost is no address of an endpoint: give one such as http://localhost:8000\n"),
            ((plain, "--rounds", "0"), "rounds must be at least 1"),
        ):
            assert run(*argv) == 2
            err = capsys.readouterr().err
            assert words in err
            assert len(err.splitlines()) == 1


def test_files_that_cant_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"kind": "decode", "batch": 1, "ctx": 9, "ms": 1}\n' * 5)
    other = tmp_path / "other.json"
    other.write_text('{"something": 1}')
    single = vllm_bench(tmp_path, records(), output_lens=[1] * 60, itls=[[]] * 60)
    for argv, words in (
        ((), "say what to calibrate from: the URL of a live engine, or --from FILE"),
        (("http://127.0.0.1:9", "--from", str(few)), "say what to calibrate from"),
        (("--from", str(few)), "at least 4 passes with prompts and 4 with decode steps, got 0 and 5"),
        (("--from", str(other)), "no run that kvyard knows"),
        (("--from", str(single)), "no answer of it has two tokens or more"),
        (("--from", str(tmp_path / "none")), "no such file"),
        (("--from", str(few), "-o", str(tmp_path / "no" / "such.json")), "there is no directory"),
        (("--from", str(few), "-o", str(tmp_path)), "it is a directory"),
        (("--from", str(few), "--model", "m"), "--model is for live engines: leave it out with --from"),
        (("--from", str(few), "--rounds", "2"), "--rounds is for live engines: leave it out with --from"),
    ):
        assert run(*argv) == 2
        err = capsys.readouterr().err
        assert words in err
        assert len(err.splitlines()) == 1


def test_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with Served(engine={"timing": FixedTiming(prefill_ms=200, decode_ms=100)}) as served:
        command = "import sys; from kvyard.cli.app import main; main(sys.argv[1:])"
        with subprocess.Popen(
            [sys.executable, "-c", command, "calibrate", served.url, "-o", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            assert "probe 1 of" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("interrupted: nothing was written\n")
    assert "Traceback" not in err
    assert out == ""
    assert not path.exists()
