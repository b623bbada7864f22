"""The command: flags and files, its end, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, Gated, GatewayProcess, fleet, front

from kvyard.cli.app import main
from kvyard.engine.timing import FixedTiming

pytestmark = pytest.mark.zmq

SLOW = {"timing": FixedTiming(prefill_ms=5, decode_ms=25)}


def test_sigterm_lets_answers_go_out(tmp_path: Path) -> None:
    """By flags and a file: it serves, and at SIGTERM finishes what is under way, takes nothing more, and ends with 0."""
    with fleet(engine=SLOW) as served:
        (state,) = served.get("/admin/workers")
        stream = state["streams"][0]
        config = tmp_path / "gateway.toml"
        config.write_text('tokenizer = "bytes"\nhealth_seconds = 0.2\n[router]\npolicy = "round-robin"\n')
        engine = f"{state['url']},events={stream['endpoint']},replay={stream['replay_endpoint']},block_size=16,name=e"
        recorded, journal = tmp_path / "t.jsonl", tmp_path / "j.jsonl"
        arguments = ("--config", str(config), "--engine", engine, "--router", "kv", "--router-set", "host_credit=0.5")
        arguments += ("--record", str(recorded), "--journal", str(journal), "--set", "record_block_size=16")
        with GatewayProcess(*arguments) as process, httpx.Client(base_url=process.url, timeout=PATIENCE) as client:
            eventually(lambda: client.get("/health").status_code == 200)
            secret = "a very secret prompt that must not be logged " * 5
            assert client.post("/v1/completions", json={"prompt": secret, "max_tokens": 2}).status_code == 200
            body = {"prompt": secret, "max_tokens": 40, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                assert "policy=kv" in reply.headers["x-kvyard-decision"]
                parts = reply.iter_raw()
                text = next(parts)
                process.process.send_signal(signal.SIGTERM)
                text += b"".join(parts)
            assert text.endswith(b"data: [DONE]\n\n")
            assert process.process.wait(PATIENCE) == 0
        assert "secret" not in process.text and "Traceback" not in process.text
        assert "stopped" in process.text
        assert "secret" not in recorded.read_text() and "secret" not in journal.read_text()
        rows = [json.loads(line) for line in recorded.read_text().splitlines()]
        assert [row["output_length"] for row in rows] == [2, 40]
        assert rows[0]["hash_ids"] == rows[1]["hash_ids"]


def test_impossible_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["gateway", "--port", "0", *arguments])
        assert end.value.code == 2
        return capsys.readouterr().err

    bad = tmp_path / "bad.toml"
    bad.write_text("quue = 5\n")
    assert "did you mean queue?" in refused("--config", str(bad))
    assert "write http://HOST:PORT" in refused("--engine", "localhost:8000")
    assert "role is 'prefil': did you mean prefill? Choose one of both, prefill, decode" in refused(
        "--engine", "http://localhost:8000,role=prefil"
    )
    assert "isn't NAME=VALUE" in refused("--engine", "http://localhost:8000,x")
    assert "two engines are called e" in refused("--engine", "http://a:1,name=e", "--engine", "http://b:1,name=e")
    assert "unknown routing policy 'best'" in refused("--router", "best")
    assert "write HOST:PORT first" in refused("--dns", "vllm")
    assert "leave index_url or journal out" in refused("--index", "http://a:1", "--journal", "j")
    assert "there is no tokenizer at" in refused("--engine", "http://a:1,model=m", "--tokenizer", "/nowhere")
    bad.write_text('router = "kv"\n')
    assert "router: expected `object`" in refused("--config", str(bad))
    bad.write_text("engines = 3\n")
    assert "engines: expected `array`" in refused("--config", str(bad), "--engine", "http://a:1")
    wrong = tmp_path / "bad.json"
    wrong.write_text("[1]")
    assert "expected `object`" in refused("--config", str(wrong))
    assert "has a password in it" in refused("--engine", "http://user:secret@a:1")
    assert "is no name of a host" in refused("--dns", "a b:80")
    # These were found out only when an engine answered, and then again and again.
    assert "there is no tokenizer at" in refused("--engine", "http://127.0.0.1:1", "--tokenizer", "/nowhere")
    assert "can't write the journal" in refused("--engine", "http://127.0.0.1:1", "--journal", "/nowhere/j")
    assert "is no address of a Redis server" in refused("--engine", "http://127.0.0.1:1", "--share", "nonsense")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in refused("--port", str(taken.getsockname()[1]))
    (tmp_path / "there").write_text("")
    assert "exists" in refused("--record", str(tmp_path / "there"))


def test_limits() -> None:
    with front(1, limits={"body_bytes": 1000}) as (gated, _):
        long = gated.client.post("/v1/completions", json={"prompt": "x" * 2000})
        assert long.status_code == 413 and long.json()["error"]["type"] == "RequestEntityTooLargeError"
        many = gated.client.get("/health", headers={f"x-{at}": "y" * 1000 for at in range(70)})
        assert many.status_code == 431
        assert gated.complete("x").status_code == 200


def test_a_head_without_end_is_cut() -> None:
    with front(1) as (gated, _):
        host, port = gated.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as conn:
            conn.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
            got = b""
            try:
                for _ in range(100):
                    conn.sendall(b"y" * 10_000)
                got = conn.recv(1000)
            except ConnectionError:
                pass
        assert got == b"" or got.startswith(b"HTTP/1.1 431")


def test_nothing_is_logged_of_what_requests_say(caplog: pytest.LogCaptureFixture) -> None:
    with front(2, mock={"engine": SLOW}) as (gated, served), caplog.at_level("DEBUG", logger="kvyard"):
        for url in served.urls:
            httpx.post(f"{url}/admin/faults", json={"abort_rate": 1.0, "abort_after": 2}, trust_env=False)
        with pytest.raises(httpx.HTTPError), gated.stream("a secret", max_tokens=9) as reply:
            reply.read()
        gated.client.post("/v1/completions", content=b'{"prompt": "a secret"')
        gated.client.post("/explain", json={"body": {"prompt": "a secret"}})
        gated.idle()
    assert not re.search("secret", caplog.text)


def test_ending_with_people_in_the_queue() -> None:
    """Those who wait are served while there is time."""
    with fleet(engine=SLOW) as served:
        gated = Gated(fleets=[served.url], engine_requests=1)
        statuses: list[int] = []
        with gated:
            gated.ready(1)

            def ask() -> None:
                with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
                    body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
                    statuses.append(client.post(f"{gated.url}/v1/completions", json=body).status_code)

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            eventually(lambda: gated.gateway.traffic.counters.under_way == 4 or len(statuses) > 0)
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [200] * 4


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_an_end_before_the_beginning() -> None:
    """A fleet that doesn't answer is waited for; whoever loses patience meanwhile isn't."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with GatewayProcess("--fleet", f"http://127.0.0.1:{silent.getsockname()[1]}") as process:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1000)
                process.process.send_signal(signal.SIGINT)
                assert process.process.wait(8) == 0  # the fleet would have had ten seconds
        assert "Traceback" not in process.text and "stopped" in process.text


