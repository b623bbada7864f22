"""``kvyard mock`` as people run it: it starts, says where it is, ends when told to, and keeps requests to itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually, retried

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.mock.support import PATIENCE, Process, Served

from kvyard.cli.app import main

pytestmark = pytest.mark.zmq

SECRET = "the-launch-code-is-0000"
PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "mock-engine.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_lets_a_stream_finish_and_ends(number: int) -> None:
    with Process("--workers", "2", "--kv-events", "--verbose", "--timing", "fixed:1,5") as server:
        url, other = server.urls(2)
        body = {"prompt": SECRET, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False) as reply:
            lines = reply.iter_lines()
            begun = next(lines)
            server.process.send_signal(number)
            rest = [line for line in lines if line]
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in (begun, *rest) if line != "data: [DONE]"]
        assert rest[-1] == "data: [DONE]" and len("".join(texts)) == 100
        assert server.process.wait(PATIENCE) == 0
        server._reader.join(PATIENCE)
        assert "stopped" in server.text and "Traceback" not in server.text
        assert SECRET not in server.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{other}/health", trust_env=False)


def test_a_stream_that_takes_too_long_is_cut() -> None:
    ended = threading.Event()
    with Served(speed=0.05, drain_seconds=1.0) as served:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}

        def read() -> None:
            try:
                with httpx.stream(
                    "POST", f"{served.url}/v1/completions", json=body, timeout=30, trust_env=False
                ) as reply:
                    for _ in reply.iter_lines():
                        pass
            except httpx.TransportError:
                pass
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: served.get("/admin/workers")[0]["running"] == 1)
    reader.join(PATIENCE)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "error_rate=2"], "error_rate"),
        (["--fault", "error_rate=x"], "must be a number"),
        (["--set", "max_num_seq=4"], "did you mean"),
        (["--set", "block_size=4", "--block-size", "8"], "set twice"),
        (["--kv-events", "--kv-events-config", "{}"], "leave the other flags out"),
        (["--host-blocks", "100", "--set", "host_scope=shared"], "shared"),
        (["--lora", "nameless"], "NAME=PATH"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["mock", "--port", "0", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.slow
def test_the_page_s_commands(tmp_path: Path) -> None:
    """The commands of ``docs/how-to/mock-engine.md`` are run as they stand there, with other ports."""
    first = free_ports(12)
    ports = {str(8000 + n): str(first + n) for n in range(3)} | {str(5557 + n): str(first + 4 + n) for n in range(4)}

    def moved(text: str) -> str:
        return re.sub("|".join(ports), lambda found: ports[found[0]], text)

    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "test_router.py").write_text(moved(program))
    lines = [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
        for line in re.sub(r"\\\n\s*", "", block).splitlines()
        if line.startswith("$ ")
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = {
        "shell": True,
        "cwd": tmp_path,
        "env": {**os.environ, "PATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        "text": True,
    }
    running: list[subprocess.Popen[str]] = []
    try:
        for line in map(moved, lines):
            if line.endswith("&"):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
                running.append(subprocess.Popen(line.removesuffix("&"), **common, **quiet))
                continue
            run = partial(subprocess.run, line, **common, capture_output=True, check=True, timeout=PATIENCE)
            retried(run, subprocess.CalledProcessError)
        assert len(running) == 2 and len(lines) >= 6
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE)  # of the shell, which is told too
