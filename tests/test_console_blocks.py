"""Every console block of the README and of docs/ is run, as a reader would, in a folder of its own.

Pages that a test of their own runs, with what each command has to say, are named in ``ELSEWHERE``. Commands that need what no
test has (a cluster, a GPU, a real engine) are named in ``NOT_HERE``, with the reason.
"""

from __future__ import annotations

import lzma
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from tests.ports import free_ports
from tests.testing.support import OPTIONS
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TRACE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
SECONDS = 900

ELSEWHERE = {
    "replay.md": "tests/replay/test_docs.py",
    "size-a-host-tier.md": "tests/replay/test_docs.py",
    "record-and-replay.md": "tests/server/test_docs_jobs.py",
    "check-an-event-stream.md": "tests/server/test_docs_jobs.py",
    "questions.md": "tests/server/test_docs_jobs.py",
    "gateway.md": "tests/server/gateway/test_docs.py",
    "mock-engine.md": "tests/server/mock/test_fleet_process.py",
    "index-service.md": "tests/server/indexer/test_docs.py",
}
NOT_HERE = {
    r"vllm bench serve": "a real vLLM",
    r"kvyard validate vllm-": "a run of a real vLLM",
    r"pod-\d": "a cluster",
    r"kvyard doctor tcp://localhost:5557": "an engine that gets the prompt while it is watched",
    r"kvyard doctor recording": "a recording of your own",
    r"kvyard expect requests": "requests and metrics of an engine of your own",
    r"kvyard doctor --gateway": "a gateway with traffic",
    r"kvyard calibrate http": "an engine with nothing else to do for minutes",
    r"profile:mine\.json": "what calibrate wrote",
    r"--live http": "an endpoint that is yours",
    r"^(KVYARD_PURE=1 )?pip install": "the network",
    r"^make demo": "a clone",
    r"^helm|^kubectl|^docker": "a cluster",
}
REAL_TIME = ("live",)
"""Pages whose commands take as long as the trace does: theirs is of 18 s, that of others of an hour."""
PORTS = ("5557", "5558", "5559", "8000", "8080", "8090", "9000")


def pages() -> list[Path]:
    return [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "```console" in page.read_text()]


def commands(page: Path) -> list[str]:
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_every_page_with_console_blocks_is_run_by_some_test() -> None:
    names = {page.name for page in pages()}
    assert set(ELSEWHERE) <= names
    for name, test in ELSEWHERE.items():
        text = (ROOT / test).read_text() if (ROOT / test).exists() else ""
        assert name in text or Path(name).stem in text, f"{test} doesn't run {name}"
    told = [line for page in pages() for line in commands(page)]
    unused = [
        pattern for pattern in NOT_HERE if "^helm" not in pattern and not any(re.search(pattern, line) for line in told)
    ]
    assert not unused, "reasons for commands that no page has"


@pytest.mark.slow
@pytest.mark.zmq
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in pages() if page.name not in ELSEWHERE], ids=lambda page: page.stem)
def test_console_blocks(page: Path, tmp_path: Path) -> None:
    _prepare(tmp_path, 1 if page.stem in REAL_TIME else 200)
    first = free_ports(len(PORTS) * 4)
    ports = {port: str(first + 4 * at) for at, port in enumerate(PORTS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "PYTEST_ADDOPTS": " ".join(OPTIONS)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for line in commands(page):
            if any(re.search(pattern, line) for pattern in NOT_HERE):
                continue
            line = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: ports[found[1]], line)
            line = line.replace("examples/data/mooncake_conversation.jsonl.xz", "trace.jsonl").replace(
                "TRACE", "trace.jsonl"
            )
            serves = re.match(r"kvyard (gateway|mock|index serve)\b", line)
            if line.endswith("&") or serves:
                with (tmp_path / f"log{len(running)}").open("wb") as log:
                    how = {"cwd": tmp_path, "env": environment, "stdout": log, "stderr": log, "start_new_session": True}
                    running.append(subprocess.Popen(["bash", "-c", line.removesuffix("&")], **how))
                _await_start(running[-1], tmp_path / f"log{len(running) - 1}")
                continue
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env=environment,
                text=True,
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
            # How soon tokens came is the machine's business, and the short trace here may miss an SLO that the page's keeps.
            decided = "--prove" in line and "Live = offline" in done.stdout
            missed = "--slo" in line and done.returncode == 1 and "SLO NOT met" in done.stdout
            assert done.returncode == 0 or decided or missed, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait(60)


def _prepare(folder: Path, step: int) -> None:
    """What the pages take for granted: a trace (each ``step``-th request of a real one), the examples, and a few reports."""
    (folder / "examples").symlink_to(ROOT / "examples")
    with lzma.open(TRACE, "rt") as lines:
        (folder / "trace.jsonl").write_text("".join(islice(lines, 0, 60 * step, step)))
    for name in ("rr", "kv", "kv-host"):
        command = [
            sys.executable,
            "-m",
            "kvyard",
            "replay",
            "trace.jsonl",
            "--limit",
            "60",
            "-q",
            "--report",
            f"{name}.json",
        ]
        subprocess.run([*command, "--label", name], cwd=folder, check=True, timeout=SECONDS)


def _await_start(process: subprocess.Popen[bytes], log: Path) -> None:
    def seen() -> bool:
        return bool(re.search(rb"serving|picker at", log.read_bytes())) or process.poll() is not None

    eventually(seen, log.read_text)
    assert process.poll() is None, log.read_text()
