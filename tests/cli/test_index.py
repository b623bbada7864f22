"""``kvyard index``: a real process that serves and ends gracefully, and questions to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

import httpx
import pytest
from tests.cli.support import exit_code
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.index.fleet import PRESETS
from tests.server.indexer.test_routes import word_tokenizer
from tests.server.support import LiveRank, Served
from tests.server.wire import Wire

pytestmark = pytest.mark.zmq

TEXT = list(range(1, 17))


run = partial(exit_code, "index")


class Process:
    """``kvyard index serve`` in a process of its own, on any port."""

    def __init__(self, *argv: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvyard", "index", "serve", "--port", "0", *argv],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        self.said: list[str] = []

    def __enter__(self) -> Process:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("serving at "):
                self.url = line.removeprefix("serving at ").strip()
                return self
        raise AssertionError("".join(self.said))

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        rest = self.process.communicate(timeout=110)[1]
        return self.process.returncode, "".join(self.said) + rest

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=110)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_gracefully(number: int, tmp_path) -> None:
    """With a worker from a TOML file, a stream that is followed, and a connection that is kept open."""
    with LiveRank("a", 0, PRESETS["full"]) as rank:
        config = tmp_path / "index.toml"
        config.write_text(
            f"""
            block_size = 4
            [streams]
            probe_ms = 100
            [[subscriptions]]
            instance_id = "a"
            model_name = "m"
            endpoint = "{rank.endpoint}"
            replay_endpoint = "{rank.replay}"
            clear_scope = "all"
            [[subscriptions.groups]]
            block_size = 4
            """
        )
        rank.run(TEXT)
        with Process("--config", str(config)) as served, httpx.Client(base_url=served.url, trust_env=False) as client:
            ask = {"model_name": "m", "token_ids": TEXT}
            eventually(lambda: client.post("/score", json=ask).json()["results"][0]["best"])
            code, said = served.end(number)
            assert code == 0 and said.endswith("stopped\n") and "Traceback" not in said


def test_tokens_come_from_the_environment_or_a_file(tmp_path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with Process(KVYARD_TOKEN="s3cret") as one:
        assert httpx.get(f"{one.url}/workers", trust_env=False).status_code == 401
        with Process("--token-file", str(tmp_path / "token"), "--peer", one.url, "--verbose") as two:
            headers = {"Authorization": "Bearer s3cret"}
            assert httpx.get(f"{two.url}/workers", headers=headers, trust_env=False).json() == []
            code, said = two.end()
            assert code == 0 and "took over 0 streams" in said and "s3cret" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--config", "nowhere.toml"], "can't read nowhere.toml"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--host", "no.such.host.invalid"], "can't find"),
        (["serve", "--backend", "oracle"], "backend"),
        (["serve", "--block-size", "0"], "block_size"),
        (["serve", "--tokenizer", "x"], "MODEL=PATH"),
        (["serve", "--token-file", "/no/such"], "can't read the token"),
        (["query"], "give the prompt in one way"),
        (["query", "--tokens", "1", "--text", "x"], "give the prompt in one way"),
        (["query", "--tokens", "1,x"], "has no token ids"),
        (["query", "--tokens", "-1"], "no token id"),
        (["query", "--tokens-file", "/no/such"], "can't read /no/such"),
        (["query", "--text-file", "/no/such"], "--tokenizer"),
        (["query", "--tokens", "1", "--url", "http://127.0.0.1:1"], "no server answers"),
        (["query", "--tokens", "1", "--replay", "tcp://x:1"], "--replay belongs to --endpoint"),
        (["query", "--tokens", "1", "--endpoint", "x"], "not an endpoint"),
        (
            ["query", "--tokens", "1", "--endpoint", "tcp://x:1", "--replay", "tcp://x:2", "--replay", "tcp://x:3"],
            "one for each",
        ),
    ],
)
def test_refusals_are_one_sentence(argv, message, capsys) -> None:
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "blok_size = 4", "unknown setting 'blok_size': did you mean block_size?"),
        ("c.toml", "[limits]\nbodies = 1", "unknown setting 'bodies' of limits: did you mean body_bytes?"),
        ("c.toml", "block_size = 'x'", "block_size is 'x': it must be a whole number such as 500, 20k or 1.5m"),
        ("c.toml", "[[subscriptions]]\nmodel_name='m'", "subscriptions[0].endpoint is missing"),
        ("c.toml", "[[subscriptions]]\nmodel_name='m'\nendpoint='tcp://x:1'", "subscriptions[0]: a stream speaks for"),
        (
            "c.toml",
            "[[subscriptions]]\nmodel_name='m'\nendpoint='x'\ninstance_id=1",
            "subscriptions[0]: 'x' is not an endpoint",
        ),
        ("c.toml", "a = ", "is not TOML"),
        ("c.json", "{", "is not JSON"),
        ("c.json", '{"tier_weights": {}}', "tier_weights is empty"),
        ("c.json", '{"tier_weights": {"tape": 1}}', "tier_weights"),
        ("c.json", '{"direct": {"algorithm": "md5"}}', "unknown hash algorithm 'md5'"),
        ("c.json", '{"backend_options": {"size": 1}}', "backend_options don't fit"),
        ("c.json", '{"backend": "redis", "peers": ["http://x"]}', "peers are for the memory backend"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(name, text, message, tmp_path, capsys) -> None:
    path = tmp_path / name
    if "backend_options" in text:
        text = text[:-1] + ', "models": ["m"]}'
    path.write_text(text)
    assert run("serve", "--port", "0", "--config", str(path)) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: ") and message in err and err.count("\n") == 1, err


@pytest.fixture(scope="module")
def served():
    with Wire() as wire, Served(block_size=4, token="t") as service:
        service.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: service.get("/workers")[0]["status"] == "active")
        wire.stored([11, 12], TEXT[:8], 4)
        wire.stored([11, 12, 13], TEXT[:12], 4, medium="CPU")
        eventually(lambda: service.get("/workers")[0]["listeners"]["0"]["sequence"] == 1)
        yield service


class TestQuery:
    def ask(self, served: Served, *argv: str) -> int | str | None:
        return run("query", "--url", served.url, "--model", "m", *argv)

    def test_a_table(self, served: Served, capsys, monkeypatch) -> None:
        monkeypatch.setenv("KVYARD_TOKEN", "t")
        assert self.ask(served, "--tokens", ",".join(map(str, TEXT)), "--explain") == 0
        out = capsys.readouterr().out
        assert "16 tokens, 4 full blocks of 4" in out
        row = next(line.split() for line in out.splitlines() if line.startswith("1@0"))
        assert row[:6] == ["1@0", "12", "8", "4", "0", "2.75"] and "fresh" in row and "100%" in row
        assert "1@0 could use 12 of 15 tokens" in out and "(full) reaches 12 tokens" in out

    def test_json_and_nobody(self, served: Served, capsys, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("KVYARD_TOKEN", "t")
        (tmp_path / "prompt").write_text(json.dumps([5, *TEXT]))
        assert self.ask(served, "--tokens-file", str(tmp_path / "prompt"), "--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert found["score"]["results"][0]["best"] is None and "explain" not in found
        assert self.ask(served, "--tokens", "1 2 3 4 5", "--salt", "s") == 1

    def test_refusals_of_the_service_are_shown(self, served: Served, capsys, monkeypatch, tmp_path) -> None:
        monkeypatch.delenv("KVYARD_TOKEN", raising=False)
        assert self.ask(served, "--tokens", "1") == 2
        assert "the token is missing or wrong" in capsys.readouterr().err
        (tmp_path / "token").write_text("t")
        assert self.ask(served, "--tokens", "1", "--token-file", str(tmp_path / "token"), "--tenant", "x") == 2
        assert "no worker is registered" in capsys.readouterr().err
        assert self.ask(served, "--text", "x", "--token-file", str(tmp_path / "token")) == 2
        assert "no tokenizer is configured" in capsys.readouterr().err

    def test_text_with_a_tokenizer_of_ones_own(self, served: Served, capsys, monkeypatch, tmp_path) -> None:
        tokenizers = pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")
        monkeypatch.setenv("KVYARD_TOKEN", "t")
        path = word_tokenizer(tmp_path, tokenizers)
        (tmp_path / "prompt.txt").write_text("beta gamma delta ? beta")
        assert self.ask(served, "--text-file", str(tmp_path / "prompt.txt"), "--tokenizer", path, "--json") == 0
        assert json.loads(capsys.readouterr().out)["score"]["results"][0]["best"]["tokens"] == 4
        assert self.ask(served, "--text", "x", "--tokenizer", str(tmp_path / "prompt.txt")) == 2
        assert "is no tokenizer.json" in capsys.readouterr().err

    def test_a_transient_index_of_engines(self, capsys) -> None:
        """Nothing runs but the engines: what they hold is asked of their replay sockets."""
        with LiveRank("a", 0, PRESETS["full"]) as one, LiveRank("b", 0, PRESETS["full"]) as two:
            one.run(TEXT)
            two.run(TEXT[:9])
            argv = ["query", "--tokens", " ".join(map(str, TEXT)), "--seconds", "30", "--block-size", "4", "--json"]
            for rank in (one, two):
                argv += ["--endpoint", rank.endpoint, "--replay", rank.replay]
            assert run(*argv, "--explain") == 0
            found = json.loads(capsys.readouterr().out)
            tokens = {match["instance_id"]: match["tokens"] for match in found["score"]["results"][0]["workers"]}
            assert tokens == {one.endpoint: 12, two.endpoint: 8}
            assert len(found["explain"]["explanations"]) == 2
