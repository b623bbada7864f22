"""Requests through a real Envoy: routed by cache, streamed, in pieces, in subsets, refused."""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.envoy.proxy import DEPLOY, Config, Envoy
from tests.server.epp.support import PickerServed, endpoints, picking
from tests.server.gateway.support import together
from tests.server.mock.support import Served
from tests.waiting import eventually

from kvyard.engine.timing import FixedTiming

pytestmark = pytest.mark.zmq

BLOCKS = 20
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-subset"
DUPLEX, BUFFERED, STREAMED = "FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PickerServed, Served]]:
    with picking(3, sheddable=["batch"], engine_requests=8, queue=4) as found:
        yield found


@pytest.fixture
def picker(both: tuple[PickerServed, Served]) -> Iterator[PickerServed]:
    yield both[0]
    both[0].idle()


@pytest.fixture(scope="module")
def start(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Envoy]:
    folder = tmp_path_factory.mktemp("envoy")
    return lambda picker, **settings: Envoy(program, folder, picker.target, **settings)


@pytest.fixture(scope="module")
def envoy(both: tuple[PickerServed, Served], start: Callable[..., Envoy]) -> Iterator[Envoy]:
    """The configuration of ``deploy/envoy/envoy.yaml``, with subsets by a header."""
    with start(both[0], change=lambda config: config.subset_header(SUBSET)) as found:
        yield found


def prompt(name: str, blocks: int = BLOCKS) -> list[int]:
    """Token ids that no other test has."""
    seed = zlib.crc32(name.encode())
    return [(seed + 31 * at) % 50_000 + 1 for at in range(blocks * 16)]


def announced(picker: PickerServed, ids: list[int]) -> None:
    """Wait until the engine's events have told the picker of all full blocks of ``ids``."""
    body = {"body": {"prompt": ids, "max_tokens": 2}}

    def seen() -> bool:
        found = picker.client.post("/explain", json=body).json()
        return found["hit_blocks"] >= BLOCKS - 1 and not any(one["predicted"] for one in found["candidates"])

    eventually(seen, lambda: picker.client.post("/explain", json=body).text)


def cached(reply: Any) -> int:
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def open_with(request: str, response: str) -> Callable[[Config], None]:
    return lambda config: config.bodies(request, response)


@pytest.mark.parametrize(
    ("file", "request_mode", "response_mode"),
    [
        ("envoy.yaml", DUPLEX, DUPLEX),
        ("envoy.yaml", BUFFERED, BUFFERED),
        ("envoy.yaml", DUPLEX, STREAMED),
        ("fail-open.yaml", BUFFERED, STREAMED),
        ("fail-open.yaml", DUPLEX, DUPLEX),
    ],
)
def test_a_prompt_comes_back_to_the_engine_that_has_it(
    picker: PickerServed,
    both: tuple[PickerServed, Served],
    start: Callable[..., Envoy],
    file: str,
    request_mode: str,
    response_mode: str,
) -> None:
    listed = endpoints(both[1]) if file == "fail-open.yaml" else ()
    with start(picker, file=file, engines=listed, change=open_with(request_mode, response_mode)) as envoy:
        workers = set()
        for number in range(4):
            ids = prompt(f"{file} {request_mode} {response_mode} {number}")
            first = envoy.complete(ids)
            assert (first.status_code, cached(first)) == (200, 0), first.text
            announced(picker, ids)
            again = envoy.complete(ids)
            assert again.headers["x-mock-worker"] == first.headers["x-mock-worker"]
            assert cached(again) == (BLOCKS - 1) * 16  # the block with the last token is always computed
            assert f"hit={BLOCKS - 1}/{BLOCKS}" in again.headers["x-kvyard-decision"]
            workers.add(first.headers["x-mock-worker"])
        assert len(workers) > 1
        for name in ("rejected_header_mutations", "spurious_msgs_received", "streams_failed", "failure_mode_allowed"):
            assert envoy.stat(f"http.clients.ext_proc.{name}") == 0


