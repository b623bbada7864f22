"""Tests of a router against engines that need no GPU.

To run them: ``pip install 'kvyard[server,zmq]' pytest && pytest examples/router_under_test``.
"""

import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvyard.events.types import Stored
from kvyard.testing import FleetServer, StreamReader

sys.path.insert(0, str(Path(__file__).parent))
from router import PrefixRouter

SYSTEM = "You answer in one sentence, you never guess, and you say where you know it from. " * 4


class Routed:
    """A fleet with the router in front of it."""

    def __init__(self, fleet: FleetServer, url: str) -> None:
        self.fleet = fleet
        self.url = url

    def ask(self, prompt: str) -> dict[str, Any]:
        """The usage that the engine reports."""
        body = json.dumps({"model": self.fleet.model, "prompt": prompt, "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer)["usage"])


@pytest.fixture
def routed(mock_fleet: Callable[..., FleetServer]) -> Iterator[Routed]:
    fleet = mock_fleet(workers=3, block_size=16, speed=100)
    server = PrefixRouter(fleet.urls).serve()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Routed(fleet, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()


def cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def cached_at(engine: str) -> float:
    """Prompt tokens that an engine says it has computed or found, by its metrics."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))


def test_a_prompt_that_comes_again_is_found_in_the_cache(routed: Routed) -> None:
    first, again = routed.ask(SYSTEM + "Why is the sky blue?"), routed.ask(SYSTEM + "Why is grass green?")
    assert cached(first) == 0
    assert cached(again) >= len(SYSTEM) // 16 * 16


def test_a_shared_prefix_is_stored_once_in_the_fleet(routed: Routed, event_stream: Callable[..., StreamReader]) -> None:
    streams = [event_stream(routed.fleet, worker=worker) for worker in range(3)]
    for question in ("Why is the sky blue?", "Why is grass green?", "Why is snow white?"):
        routed.ask(SYSTEM + question)

    def stored(events: Any) -> int:
        return sum(len(event.hashes) for event in events if isinstance(event, Stored))

    asked = [url for url in routed.fleet.urls if cached_at(url)]
    assert len(asked) == 1
    holder = streams[routed.fleet.urls.index(asked[0])]
    holder.wait_for(lambda events: stored(events) >= len(SYSTEM) // 16)
    assert sum(stored(stream.events) > 0 for stream in streams) == 1


def test_an_engine_that_dies_is_noticed(routed: Routed) -> None:
    routed.fleet.kill(0)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{routed.fleet.urls[0]}/health", timeout=5)
    routed.fleet.revive(0)
    assert urllib.request.urlopen(f"{routed.fleet.urls[0]}/health", timeout=5).status == 200
