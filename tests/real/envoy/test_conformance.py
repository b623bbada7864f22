"""Cases of the Gateway API Inference Extension's conformance suite that concern a picker, as tests of our own.

There they need a cluster, pods that echo, and Go; here the pods are mock engines behind one Envoy. The four have the suite's
names. As there, each routing case sends 100 requests, ten at a time, and none may leave the endpoints that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.real.envoy.proxy import Envoy, PickerProcess
from tests.server.epp.support import PickerServed, endpoints, picking
from tests.server.gateway.support import fleet
from tests.server.mock.support import Served

pytestmark = pytest.mark.zmq

WANTED = "test-epp-endpoint-selection"
WENT = "x-conformance-test-served-endpoint"
PROMPT = "Answer with no disclaimers: What are the advantages and disadvantages of genetically modified food?"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PickerServed, Served]]:
    with picking(6, conformance=True) as found:
        yield found


@pytest.fixture(scope="module")
def envoy(
    program: Path, tmp_path_factory: pytest.TempPathFactory, both: tuple[PickerServed, Served]
) -> Iterator[Envoy]:
    folder = tmp_path_factory.mktemp("envoy")
    picker, served = both
    with Envoy(program, folder, picker.target, file="fail-open.yaml", engines=endpoints(served)) as found:
        yield found


def workers(envoy: Envoy, wanted: str) -> set[str]:
    """Workers that 100 requests reached, ten at a time."""

    def ask(_: int) -> Any:
        return envoy.complete(PROMPT, headers={WANTED: wanted})

    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(ask, range(100)))
    assert {reply.status_code for reply in replies} == {200}
    assert envoy.stat("http.clients.ext_proc.failure_mode_allowed") == 0, "Envoy decided without the picker"
    return {reply.headers["x-mock-worker"] for reply in replies}


@pytest.mark.parametrize("chosen", [[2], [0, 1], [0, 1, 2, 3, 4, 5]])
def test_gateway_following_epp_routing(both: tuple[PickerServed, Served], envoy: Envoy, chosen: list[int]) -> None:
    addresses = endpoints(both[1])
    found = workers(envoy, ",".join(addresses[at] for at in chosen))
    assert found <= {f"worker{at}" for at in chosen}


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [(["0:"], {0, 1, 2}), (["0:", "1:1"], {0, 1, 2, 4}), (["0:", "1:0", "1:2"], {0, 1, 2, 3, 5})],
)
def test_gateway_following_epp_routing_with_data_parallelism(
    program: Path, tmp_path: Path, wanted: list[str], allowed: set[int]
) -> None:
    """Two hosts with three ports each, one port per data-parallel rank: an address without a port allows all of its ports."""
    hosts = ("127.0.0.1", "127.0.0.2")
    with fleet(workers=3, host=hosts[0]) as first, fleet(workers=3, host=hosts[1]) as second:
        addresses = [*endpoints(first), *endpoints(second)]
        with PickerServed(fleets=[first.url, second.url], conformance=True) as picker:
            picker.ready(6)
            with Envoy(program, tmp_path, picker.target, file="fail-open.yaml", engines=addresses) as envoy:
                named = []
                for each in wanted:
                    host, port = each.split(":")
                    named.append(addresses[3 * int(host) + int(port)] if port else hosts[int(host)])
                with ThreadPoolExecutor(10) as pool:
                    replies = list(
                        pool.map(lambda _: envoy.complete(PROMPT, headers={WANTED: ",".join(named)}), range(100))
                    )
                assert {reply.status_code for reply in replies} == {200}
                assert envoy.stat("http.clients.ext_proc.failure_mode_allowed") == 0, "Envoy decided without the picker"
                assert {reply.headers[WENT] for reply in replies} <= {addresses[at] for at in allowed}


def test_epp_unavailable_fail_open(program: Path, tmp_path: Path) -> None:
    config = tmp_path / "picker.toml"
    config.write_text("[epp]\nconformance = true\n")
    with fleet(workers=3) as served, PickerProcess(tmp_path, served.url, "--config", str(config)) as picker:
        listed = endpoints(served)
        with Envoy(program, tmp_path, picker.target, file="fail-open.yaml", engines=listed) as envoy:
            wanted = {WANTED: listed[0]}
            replies = [envoy.complete(PROMPT, headers=wanted) for _ in range(5)]
            assert {reply.headers["x-mock-worker"] for reply in replies} == {"worker0"}
            picker.kill()
            replies = [envoy.complete(PROMPT, headers=wanted) for _ in range(30)]
            assert {reply.status_code for reply in replies} == {200}
            assert {reply.headers["x-mock-worker"] for reply in replies} == {"worker0", "worker1", "worker2"}


def test_gateway_destination_endpoint_served(both: tuple[PickerServed, Served], envoy: Envoy) -> None:
    for number, endpoint in enumerate(endpoints(both[1])):
        reply = envoy.complete("Write as if you were a critic: San Francisco", headers={WANTED: endpoint})
        assert (reply.status_code, reply.headers[WENT]) == (200, endpoint)
        assert reply.headers["x-mock-worker"] == f"worker{number}"