def test_the_files_in_deploy_are_what_envoy_takes(program: Path) -> None:
    for path in DEPLOY.glob("*.yaml"):
        found = subprocess.run([program, "--mode", "validate", "-c", path], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr


def test_a_clients_own_destination_is_overwritten(picker: PickerServed, envoy: Envoy) -> None:
    reply = envoy.complete(prompt("forged"), headers={DESTINATION: "127.0.0.1:1"})
    assert reply.status_code == 200
    assert f"worker={reply.headers['x-mock-worker']}@0" in reply.headers["x-kvyard-decision"]


def test_tokens_reach_the_client_while_the_engine_computes_the_rest(program: Path, tmp_path: Path) -> None:
    slow = {"engine": {"timing": FixedTiming(prefill_ms=2, decode_ms=100)}}
    with picking(1, mock=slow) as (picker, _), Envoy(program, tmp_path, picker.target) as envoy:
        body = {"prompt": prompt("stream"), "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
        with envoy.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: {")
            assert picker.gateway.traffic.counters.under_way == 1, "the answer was over when its first token came"
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["usage"]["completion_tokens"] == 20
        picker.idle()
        metrics = picker.metrics()
        assert metrics['kvyard_gateway_output_tokens_total{model="mock"}'] == 20
        assert metrics['kvyard_gateway_requests_total{model="mock",outcome="finished"}'] == 1


def test_a_client_that_hangs_up_frees_its_engine(program: Path, tmp_path: Path) -> None:
    slow = {"engine": {"timing": FixedTiming(prefill_ms=2, decode_ms=100)}}
    with picking(1, mock=slow) as (picker, _), Envoy(program, tmp_path, picker.target) as envoy:
        body = {"prompt": prompt("hang up"), "max_tokens": 1000, "stream": True}
        with envoy.client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        picker.idle()
        assert picker.metrics()['kvyard_gateway_requests_total{model="mock",outcome="cancelled"}'] == 1


def test_bodies_in_pieces_arrive_whole(picker: PickerServed, envoy: Envoy, both: tuple[PickerServed, Served]) -> None:
    """Full duplex: the client sends chunks, Envoy passes them on as they come, the picker hands them back in one order."""
    text = "".join(chr(97 + at % 26) for at in range(1500))
    padding = "p" * 400_000
    body = json.dumps({"prompt": text, "max_tokens": 2, "user": padding, "temperature": 0}).encode()
    size = 7001
    sent = (body[at : at + size] for at in range(0, len(body), size))
    reply = envoy.client.post("/v1/completions", content=sent, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == len(text)
    alone = both[1].client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.json()["choices"] == alone.json()["choices"]
    assert "/93;" in reply.headers["x-kvyard-decision"]  # the picker read all of it: 1,500 tokens are 93 full blocks


def test_requests_at_once_keep_apart(picker: PickerServed, envoy: Envoy) -> None:
    def ask(number: int) -> Callable[[], Any]:
        return lambda: envoy.complete("q" * (16 * (number + 2)), stream=False, max_tokens=3)

    for number, reply in enumerate(together([ask(number) for number in range(24)])):
        assert reply.status_code == 200, reply
        assert reply.json()["usage"]["prompt_tokens"] == 16 * (number + 2)


def test_a_subset_is_obeyed_though_another_engine_has_the_prompt(
    picker: PickerServed, both: tuple[PickerServed, Served], envoy: Envoy
) -> None:
    ids = prompt("subset")
    has = envoy.complete(ids).headers["x-mock-worker"]
    announced(picker, ids)
    by_name = dict(zip((f"worker{number}" for number in range(3)), endpoints(both[1]), strict=True))
    others = {name: endpoint for name, endpoint in by_name.items() if name != has}
    for allowed in ([*others][:1], [*others][1:], [*others]):
        subset = ",".join(by_name[name] for name in allowed)
        for _ in range(3):
            reply = envoy.complete(ids, headers={SUBSET: subset})
            assert reply.headers["x-mock-worker"] in allowed, subset
    refused = envoy.complete(ids, headers={SUBSET: "10.1.1.1:80"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"


def test_what_has_no_engine_is_refused_with_503_and_comes_back(picker: PickerServed, envoy: Envoy) -> None:
    engines = list(picker.gateway.members.engines)
    for name in engines:
        picker.client.post("/admin/drain", json={"engine": name})
    # Envoy's health check may see it first, and then there is no picker to ask.
    assert envoy.complete(prompt("none")).status_code in (500, 503)
    for name in engines:
        picker.client.post("/admin/resume", json={"engine": name})
    eventually(lambda: envoy.complete(prompt("none")).status_code == 200)


def test_what_would_wait_too_long_is_refused_with_429(program: Path, tmp_path: Path) -> None:
    slow = {"engine": {"timing": FixedTiming(prefill_ms=2, decode_ms=100)}}
    settings: dict[str, Any] = {"engine_requests": 1, "queue": 1, "sheddable": ["batch"]}
    with picking(1, mock=slow, **settings) as (picker, _), Envoy(program, tmp_path, picker.target) as envoy:
        body = {"prompt": prompt("busy"), "max_tokens": 1000, "stream": True}
        with envoy.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # kept: a response is closed with its iterator
            next(lines)
            shed = envoy.complete("x", headers={"x-gateway-inference-objective": "batch"})
            assert (shed.status_code, shed.headers["retry-after"]) == (429, "1")
            pool = next(iter(picker.gateway.members.pools.values()))

            def full() -> Any:
                eventually(lambda: len(pool.waiting) == 1)
                refused = envoy.complete("x")
                reply.close()
                return refused

            waited, refused = together([lambda: envoy.complete("y"), full])
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert waited.status_code == 200
        picker.idle()
