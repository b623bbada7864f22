"""Flow control before two real engines: requests are let in in the order that a replay predicts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tests.real.engine import DENSE, NAME, PATIENCE, Engines
from tests.server.gateway.support import Gated
from tests.waiting import eventually

from kvyard.clock import MS
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest
from kvyard.router.journal import Routed, read_journal

EARLIER = {"s": 900, "t": 300, "u": 60}
"""Tokens of each session's first prompt."""
LATER = {"v": 200, "s": 1000, "t": 800, "u": 400}
"""Tokens of the prompts that wait while both engines are busy, in the order in which they come."""
ORDERS = {"fifo": "vstu", "las": "vuts", "shortest": "svut", "progress": "stuv"}


def predicted(flow: str) -> str:
    """The order of admission in a replay of two workers with a request each."""
    rows = [
        TraceRequest(f"{name}0", 1000 * at * MS, size, 5, session=name)
        for at, (name, size) in enumerate(EARLIER.items())
    ]
    rows += [TraceRequest(f"long{number}", (3000 + number) * MS, 50, 200, session=f"l{number}") for number in range(2)]
    rows += [
        TraceRequest(f"{name}1", (3300 + 300 * at) * MS, size, 5, session=name)
        for at, (name, size) in enumerate(LATER.items())
    ]
    config = make_config(
        {
            "workers": 2,
            "router": "round-robin",
            "block_size": 32,
            "num_gpu_blocks": 250,
            "timing": "fixed:400,20",
            "engine_requests": 1,
            "flow": flow,
        }
    )
    records = sorted(
        replay(rows, config=config).records, key=lambda record: (record.arrival + record.waited, record.id)
    )
    return "".join(record.id[0] for record in records if record.id.endswith("1") and record.id[0] in LATER)


def ask(gated: Gated, session: str, tokens: int) -> None:
    prompt = [Random(f"{session} {tokens}").randrange(3, 1000) for _ in range(tokens)]
    body = {"model": NAME, "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
        client.post("/v1/completions", json=body, headers={"X-Session-Id": session}).raise_for_status()


def hold(gated: Gated, begun: threading.Semaphore, release: threading.Event) -> None:
    """Keep a place of an engine until ``release``."""
    body: dict[str, Any] = {"model": NAME, "prompt": [5] * 40, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json=body, headers={"X-Session-Id": "held"}) as reply:
            parts = reply.iter_raw()
            next(parts)
            begun.release()
            while not release.is_set():
                next(parts, None)


@pytest.mark.parametrize("flow", ORDERS)
def test_two_engines_are_given_requests_in_the_predicted_order(flow: str, engines: Engines, tmp_path: Path) -> None:
    assert predicted(flow) == ORDERS[flow]
    listed = [{"url": engines.get(number, **DENSE).url, "name": f"e{number}"} for number in range(2)]
    journal = tmp_path / "journal.jsonl"
    settings: dict[str, Any] = {"engine_requests": 1, "flow": {"policy": flow}, "router": {"policy": "round-robin"}}
    with Gated(engines=listed, tokenizer="engine", journal=str(journal), **settings) as gated:
        gated.ready(2, 0)
        for session, tokens in EARLIER.items():
            ask(gated, session, tokens)
        begun, release = threading.Semaphore(0), threading.Event()
        threads = [threading.Thread(target=hold, args=(gated, begun, release)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=PATIENCE)
        for number, (session, tokens) in enumerate(LATER.items(), 1):
            threads.append(threading.Thread(target=ask, args=(gated, session, tokens)))
            threads[-1].start()
            eventually(lambda: gated.client.get("/health").json()["queued"] == number)  # noqa: B023
            time.sleep(0.3)
        release.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    sizes = {tokens: session for session, tokens in LATER.items()}
    routed = [entry.tokens for entry in read_journal(journal) if isinstance(entry, Routed)]
    assert "".join(sizes[tokens] for tokens in routed[-4:]) == ORDERS[flow]
