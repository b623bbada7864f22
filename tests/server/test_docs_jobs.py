"""The pages about jobs: their commands are run as they stand there, with other ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.support import PATIENCE

from kvyard.cli.app import build
from kvyard.server.gateway.config import GatewayConfig

pytestmark = pytest.mark.zmq

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECONDS = 300
"""A plan takes minutes of a busy core."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("page", "said"),
    [
        pytest.param(
            "how-to/record-and-replay.md", ["requests   6", "6 requests", "6 requests"], marks=pytest.mark.slow
        ),
        pytest.param(
            "how-to/check-an-event-stream.md", ["stored", "", "Nothing is broken", "", ""], marks=pytest.mark.slow
        ),
        pytest.param(
            "start/questions.md",
            [
                "Take 16 H100 as 4 workers of 4 (TP4)",
                "Within 5% of it, host_bytes=256GiB is the cheapest",
                "Take least-time: lowest mean TTFT",
                "Where the reuse went",
                "A request takes",
                "Take split=2+3",
                "beside no hints: Reused",
                "Take eviction=slru",
                "routed again after a failure",
                "Nothing is broken",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_commands(page: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first = free_ports(8)
    ports = {port: str(first + at) for at, port in enumerate(("5557", "5558", "5559", "5560", "8000", "8001", "8080"))}
    text = re.sub(r"\\\n\s*", "", (DOCS / page).read_text())
    lines = [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hidden = {"KVYARD_TOKEN", "KVYARD_UPSTREAM_TOKEN"}
    env = {**{name: value for name, value in os.environ.items() if name not in hidden}, "PATH": path, "COLUMNS": "120"}
    running: list[subprocess.Popen[bytes]] = []
    answers = iter(said)
    heard: list[str] = []
    try:
        for line in lines:
            line = re.sub(rf"\b({'|'.join(ports)})\b", lambda found: ports[found[1]], line)
            if line.endswith("&"):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
                running.append(subprocess.Popen(line.removesuffix("&"), shell=True, cwd=tmp_path, env=env, **quiet))
                continue
            words = next(answers) if line.startswith("kvyard") else ""

            def done(line: str = line, words: str = words) -> bool:
                ran = subprocess.run(
                    line,
                    shell=True,
                    cwd=tmp_path,
                    env=env,
                    text=True,
                    capture_output=True,
                    check=False,
                    timeout=SECONDS,
                )
                # What was just done may take a second to be written.
                heard.append(f"{line}: {ran.returncode}\n{ran.stdout}{ran.stderr}")
                return ran.returncode == 0 and (words in heard[-1] or words in " ".join(heard[-1].split()))

            eventually(done, lambda: heard[-1])
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait(PATIENCE)
    assert next(answers, None) is None


def test_flags_and_settings_on_pages_are_true() -> None:
    for page in ("record-and-replay", "deploy", "doctor", "check-an-event-stream"):
        text = (DOCS / "how-to" / f"{page}.md").read_text()
        for name in re.findall(r"--set (\w+)=", text):
            assert name in GatewayConfig.__struct_fields__, name
        for name in re.findall(r"`deploy/([\w./-]+)`", text):
            assert (ROOT / "deploy" / name).exists()
    page = (DOCS / "how-to" / "deploy.md").read_text()
    for name in re.findall(r"`((?:kubernetes|grafana)/[\w./-]*|\w+\.yaml|Dockerfile)`", page):
        assert (ROOT / "deploy" / name).exists(), name
    options = {flag for parameter in build().commands["doctor"].load().params for flag in parameter.opts}
    options |= {flag for parameter in build().commands["doctor"].load().params for flag in parameter.secondary_opts}
    options.add("--http-port")  # of an endpoint picker, which it says
    assert set(re.findall(r"(--[a-z][a-z-]+)", (DOCS / "how-to" / "doctor.md").read_text())) <= options


def test_the_row_on_the_page_can_be_read(tmp_path: Path) -> None:
    from kvyard.replay.traces import open_trace

    (row,) = re.findall(r"```json\n(.*?)\n```", (DOCS / "how-to" / "record-and-replay.md").read_text(), re.DOTALL)
    first = {**json.loads(row), "timestamp": 0}
    del first["delay"]
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(first)}\n{row}\n")
    _, request = open_trace(str(tmp_path / "t.jsonl"))
    assert request.id_block_size == 16 and request.delay == 8_500_000 and request.session == "s1"