@pytest.mark.parametrize("streamed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signals", [1, 2])
def test_an_end_that_does_not_wait_for_ever(signals: int, streamed: bool) -> None:
    """What takes longer than it may, or than somebody likes, is cut. That is no reason for a traceback."""
    with fleet(engine=SLOW) as served:
        seconds = "1" if signals == 1 else "600"
        with GatewayProcess("--fleet", served.url, "--set", f"drain_seconds={seconds}") as process:
            body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": streamed}
            ended: list[object] = []
            began = threading.Event()

            def ask() -> None:
                try:
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        for _ in answer.iter_bytes():
                            began.set()
                        ended.append(answer)
                except httpx.HTTPError as error:
                    ended.append(error)

            with httpx.Client(base_url=process.url, timeout=PATIENCE, trust_env=False) as client:
                eventually(lambda: client.get("/health").status_code == 200)
                asking = threading.Thread(target=ask)
                asking.start()
                eventually(lambda: served.get("/admin/workers")[0]["running"])
                assert not streamed or began.wait(PATIENCE)
                process.process.send_signal(signal.SIGTERM)
                if signals == 2:
                    eventually(lambda: not listens(process.url))  # it has understood the first
                    process.process.send_signal(signal.SIGTERM)
                asking.join(PATIENCE)
            (end,) = ended
            if streamed:
                assert isinstance(end, httpx.HTTPError)
            elif isinstance(end, httpx.Response):  # on a second signal it may have no time for words
                assert end.status_code == 503 and end.headers["retry-after"] == "1"
            else:
                assert signals == 2
            assert process.process.wait(PATIENCE) == 0
        assert "Traceback" not in process.text and "ASGI" not in process.text, process.text
        # The engine's work ends with it.
        eventually(lambda: all(one["running"] == 0 for one in served.get("/admin/workers")))


def test_no_engine_is_worth_a_word() -> None:
    with GatewayProcess() as process:
        assert httpx.get(f"{process.url}/health", trust_env=False).status_code == 503
        eventually(lambda: "there is no engine: give --engine" in process.text)
        reply = httpx.post(f"{process.url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert reply.status_code == 503 and reply.headers["retry-after"]
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(PATIENCE) == 0
    assert "Traceback" not in process.text


def test_missing_packages_are_named() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from kvyard.cli.app import main; main(['gateway'])"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "the gateway needs aiohttp: pip install 'kvyard[server]'" in ended.stderr
