"""The commands of ``docs/how-to/index-service.md`` are run as they stand there, with other ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.support import PATIENCE

from kvyard.server.indexer.config import convert

pytestmark = pytest.mark.zmq

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "how-to" / "index-service.md").read_text()


def test_try_it(tmp_path: Path) -> None:
    first = free_ports(5)
    ports = {"5557": first, "5558": first + 1, "8090": first + 2, "8091": first + 3}

    def moved(text: str) -> str:
        return re.sub("|".join(ports), lambda found: str(ports[found[0]]), text)

    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "engine.py").write_text(moved(program))
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(lines) == 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running: list[subprocess.Popen[str]] = []

    def run(line: str) -> str:
        line = moved(line).replace("kvyard index query", f"kvyard index query --url http://localhost:{ports['8090']}")
        common = {"shell": True, "cwd": tmp_path, "env": {**os.environ, "PATH": path}, "text": True}
        if line.endswith("&"):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            running.append(subprocess.Popen(line.removesuffix("&"), **common, **quiet))
            return ""
        return subprocess.run(line, **common, capture_output=True, check=False, timeout=PATIENCE).stdout

    def until(line: str, words: str) -> None:
        eventually(lambda: words in run(line), lambda: (line, run(line)))

    try:
        engine, serve, register, query, ask, second = lines
        run(engine)
        run(serve)
        until(register, '"status":"ok"')
        (answer,) = re.findall(r"`(\{\"scores\".*?\})`", PAGE)
        until(query, answer)
        until(ask, "could use 16 of 16 tokens")
        run(second)
        until(query.replace("8090", "8091"), answer)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE)


def test_the_configuration_is_one() -> None:
    import tomllib

    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = convert(tomllib.loads(text), "the page")
    assert len(config.subscriptions) == 3 and config.subscriptions[0].dp_size == 4
    settings = set(re.findall(r"`(\w+)`", PAGE))
    assert {name for name in config.__struct_fields__ if name not in settings and name not in text} == set()


def test_the_doctors_codes_are_all_listed() -> None:
    texts = tomllib.loads((DOCS.parent / "src/kvyard/server/doctor/texts.toml").read_text())
    codes = {name.partition(".")[0] for name in texts} | {"salt", "lora", "ranks"}
    listed = set(re.findall(r"`([a-z-]+)`", (DOCS / "how-to" / "doctor.md").read_text()))
    assert len(codes) >= 40 and codes <= listed
