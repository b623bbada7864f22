"""A real vLLM engine on loopback: started, waited for, killed; its log is kept, and shown where something fails.

Engines are slow to start (25 s alone on two cores), so tests share them: ``Engines`` keeps the last few, and hands the same one
out for the same settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"
"""Where ``scripts/tiny_models.py`` puts them."""
PATIENCE = 480.0
"""Seconds that an engine gets to start: the machine may be busy."""
NAME = "tiny"
"""Name of the model for clients."""
TOPIC = "kv-events"
DENSE: dict[str, Any] = {
    "model": "llama",
    "blocks": 250,
    "lora": ("lora-a", "lora-b"),
    "environment": (("VLLM_ENABLE_RESPONSES_API_STORE", "1"),),  # else it keeps no responses
}
HYBRID: dict[str, Any] = {"model": "gemma3", "blocks": 160, "block_size": 64}
"""Settings of engines that tests share; so small that they evict all the time."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that an engine is started with."""

    model: str = "llama"
    """A folder of ``build/models``: ``llama`` has full attention only, ``gemma3`` has full and sliding-window groups."""
    block_size: int = 32
    """vLLM's attention on CPU takes multiples of 32."""
    hash_algorithm: str = "sha256_cbor"
    blocks: int = 1000
    longest: int = 4096
    events: bool = True
    lora: tuple[str, ...] = ()
    """Adapters, which are folders of ``build/models`` too."""
    flags: tuple[str, ...] = ()
    """Further ones, as on vLLM's command line."""
    environment: tuple[tuple[str, str], ...] = ()


class RealEngine:
    """A vLLM server in a process group of its own. A context manager; ``start`` and ``kill`` may follow each other."""

    def __init__(self, python: Path, log: Path, settings: EngineSettings) -> None:
        self.settings = settings
        self.python, self.log = python, log
        first = free_ports(3)
        self.port, self.events_port, self.replay_port = first, first + 1, first + 2
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where its KV events are published."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay_endpoint(self) -> str:
        """Where lost ones can be had again."""
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def tokenizer(self) -> Path:
        return MODELS / self.settings.model / "tokenizer.json"

    def command(self) -> list[str]:
        """How it is started."""
        settings = self.settings
        command = [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(MODELS / settings.model), "--served-model-name", NAME, "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            # The model in the engine's own process: one less that imports vLLM.
            *("--distributed-executor-backend", "uni"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(settings.longest)),
            *("--block-size", str(settings.block_size), "--num-gpu-blocks-override", str(settings.blocks)),
            *("--enable-prefix-caching", "--prefix-caching-hash-algo", settings.hash_algorithm),
            "--enable-prompt-tokens-details",
        ]
        if settings.events:
            # Publishers bind where the address has a wildcard only; the machine's firewall is as it is with any vLLM.
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.replay_port}",
                "topic": TOPIC,
            }
            command += ["--kv-events-config", json.dumps(events)]
        if settings.lora:
            modules = [f"{name}={MODELS / name}" for name in settings.lora]
            command += [
                "--enable-lora",
                "--max-loras",
                str(len(modules)),
                "--max-lora-rank",
                "8",
                "--lora-modules",
                *modules,
            ]
        return [*command, *settings.flags]

    def facts(self) -> dict[str, Any]:
        """Settings of a gateway about this engine that it can't be asked."""
        return {}

    def environment(self) -> Mapping[str, str]:
        # PYTHONPATH would bring the caller's packages in, unless a test asks for it. With the tests' folder for bytecode, vLLM
        # would be compiled again, which takes longer than its start.
        left_out = {"PYTHONPATH", "CI", "PYTHONPYCACHEPREFIX"}
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        ours = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Threads of one tiny operation that wait for each other are slow where others use the machine too.
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        return kept | ours | dict(self.settings.environment)

    # -- its life -------------------------------------------------------------------------------------------------------

    def start(self) -> RealEngine:
        """Start it, and wait until it serves. Raises ``AssertionError`` with the end of its log where it doesn't."""
        assert self._process is None, "it runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def _wait_until_healthy(self) -> None:
        stop = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health", timeout=5.0).status_code == 200:
                    return
            assert self._process is not None
            assert self._process.poll() is None, f"the engine ended before it served:\n{self.tail()}"
            assert time.monotonic() < stop, f"the engine didn't serve within {PATIENCE:g} s:\n{self.tail()}"
            time.sleep(0.2)

    def kill(self) -> None:
        """End it and its workers at once, as ``kill -9`` does; nothing is said to clients."""
        process, self._process = self._process, None
        if process is not None:
            # The whole group: the server's child that runs the model would live on without it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Kill it, and be done with it."""
        self.kill()
        self.client.close()

    def __enter__(self) -> RealEngine:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    # -- asking it ------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        reply = self.client.get(path)
        assert reply.status_code == 200, (reply.status_code, reply.text)
        return reply.json()

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        reply = self.client.post(path, json={"model": NAME, **body})
        assert reply.status_code == status, (reply.status_code, reply.text)
        return reply.json()

    def complete(self, prompt: Any, **body: Any) -> Any:
        """A completion at temperature 0."""
        return self.post("/v1/completions", **{"prompt": prompt, "max_tokens": 4, "temperature": 0, **body})

    def cached(self, prompt: Any, **body: Any) -> int:
        """Tokens of ``prompt`` that were there."""
        details = self.complete(prompt, **body)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"] or 0) if details else 0

    def metrics(self) -> dict[str, float]:
        """Per sample, with its labels, the value."""
        lines = self.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


class Engines:
    """The engines of a test session: one for each settings that were asked for, and not too many at once."""

    def __init__(self, python: Path, folder: Path, most: int = 3) -> None:
        self.python, self.folder, self.most = python, folder, most
        self._engines: dict[tuple[EngineSettings, int], RealEngine] = {}
        self._made = 0

    def get(self, number: int = 0, **settings: Any) -> RealEngine:
        """The running engine with these ``EngineSettings``, started where there is none; ``number`` tells equal ones apart.

        What it has cached is left from tests before: start prompts with something of your own. The engine that wasn't asked for
        the longest is killed where there are too many.
        """
        asked = EngineSettings(**settings)
        key = asked, number
        engine = self._engines.pop(key, None)
        if engine is None:
            while len(self._engines) >= self.most:
                self._engines.pop(next(iter(self._engines))).close()
            self._made += 1
            engine = RealEngine(self.python, self.folder / f"engine-{self._made}-{asked.model}.log", asked)
        self._engines[key] = engine
        return engine if engine.running else engine.start()

    def logs(self) -> dict[str, str]:
        """Per engine that lives, the end of its log."""
        return {engine.log.name: engine.tail(25) for engine in self._engines.values()}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
