"""Pickers that are killed, restarted or stuck, and engines that die, behind a real Envoy: which requests fail, which don't."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.real.envoy.proxy import Config, Envoy, PickerProcess
from tests.server.epp.support import endpoints, picking
from tests.server.gateway.support import fleet
from tests.server.mock.support import PATIENCE, Served
from tests.waiting import eventually

pytestmark = pytest.mark.zmq

DECISION = "x-kvyard-decision"
DUPLEX = "FULL_DUPLEX_STREAMED"
KILLS = 10


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with fleet(workers=3) as found:
        yield found


def quick(config: Config) -> None:
    """Half a second for the picker, so that a stuck one costs little time here."""
    config.processor["message_timeout"] = "0.5s"


def asked(envoy: Envoy, count: int) -> list[httpx.Response]:
    return [envoy.complete(f"{number} " * 40) for number in range(count)]


def test_without_the_picker_requests_are_served_and_with_it_again_they_are_placed(
    program: Path, tmp_path: Path, served: Served
) -> None:
    with PickerProcess(tmp_path, served.url) as picker:
        with Envoy(program, tmp_path, picker.target, file="fail-open.yaml", engines=endpoints(served)) as envoy:
            assert all(DECISION in reply.headers for reply in asked(envoy, 5))
            picker.kill()
            replies = asked(envoy, 12)
            assert [reply.status_code for reply in replies] == [200] * 12
            assert not any(DECISION in reply.headers for reply in replies)
            assert len({reply.headers["x-mock-worker"] for reply in replies}) == 3  # they take turns
            assert envoy.stat("http.clients.ext_proc.failure_mode_allowed") >= 12
            picker.start()
            eventually(lambda: DECISION in envoy.complete("again").headers)
            # A new picker learns from the engines' replay what they have cached.
            ids = list(range(1000, 1320))
            first = envoy.complete(ids)
            body = {"body": {"prompt": ids}}
            eventually(lambda: picker.client.post("/explain", json=body).json()["hit_blocks"] >= 19)
            picker.kill()
            picker.start()
            eventually(lambda: picker.client.post("/explain", json=body).json()["hit_blocks"] >= 19)
            eventually(lambda: DECISION in envoy.complete("again").headers)
            again = envoy.complete(ids)
            assert again.headers["x-mock-worker"] == first.headers["x-mock-worker"]
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 19 * 16


@pytest.mark.slow
def test_without_the_picker_a_closed_configuration_refuses(program: Path, tmp_path: Path, served: Served) -> None:
    with PickerProcess(tmp_path, served.url) as picker, Envoy(program, tmp_path, picker.target) as envoy:
        assert asked(envoy, 1)[0].status_code == 200
        picker.kill()
        assert {reply.status_code for reply in asked(envoy, 5)} <= {500, 503}
        picker.start()
        eventually(lambda: envoy.complete("again").status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "status"), [("fail-open.yaml", 200), ("envoy.yaml", 504)])
def test_a_stuck_picker_costs_its_time_limit(
    program: Path, tmp_path: Path, served: Served, file: str, status: int
) -> None:
    """Where Envoy then decides alone, it knows no subset: engines take turns."""
    listed = endpoints(served) if file == "fail-open.yaml" else ()
    subset = {"x-subset": endpoints(served)[0]}

    def change(config: Config) -> None:
        quick(config)
        config.subset_header("x-subset")
        if file == "envoy.yaml":
            config.bodies("BUFFERED", "STREAMED")  # Envoy keeps no time of full-duplex streams
        config.picker.pop("health_checks", None)

    with PickerProcess(tmp_path, served.url) as picker:
        with Envoy(program, tmp_path, picker.target, file=file, engines=listed, change=change) as envoy:
            assert envoy.complete("before", headers=subset).headers["x-mock-worker"] == "worker0"
            picker.send(signal.SIGSTOP)
            replies = [envoy.complete("stuck", headers=subset) for _ in range(3)]
            assert [reply.status_code for reply in replies] == [status] * 3
            if listed:
                assert {reply.headers["x-mock-worker"] for reply in replies} == {"worker0", "worker1", "worker2"}
            assert envoy.stat("http.clients.ext_proc.message_timeouts") == 3
            picker.send(signal.SIGCONT)
            eventually(lambda: DECISION in envoy.complete("again").headers)


def test_a_picker_lost_in_full_duplex_costs_the_requests_whose_body_it_had(
    program: Path, tmp_path: Path, served: Served
) -> None:
    """Why fail-open.yaml has buffered bodies: Envoy has nothing left to send of a streamed one."""

    def change(config: Config) -> None:
        config.bodies(DUPLEX, DUPLEX)

    with PickerProcess(tmp_path, served.url) as picker:
        with Envoy(
            program, tmp_path, picker.target, file="fail-open.yaml", engines=endpoints(served), change=change
        ) as envoy:
            assert DECISION in asked(envoy, 1)[0].headers
            picker.send(signal.SIGSTOP)
            found: list[int] = []
            waiting = threading.Thread(target=lambda: found.append(asked(envoy, 1)[0].status_code))
            waiting.start()
            eventually(lambda: envoy.stat("http.clients.ext_proc.stream_msgs_sent") >= 7)
            picker.kill()
            waiting.join(PATIENCE)
            assert found == [500]
            # Those that come afterwards are served or lost: that depends on how soon Envoy sees that nobody listens.
            assert {reply.status_code for reply in asked(envoy, 5)} <= {200, 500}


def test_an_engine_that_dies_is_replaced_by_the_fallback_and_looked_at(program: Path, tmp_path: Path) -> None:
    with picking(2, fallbacks=1, health_seconds=60.0) as (picker, served):
        with Envoy(program, tmp_path, picker.target, file="fail-open.yaml", engines=endpoints(served)) as envoy:
            first = envoy.complete("engine that dies " * 20)
            number = int(first.headers["x-mock-worker"].removeprefix("worker"))
            loop = served.fleet._loop
            assert loop is not None
            asyncio.run_coroutine_threadsafe(served.fleet.kill(number), loop).result(PATIENCE)
            replies = asked(envoy, 10)
            assert [reply.status_code for reply in replies] == [200] * 10
            assert {reply.headers["x-mock-worker"] for reply in replies} == {f"worker{1 - number}"}
            picker.idle()


@pytest.mark.slow
def test_pickers_killed_at_random_instants_cost_nothing_open(program: Path, tmp_path: Path, served: Served) -> None:
    """Four clients, whole answers and streams, while the picker is killed and started: each gets its answer."""
    chance = random.Random(26)
    found: Counter[str] = Counter()
    over = threading.Event()
    with PickerProcess(tmp_path, served.url) as picker:
        with Envoy(
            program, tmp_path, picker.target, file="fail-open.yaml", engines=endpoints(served), change=quick
        ) as envoy:

            def client(number: int) -> None:
                turn = 0
                while not over.is_set():
                    turn += 1
                    body: dict[str, Any] = {
                        "prompt": f"{number} {turn} " * 50,
                        "max_tokens": 8,
                        "stream": turn % 2 == 0,
                    }
                    try:
                        with envoy.client.stream("POST", "/v1/completions", json=body) as reply:
                            text = reply.read()
                            whole = text.endswith(b"data: [DONE]\n\n") if body["stream"] else b'"usage"' in text
                            placed = "placed" if DECISION in reply.headers else "unplaced"
                            found[f"{reply.status_code} {placed} {'whole' if whole else text[-200:]}"] += 1
                    except httpx.TransportError as error:
                        found[f"{type(error).__name__} {'stream' if body['stream'] else 'answer'}"] += 1

            clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
            for thread in clients:
                thread.start()
            for _ in range(KILLS):
                time.sleep(chance.uniform(0.05, 1.0))  # the random instant
                picker.kill()
                picker.start()
            over.set()
            for thread in clients:
                thread.join(PATIENCE)
    print(f"{KILLS} kills: {dict(found)}")
    assert found["200 placed whole"] > 100
    assert found["200 unplaced whole"] > 100
    assert not [name for name in found if not name.startswith("200") or not name.endswith("whole")], found
