"""The configuration read again while requests go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer
from tests.server.gateway.support import PATIENCE, GatewayProcess

pytestmark = pytest.mark.zmq


def test_files_that_change(tmp_path: Path) -> None:
    config, keys = tmp_path / "gateway.toml", tmp_path / "keys.toml"

    def script(head: str, body: bytes) -> Any:
        return [answer("200 OK", b'{"choices":[]}')]

    def write(*engines: ScriptedEngine, more: str = "") -> None:
        listed = "".join(f'[[engines]]\nurl = "{one.url}"\n' for one in engines)
        config.write_text(f'keys_file = "{keys}"\ntokenizer = "bytes"\nhealth_seconds = 0.2\n{more}\n{listed}')

    keys.write_text('[[keys]]\nname = "a"\nkey = "one"')
    with ScriptedEngine(script) as first, ScriptedEngine(script) as second:
        write(first)
        with (
            GatewayProcess("--config", str(config)) as process,
            httpx.Client(base_url=process.url, timeout=PATIENCE, trust_env=False) as client,
        ):

            def ask(key: str) -> int:
                body = {"model": "odd", "prompt": "x"}
                return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code

            def codes() -> set[str]:
                return {one["code"] for one in client.get("/health").json()["reasons"]}

            def logs(text: str) -> None:
                # The log arrives through a pipe, so it may be later than what /health reports.
                eventually(lambda: text in process.text, lambda: process.text)

            eventually(lambda: ask("one") == 200, lambda: process.text)
            # Another key, by the file alone.
            keys.write_text('[[keys]]\nname = "a"\nkey = "another"')
            eventually(lambda: ask("another") == 200, lambda: process.text)
            assert ask("one") == 401
            # A file that can't be used changes nothing and says so.
            keys.write_text('[[keys]]\nname = "a"')
            eventually(lambda: "config" in codes(), lambda: process.text)
            assert ask("another") == 200
            logs("either key or sha256")
            keys.write_text('[[keys]]\nname = "a"\nkey = "another"')
            eventually(lambda: "config" not in codes(), lambda: process.text)
            # An empty configuration would have no engine, and an empty file no key.
            for file in (config, keys):
                text = file.read_text()
                file.write_text("")
                eventually(lambda: "config" in codes(), lambda: process.text)
                assert ask("another") == 200
                logs(f"{file} is empty")
                file.write_text(text)
                eventually(lambda: "config" not in codes(), lambda: process.text)
            # Another engine, and what needs a restart, by a signal.
            write(second, more='queue = 5\nhost = "0.0.0.0"')
            os.kill(process.process.pid, signal.SIGHUP)

            def served_by(engine: ScriptedEngine) -> int:
                return sum("completions" in head for head, _ in engine.requests)

            eventually(lambda: ask("another") == 200 and served_by(second) > 0, lambda: process.text)
            before = served_by(first)
            assert ask("another") == 200 and served_by(first) == before
            logs("needs a restart: host")
            logs("read again: engines, queue")


def test_a_hangup_during_the_start_ends_nothing(tmp_path: Path) -> None:
    """It asks for another look at the files, which may have changed since they were read."""
    config, token = tmp_path / "gateway.toml", tmp_path / "token"
    os.mkfifo(token)

    def script(head: str, body: bytes) -> Any:
        return [answer("200 OK", b'{"choices":[]}')]

    def write(engine: ScriptedEngine) -> None:
        config.write_text(f'tokenizer = "bytes"\ntoken_file = "{token}"\n[[engines]]\nurl = "{engine.url}"\n')

    def opened() -> int:
        try:
            return os.open(token, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return 0  # nobody reads yet

    with ScriptedEngine(script) as first, ScriptedEngine(script) as second:
        write(first)
        with GatewayProcess("--config", str(config)) as process:
            writer = eventually(
                opened, lambda: process.text
            )  # the configuration was read, and its token is about to be
            write(second)
            process.process.send_signal(signal.SIGHUP)
            os.write(writer, b"secret")
            os.close(writer)
            eventually(lambda: "read again: engines" in process.text, lambda: process.text)
            body, headers = {"model": "odd", "prompt": "x"}, {"authorization": "Bearer secret"}
            with httpx.Client(base_url=process.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
                eventually(lambda: client.post("/v1/completions", json=body).status_code == 200, lambda: process.text)
            assert any("completions" in head for head, _ in second.requests)
