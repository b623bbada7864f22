"""A real SGLang 0.5.23 on CPU, on loopback. What it has no CPU build for is in ``stand_in``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.real.engine import MODELS, NAME, TOPIC, RealEngine
from tests.waiting import eventually

STAND_IN = Path(__file__).parent / "stand_in"


class SglangEngine(RealEngine):
    """An SGLang server in a process group of its own. ``settings.blocks`` are pages of its radix cache."""

    def command(self) -> list[str]:
        settings = self.settings
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": TOPIC,
        }
        return [
            *(str(self.python), "-m", "sglang.launch_server", "--model-path", str(MODELS / settings.model)),
            *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--disable-cuda-graph"),
            *(
                "--page-size",
                str(settings.block_size),
                "--max-total-tokens",
                str(settings.blocks * settings.block_size),
            ),
            *("--context-length", str(settings.longest), "--skip-server-warmup", "--enable-cache-report"),
            *("--enable-metrics", "--kv-events-config", json.dumps(events)),
            *settings.flags,
        ]

    def facts(self) -> dict[str, Any]:
        """The attention groups of a model with windows: SGLang's events name none."""
        config = json.loads((MODELS / self.settings.model / "config.json").read_text())
        if config.get("sliding_window") is None:
            return {}
        size = self.settings.block_size
        window = {"kind": "sliding_window", "block_size": size, "window": config["sliding_window"]}
        return {"groups": [{"kind": "full", "block_size": size}, window]}

    def environment(self) -> Mapping[str, str]:
        found = dict(super().environment())
        return {**found, "PYTHONPATH": str(STAND_IN)}

    def generate(self, ids: list[int], tokens: int, salt: str | None = None) -> Any:
        """SGLang's own route, which reports ids and cached tokens."""
        reply = self.client.post("/generate", json=_body(ids, tokens, salt))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def flush(self) -> None:
        """Empty the cache, which it refuses while a request is in flight."""
        eventually(lambda: self.client.post("/flush_cache").status_code == 200)

    def hang_up(self, ids: list[int], tokens: int, salt: str | None = None) -> list[int]:
        """Ask for an answer and disconnect after its first chunk, whose ids are returned."""
        with self.client.stream("POST", "/generate", json={**_body(ids, tokens, salt), "stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    return list(json.loads(line[6:])["output_ids"])
        raise AssertionError("no token came")


def _body(ids: list[int], tokens: int, salt: str | None) -> dict[str, Any]:
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": parameters}
    return body if salt is None else {**body, "extra_key": salt}
