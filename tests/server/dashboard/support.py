"""Shared parts of the dashboard's tests: a server that shows whatever it is given, and viewers that read its stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
from tests.server.support import PATIENCE

from kvyard.server.application import Application
from kvyard.server.dashboard.routes import Dashboard
from kvyard.server.dashboard.view import (
    DecisionView,
    ExpectationView,
    FleetView,
    Latency,
    SessionView,
    StreamView,
    TenantView,
    TierView,
    Totals,
    TransferView,
    WorkerStatus,
    prompt_sources,
)
from kvyard.server.http import Bounds
from kvyard.server.running import Running, listen

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp; ' \" \u202e Ü"
"""A name as nobody should have it."""


class Fixed:
    """A source that says what it was told; counters may be moved from any thread."""

    def __init__(self, view: FleetView) -> None:
        self.now = view
        self.looks = 0
        self.broken = False

    def view(self) -> FleetView:
        self.looks += 1
        if self.broken:
            raise RuntimeError("this source is broken on purpose")
        return msgspec.structs.replace(self.now, at=time.time())


def everything(name: str = "w{}", workers: int = 2, since: float = 1000.0, decisions: int = 3) -> FleetView:
    """A view with something in every field."""
    names = [name.format(number) for number in range(workers)]
    prompts = prompt_sources((50, 20, 10), computed=15, elsewhere=5)
    return FleetView(
        kind="gateway",
        at=since,
        since=since,
        version="1.2.3",
        policy="kv",
        notes=[f"about {names[0]}"],
        workers=[
            WorkerStatus(
                name=one,
                model=f"model of {one}",
                url=f"http://{one}",
                state="ready" if number else "suspect",
                reason=f"{one} was late",
                ranks=2,
                running=3,
                waiting=1,
                requests=10,
                prompt_tokens=100,
                output_tokens=1000,
                tiers=[
                    TierView(name="G1", held=10, idle=20, capacity=100),
                    TierView(name="G2", idle=200, capacity=1000),
                    TierView(name="G3", idle=5),
                ],
                prompts=prompts,
            )
            for number, one in enumerate(names)
        ],
        streams=[
            StreamView(
                name=f"{one}@0",
                worker=one,
                endpoint=f"tcp://{one}",
                state="stale" if number else "fresh",
                reason=f"{one} lost something",
                seq=41,
                batches=42,
                waiting=1,
                gaps=2,
                missed=3,
                restarts=4,
                lag_ms=1.5,
                age_s=12.0,
            )
            for number, one in enumerate(names)
        ],
        transfers=[
            TransferView(worker=one, source="G1", target="G2", under_way=1, landed=7, bytes=7_000_000, bandwidth=1e9)
            for one in names
        ],
        decisions=[
            DecisionView(
                number=number,
                at=since,
                id=f"request {number} of {names[0]}",
                worker=names[0],
                why=f"{names[0]} costs least",
                cost=12.5,
                tokens=160,
                blocks=10,
                tiers={"device": 4, "host": 2},
                best=9,
                best_worker=names[-1],
                said=f"Whole story of {names[0]}\nsecond line",
            )
            for number in range(decisions, 0, -1)
        ],
        expectation=ExpectationView(
            at=since,
            requests=400,
            exact=390,
            prompt_tokens=100_000,
            owed=60_000,
            counted=45_000,
            cause="pool",
            fault=True,
            sentence=f"{names[0]} has fewer blocks than it reports",
        ),
        sessions=[
            SessionView(
                name=f"session {number} of {names[0]}",
                tenant=f"tenant of {names[0]}",
                turns=12,
                prompt_tokens=48_000,
                cached_tokens=36_000,
                output_tokens=900,
                waited_ms=2.5,
                worker=names[-1],
                moves=1,
                lasted_s=95.0,
                age_s=4.0 + number,
            )
            for number in range(3)
        ],
        session_count=70,
        tenants=[
            TenantView(
                name=f"tenant of {names[0]}",
                requests=36,
                failed=2,
                prompt_tokens=144_000,
                cached_tokens=108_000,
                output_tokens=2_700,
                waited_ms=2.5,
                engine_s=81.0,
            ),
            TenantView(name="(others)", requests=5),
        ],
        totals=Totals(
            requests=30,
            finished=20,
            failed=1,
            refused=2,
            under_way=8,
            prompt_tokens=100,
            output_tokens=2000,
            prompts=prompts,
            ttft=Latency(p50=10, p90=20, p99=30, count=9),
        ),
    )


class Shown:
    """A server of one dashboard and nothing else, in a thread."""

    def __init__(
        self,
        source: Fixed,
        token: str | None = None,
        port: int = 0,
        *,
        interval: float = 0.1,
        most_viewers: int = 32,
        slow: float = 10.0,
    ) -> None:
        self.dashboard = Dashboard(source.view, token)
        self.dashboard.slow = slow
        self.dashboard.feed.interval = interval
        self.dashboard.feed.most_viewers = most_viewers
        self._bound = listen("127.0.0.1", port)
        self._ready = threading.Event()
        app = Application([], title="a dashboard", bounds=Bounds())
        app.add(self.dashboard.operations())
        self.running = Running(
            app, self._bound, ready=lambda _: self._ready.set(), ending=self.dashboard.feed.close, drain_seconds=20
        )
        self.url = self.running.url
        self.port: int = self._bound.getsockname()[1]
        self._thread = threading.Thread(target=self.running.run)

    def __enter__(self) -> Shown:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._bound.close()


@contextmanager
def watched(url: str, token: str | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
    """A viewer: (event, value) as they come."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        with client.stream("GET", f"{url}/dashboard/events", headers=headers) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")

            def events() -> Iterator[tuple[str, Any]]:
                name = ""
                for line in reply.iter_lines():
                    if line.startswith("event: "):
                        name = line[7:]
                    elif line.startswith("data: "):
                        yield name, json.loads(line[6:])

            yield events()
