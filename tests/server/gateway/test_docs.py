"""The commands of ``docs/how-to/gateway.md`` run, with other ports; settings and flags on the gateway's pages exist."""

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
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.support import PATIENCE

from kvyard.cli.app import build
from kvyard.router import RouterConfig
from kvyard.server.gateway.access.keys import KeyFile
from kvyard.server.gateway.config import GatewayConfig, convert
from kvyard.server.gateway.routes import PASSED
from kvyard.server.gateway.traffic import NAMES, P
from kvyard.server.indexer.config import settings_as

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "how-to" / "gateway.md").read_text()
SETTINGS = (DOCS / "reference" / "gateway-settings.md").read_text()
BEHAVIOUR = (DOCS / "reference" / "gateway-behaviour.md").read_text()
OTHERS = [(DOCS / "how-to" / name).read_text() for name in ("gateway-roles.md", "secure-the-gateway.md")]
ALL = "\n".join([PAGE, SETTINGS, BEHAVIOUR, *OTHERS])


@pytest.mark.zmq
def test_try_it(tmp_path: Path) -> None:
    first = free_ports(6)
    ports = {"8000": str(first), "8080": str(first + 4)}
    (block,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    lines = [re.sub(r"\b(8000|8080)\b", lambda found: ports[found[1]], line[2:]) for line in block.splitlines()]
    hidden = {"KVYARD_TOKEN", "KVYARD_ADMIN_TOKEN", "KVYARD_UPSTREAM_TOKEN"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    running: list[subprocess.Popen[bytes]] = []
    heard: list[str] = []
    said = tmp_path / "said.txt"

    def run(line: str) -> bool:
        ran = subprocess.run(
            line, shell=True, cwd=tmp_path, env=env, text=True, capture_output=True, check=False, timeout=PATIENCE
        )
        heard.append(ran.stdout + ran.stderr)
        return ran.returncode == 0

    def why() -> str:
        return f"{heard[-1]}\n{said.read_text()}\nended: {[process.poll() for process in running]}"

    try:
        for line in lines:
            if not line.endswith("&"):
                eventually(lambda: run(line), why)  # noqa: B023
                continue
            with said.open("ab") as out:
                group = subprocess.Popen(
                    line[:-1], shell=True, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True
                )
                running.append(group)
            if line.startswith("kvyard mock"):
                eventually(lambda: run(f"curl -sf localhost:{ports['8000']}/health"), why)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait(PATIENCE)
    decisions = [one for text in heard for one in re.findall(r"x-kvyard-decision: (.*)\r?\n", text)]
    assert "hit=4/4" in decisions[-1]


def test_settings_and_flags_are_there() -> None:
    files = [tomllib.loads(toml) for toml in re.findall(r"```toml\n(.*?)```", ALL, re.DOTALL)]
    (keys,) = [settings_as(one, KeyFile, "the page") for one in files if "keys" in one]
    assert keys.keys[0].digest and keys.models
    tables = [convert(one, "the page") for one in files if "keys" not in one]
    assert [one.names[0].host for one in tables if one.names] == ["vllm"]
    assert [one.disaggregation.decider for one in tables if not one.names and not one.services] == ["uncached"]
    options = {flag for one in build().commands["gateway"].load().params for flag in one.opts}  # type: ignore[attr-defined]
    said = set(re.findall(r"(--[a-z][a-z-]+)", re.sub(r"```sh\nvllm.*?```", "", ALL, flags=re.DOTALL)))
    theirs = {
        "--enable-prompt-tokens-details",
        "--router-mode",
        "--kv-events-config",
        "--workers",
        "--kv-events",
        "--speed",
    }
    assert said - theirs <= options, said - theirs - options
    named = set(re.findall(r"`([a-z_]+)`", SETTINGS))
    assert set(GatewayConfig.__struct_fields__) <= named, set(GatewayConfig.__struct_fields__) - named
    assert "host_credit" in RouterConfig.__struct_fields__
    for name in re.findall(rf"{P}(\w+)", ALL):
        assert name in NAMES, name
    for path in PASSED:
        assert f"`{path}`" in ALL or f"POST {path}`" in ALL, path
