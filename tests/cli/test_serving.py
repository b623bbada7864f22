"""How a server says that it is ready: files for scripts in any language."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httpx", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

import httpx
from tests.server.support import PATIENCE

from kvyard.cli.app import main


@pytest.mark.zmq
@pytest.mark.parametrize(
    "command",
    [
        ["mock", "--workers", "2", "--kv-events"],
        pytest.param(["gateway"], marks=pytest.mark.slow),
        pytest.param(["index", "serve"], marks=pytest.mark.slow),
    ],
)
def test_files_are_there_while_requests_are_answered(tmp_path: Path, command: list[str]) -> None:
    ready, ports = tmp_path / "ready.json", tmp_path / "ports"
    for stale in (ready, ports):
        stale.write_text("left by one that was killed")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvyard", *command, "--port", "0", "--ready-file", ready, "--port-file", ports],
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: process.poll() is not None or (ready.exists() and ready.read_text().startswith("{")))
        assert process.poll() is None
        found = json.loads(ready.read_text())
        assert found["pid"] == process.pid
        assert [url.rpartition(":")[2] for url in found["urls"]] == ports.read_text().split()
        for url in found["urls"]:
            assert httpx.get(f"{url}/health", trust_env=False).status_code in (200, 503)
        if command[0] == "mock":
            assert [len(worker["streams"]) for worker in found["workers"]] == [1, 1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert not ready.exists() and not ports.exists()


def test_a_place_that_is_none_is_refused_before_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["mock"], ["gateway"], ["index", "serve"]):
        with pytest.raises(SystemExit) as end:
            main([*command, "--port", "0", "--ready-file", str(tmp_path)])
        assert end.value.code == 2
        assert "it is a directory" in capsys.readouterr().err
