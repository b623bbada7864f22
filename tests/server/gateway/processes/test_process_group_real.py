"""``kvyard gateway --processes N`` with real processes before real mocks: spread, kills, limits, hits, and the end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, GatewayProcess, fleet, together
from tests.server.threaded import metrics_of
from tests.server.tls import certificate

from kvyard.cli.app import main
from kvyard.engine.timing import FixedTiming

pytestmark = [pytest.mark.zmq, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's SO_REUSEPORT")]

QUICK = {"engine": {"timing": FixedTiming(prefill_ms=2, decode_ms=1)}}


class GroupProcess(GatewayProcess):
    """A gateway of several processes."""

    def __init__(self, folder: Path, processes: int, *arguments: str) -> None:
        self._file = folder / "ready.json"
        several = ("--processes", str(processes), "--ready-file", str(self._file), "--tokenizer", "bytes")
        super().__init__(*several, *arguments)

    def pids(self) -> list[int]:
        """Of the processes, as they were at the start."""
        found: list[int] = json.loads(self._file.read_text())["processes"]
        return found

    def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """Over a connection of its own, so that any process may get it."""
        return httpx.post(self.url + path, json=body, timeout=PATIENCE, trust_env=False)

    def metrics(self) -> dict[str, float]:
        return metrics_of(httpx.get(f"{self.url}/metrics", timeout=PATIENCE, trust_env=False).text)

    def restarts(self) -> float | None:
        """How often a process was started again; ``None`` where the kernel gave the question to one that is killed just now."""
        try:
            return self.metrics()["kvyard_gateway_process_restarts_total"]
        except httpx.TransportError:
            return None

    def spread(self) -> list[float]:
        """Requests that came to each process."""
        found = self.metrics()
        return [value for name, value in found.items() if name.startswith("kvyard_gateway_process_requests_total{")]

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=PATIENCE, trust_env=False).json()
        return found

    def wait(self, engines: int) -> GroupProcess:
        def well() -> bool:
            health = self.health()
            whole = health["engines"].get("ready") == engines == health["streams"].get("fresh")
            return whole and self.metrics()["kvyard_gateway_processes"] == len(self.pids())

        eventually(well, lambda: (self.health(), self.text))
        return self


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def group(folder: Path, processes: int, workers: int = 2, *arguments: str, **mock: Any) -> Iterator[GroupProcess]:
    with fleet(workers=workers, **{**QUICK, **mock}) as served:
        with GroupProcess(folder, processes, "--fleet", served.url, *arguments) as process:
            yield process.wait(workers)


@pytest.mark.slow
def test_a_group_serves_and_ends(tmp_path: Path) -> None:
    """Requests spread, one that is killed comes back, and Ctrl-C ends all of them and frees the port."""
    with group(tmp_path, 2) as process:
        address = ("127.0.0.1", int(process.url.rpartition(":")[2]))
        first, second = process.pids()
        eventually(lambda: process.ask(prompt="x", max_tokens=1).status_code == 200 and min(process.spread()) >= 1)
        os.kill(second, signal.SIGKILL)
        eventually(lambda: process.restarts() == 1)
        process.wait(2)
        assert process.ask(prompt="x", max_tokens=1).status_code == 200
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(PATIENCE) == 0
        assert not alive(first) and not alive(second)
        with socket.create_server(address):
            pass
    assert "stopped" in process.text and "Traceback" not in process.text
    assert f"process 2 ({second}) ended by signal 9 and is started again" in process.text


@pytest.mark.slow
def test_errors_are_reported_once() -> None:
    command = [sys.executable, "-m", "kvyard", "gateway", "--port", "0", "--processes", "3"]
    command += ["--engine", "http://127.0.0.1:1", "--tokenizer", "/nowhere"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stderr.count("there is no tokenizer at") == 1, done.stderr


def test_figures_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--processes", "0"], ["--processes", "65"]):
        with pytest.raises(SystemExit) as end:
            main(["gateway", "--port", "0", *arguments])
        assert end.value.code == 2 and "processes" in capsys.readouterr().err


@pytest.mark.slow
def test_two_gateways_do_not_share_a_port_by_mistake(tmp_path: Path) -> None:
    with group(tmp_path, 2, 1) as process:
        port = process.url.rpartition(":")[2]
        command = [sys.executable, "-m", "kvyard", "gateway", "--port", port, "--processes", "2"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2 and "choose another --port" in done.stderr


@pytest.mark.slow
def test_kills_under_load_cost_others_nothing(tmp_path: Path) -> None:
    """Of requests that another process has, none fails; the load that a killed one had is gone; three kills in a row."""
    with group(tmp_path, 3, 2, engine={"timing": FixedTiming(prefill_ms=5, decode_ms=5)}) as process:
        stop = threading.Event()
        ended: list[str] = []

        def ask() -> None:
            with httpx.Client(base_url=process.url, timeout=PATIENCE, trust_env=False) as client:
                while not stop.is_set():
                    try:
                        reply = client.post("/v1/completions", json={"prompt": "x" * 200, "max_tokens": 8})
                        ended.append(str(reply.status_code))
                    except httpx.HTTPError:
                        ended.append("cut")

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for kills, victim in enumerate(process.pids(), 1):
            done = ended.count("200") + 60
            eventually(lambda done=done: ended.count("200") > done)
            os.kill(victim, signal.SIGKILL)
            eventually(lambda kills=kills: process.restarts() == kills)
        done = ended.count("200") + 60
        eventually(lambda: ended.count("200") > done)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        # A client has one request under way: each kill cuts those of the killed process alone, and none is refused.
        assert set(ended) <= {"200", "cut"} and ended.count("cut") <= 3 * 12, ended
        process.wait(2)
        health = process.health()
        assert health["under_way"] == 0, health
        engines = httpx.get(f"{process.url}/admin/engines", trust_env=False).json()
        assert [one["in_flight"] for one in engines] == [0, 0]


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with group(tmp_path, 2, 1) as process:
        pids = process.pids()
        process.process.kill()
        eventually(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_sigterm_lets_answers_go_out(tmp_path: Path) -> None:
    """Also where all processes get it, as from systemd: that is no second signal."""
    with group(tmp_path, 2, 1, engine={"timing": FixedTiming(prefill_ms=5, decode_ms=25)}) as process:
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            with client.stream("POST", f"{process.url}/v1/completions", json=body) as reply:
                parts = reply.iter_raw()
                text = next(parts)
                for pid in (*process.pids(), process.process.pid):
                    os.kill(pid, signal.SIGTERM)
                text += b"".join(parts)
        assert text.endswith(b"data: [DONE]\n\n")
        assert process.process.wait(PATIENCE) == 0
    assert "is started again" not in process.text.replace("ended with code 0 and is started again", "")


@pytest.mark.slow
def test_rates_hold_across_processes_and_a_reload(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\nrequests_per_minute = 30\n')
    with group(tmp_path, 2, 1, "--keys-file", str(keys)) as process:
        statuses: list[int] = []

        def ask(key: str) -> None:
            for _ in range(20):
                headers = {"authorization": f"Bearer {key}"}
                body = {"prompt": "x", "max_tokens": 1}
                reply = httpx.post(f"{process.url}/v1/completions", json=body, headers=headers, trust_env=False)
                statuses.append(reply.status_code)

        began = time.monotonic()
        together([partial(ask, "sk-a")] * 3)
        took = time.monotonic() - began
        assert min(process.spread()) >= 1
        assert statuses.count(200) + statuses.count(429) == 60
        assert 30 <= statuses.count(200) <= 30 + took / 2 + 1, "one more for each two seconds"
        keys.write_text('[[keys]]\nname = "a"\nkey = "sk-b"\n')
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: process.metrics()["kvyard_gateway_reloads_total"] >= 1)
        statuses.clear()
        eventually(lambda: (statuses.clear(), together([partial(ask, "sk-a")] * 2), set(statuses) == {401})[2])


@pytest.mark.slow
def test_prefix_hits_are_as_good_as_with_one(tmp_path: Path) -> None:
    """Conversations through 1 and through 3 processes, each turn over a new connection: what engines found cached is the same
    within one part in a hundred, and all that was promised was there.
    """
    shares: dict[int, float] = {}
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        with fleet(workers=4, **QUICK) as served:
            arguments = ("--fleet", served.url, "--tokenizer", "bytes", "--ready-file", str(folder / "ready.json"))
            started: GatewayProcess
            if processes == 1:
                started = GatewayProcess(*arguments)
            else:
                started = GroupProcess(folder, processes, "--fleet", served.url)
            with started as process:
                eventually(lambda: httpx.get(f"{process.url}/health").json()["streams"].get("fresh") == 4)
                shares[processes] = cached_share(process.url, sessions=24, turns=6)
                lines = httpx.get(f"{process.url}/metrics").text
                missing = re.findall(r"^kvyard_gateway_engine_missing_tokens_total\{.*\} ([0-9.]+)$", lines, re.M)
                assert not sum(map(float, missing)), lines
    assert abs(shares[1] - shares[3]) <= 0.01, shares
    assert shares[1] > 0.6


def cached_share(url: str, sessions: int, turns: int) -> float:
    """Of the prompt tokens of conversations, what engines found."""
    prompts = cached = 0
    lock = threading.Lock()

    def talk(number: int) -> None:
        nonlocal prompts, cached
        words = random.Random(number)
        text = ""
        for _ in range(turns):
            text += "".join(words.choice("abcdefgh ") for _ in range(320))
            reply = httpx.post(
                f"{url}/v1/completions", json={"prompt": text, "max_tokens": 2}, timeout=PATIENCE, trust_env=False
            )
            usage = reply.json()["usage"]
            with lock:
                prompts += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]

    for first in range(0, sessions, 6):
        together([partial(talk, number) for number in range(first, first + 6)])
    return cached / prompts


@pytest.mark.slow
def test_engines_may_come_and_go_by_any_process(tmp_path: Path) -> None:
    with group(tmp_path, 3, 2) as process:
        assert process.ask("/admin/remove", engine="worker0").status_code == 200
        for _ in range(12):
            found = httpx.get(f"{process.url}/admin/engines", trust_env=False).json()
            assert [one["name"] for one in found] == ["worker1"]
            assert process.ask(prompt="x", max_tokens=1).headers["x-mock-worker"] == "worker1"
        os.kill(process.pids()[1], signal.SIGKILL)
        eventually(lambda: process.metrics()["kvyard_gateway_process_restarts_total"] == 1)
        eventually(lambda: process.metrics()["kvyard_gateway_processes"] == 3)
        for _ in range(12):
            assert process.ask(prompt="x", max_tokens=1).headers["x-mock-worker"] == "worker1"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["empty", "missing", "broken"])
def test_files_that_cannot_be_used_change_nothing_for_a_process_that_restarts(tmp_path: Path, how: str) -> None:
    """It begins with the keys, engines and certificate that the others use, also those that were read since the start."""
    config, keys, (cert, key) = tmp_path / "gateway.toml", tmp_path / "keys.toml", certificate(tmp_path)
    with fleet(workers=1, **QUICK) as served:
        engine = f'[[engines]]\nurl = "{served.get("/admin/workers")[0]["url"]}"\nname = "one"\n'
        config.write_text("queue = 77\n" + engine)
        keys.write_text('[[keys]]\nname = "a"\nkey = "old"\n')
        given = ("--config", str(config), "--keys-file", str(keys), "--tls-cert", cert, "--tls-key", key)
        with GroupProcess(tmp_path, 2, *given) as process:

            def ask(shown: str) -> int:
                headers = {"authorization": f"Bearer {shown}"}
                body = {"prompt": "x", "max_tokens": 1}
                reply = httpx.post(
                    f"{process.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE, verify=False
                )
                return reply.status_code

            def alike(shown: str, status: int) -> bool:
                return {ask(shown) for _ in range(12)} == {status}

            eventually(lambda: alike("old", 200), lambda: process.text)
            keys.write_text('[[keys]]\nname = "a"\nkey = "new"\n')
            eventually(lambda: alike("new", 200) and alike("old", 401), lambda: process.text)
            for file in (config, keys, Path(cert)):
                if how == "missing":
                    file.unlink()
                else:
                    file.write_text("" if how == "empty" else "[[\n")
            os.kill(process.pids()[1], signal.SIGKILL)
            eventually(lambda: "and is started again" in process.text)

            def whole() -> bool:
                health = httpx.get(f"{process.url}/health", timeout=PATIENCE, verify=False).json()
                restarts = httpx.get(f"{process.url}/metrics", timeout=PATIENCE, verify=False).text
                return health["ready"] and "kvyard_gateway_processes 2.0" in restarts

            eventually(whole, lambda: process.text)
            assert alike("new", 200) and alike("old", 401), process.text
    assert "Error:" not in process.text and "Traceback" not in process.text, process.text
