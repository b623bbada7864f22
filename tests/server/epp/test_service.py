"""The picker as a service: health over gRPC, limits, what it does when something fails, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.server.epp.support import DataPlane, Exchanged, PickerServed, config, headers, picking
from tests.server.mock.support import Served
from tests.server.support import PATIENCE
from tests.server.tls import certificate
from tests.waiting import eventually

import kvyard
from kvyard.cli.app import main
from kvyard.errors import KvyardError
from kvyard.server.epp import ext_proc
from kvyard.server.running import TlsFiles

pytestmark = pytest.mark.zmq

SERVICES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
BODY = {"prompt": "Once upon a time", "max_tokens": 2}


def health(target: str, service: str) -> int:
    with grpc.insecure_channel(target) as channel:
        return int(HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=PATIENCE).status)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PickerServed, Served]]:
    with picking(2, engine_requests=1, queue=1, sheddable=["batch"], read_seconds=0.3) as found:
        yield found


def busy(picker: PickerServed, count: int) -> list[Exchanged]:
    """Requests that have an engine and get no answer."""
    streams = [Exchanged(picker.target) for _ in range(count)]
    for stream in streams:
        _send(stream)
        assert stream.receive().WhichOneof("response") == "request_headers"
    return streams


def _send(stream: Exchanged) -> None:
    first = HttpHeaders(headers=headers({":path": "/v1/completions", ":method": "POST"}))
    stream.send(request_headers=first, protocol_config=config())
    stream.send(request_body=HttpBody(body=b'{"prompt": "x"}', end_of_stream=True))


def end(*streams: Exchanged) -> None:
    for stream in streams:
        stream.__exit__()


def test_nothing_is_ready_without_an_engine() -> None:
    with PickerServed() as picker:
        assert health(picker.target, "liveness") == SERVING
        assert [health(picker.target, name) for name in SERVICES] == [NOT_SERVING] * 3
        answer = DataPlane(picker.target).ask(BODY)
        assert (answer.immediate, answer.status) == (True, 503)
        assert picker.client.get("/ready").status_code == 503


def test_ready_follows_the_engines(both: tuple[PickerServed, Served]) -> None:
    picker = both[0]
    eventually(lambda: all(health(picker.target, name) == SERVING for name in SERVICES))
    engines = list(picker.gateway.members.engines)
    for name in engines:
        picker.client.post("/admin/drain", json={"engine": name})
    eventually(lambda: all(health(picker.target, name) == NOT_SERVING for name in SERVICES))
    assert health(picker.target, "liveness") == SERVING
    answer = DataPlane(picker.target).ask(BODY)
    assert (answer.immediate, answer.status) == (True, 503)
    for name in engines:
        picker.client.post("/admin/resume", json={"engine": name})
    eventually(lambda: health(picker.target, "readiness") == SERVING)
    with pytest.raises(grpc.RpcError) as unknown:
        health(picker.target, "no such service")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_those_that_cant_wait_are_shed_with_429(both: tuple[PickerServed, Served]) -> None:
    picker, plane = both[0], DataPlane(both[0].target)
    streams = busy(picker, 2)
    answer = plane.ask(BODY, given={"x-gateway-inference-objective": "batch"})
    assert (answer.immediate, answer.status, answer.headers["retry-after"]) == (True, 429, "1")
    waiting = Exchanged(picker.target)
    _send(waiting)
    pool = next(iter(picker.gateway.members.pools.values()))
    eventually(lambda: len(pool.waiting) == 1)
    answer = plane.ask(BODY)  # the queue has room for one
    assert (answer.immediate, answer.status) == (True, 429)
    assert answer.json["error"]["type"] == "RateLimitError"
    end(streams.pop())
    assert waiting.receive().WhichOneof("response") == "request_headers"
    end(waiting, *streams)
    picker.idle()


def test_one_that_waits_and_hangs_up_leaves_the_queue(both: tuple[PickerServed, Served]) -> None:
    picker = both[0]
    streams = busy(picker, 2)
    waiting = Exchanged(picker.target)
    _send(waiting)
    pool = next(iter(picker.gateway.members.pools.values()))
    eventually(lambda: len(pool.waiting) == 1)
    waiting.call.cancel()
    eventually(lambda: not pool.waiting)
    end(waiting, *streams)
    picker.idle()


def test_a_choice_that_fails_goes_to_the_least_busy_engine_and_health_says_so(
    both: tuple[PickerServed, Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    picker, plane = both[0], DataPlane(both[0].target)
    router = next(iter(picker.gateway.members.pools.values())).router

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug of the router")

    monkeypatch.setattr(type(router), "route", broken)
    answer = plane.ask(BODY)
    monkeypatch.undo()
    assert answer.status == 200
    assert not answer.immediate
    assert picker.picker.opened["choice"] == 1
    assert "a bug of the router" in caplog.text
    reasons = {one["code"]: one for one in picker.client.get("/health").json()["reasons"]}
    assert "a bug of the router" in reasons["failed-open"]["why"]
    assert picker.metrics()["kvyard_gateway_degraded"] == 1
    picker.idle()
    assert "hit=" in plane.ask(BODY).headers["x-kvyard-decision"]  # and the next one is chosen again


@pytest.mark.parametrize("why", ["read", "late"])
def test_a_prompt_that_isnt_read_in_time_costs_its_part_alone(
    both: tuple[PickerServed, Served], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    picker, plane = both[0], DataPlane(both[0].target)
    pool = next(iter(picker.gateway.members.pools.values()))

    async def read(*given: Any, **named: Any) -> Any:
        if why == "read":
            raise RuntimeError("a bug of the tokenizer")
        await asyncio.Event().wait()

    monkeypatch.setattr(pool.reader, "read", read)
    answer = plane.ask(BODY)
    assert answer.status == 200
    assert "hit=0/0" in answer.headers["x-kvyard-decision"]
    assert picker.picker.opened[why] == 1
    picker.idle()


def test_an_engine_that_dies_is_not_named_any_more() -> None:
    with picking(2) as (picker, served):
        plane = DataPlane(picker.target)
        loop = served.fleet._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(served.fleet.kill(1), loop).result(PATIENCE)
        eventually(lambda: [one.state for one in picker.gateway.members.engines.values()].count("down") == 1)
        left = served.urls[0].removeprefix("http://")
        assert {plane.ask({"prompt": f"{n}", "max_tokens": 1}).endpoint for n in range(4)} == {left}


def test_tls(both: tuple[PickerServed, Served], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with PickerServed(fleets=[both[1].url], tls=TlsFiles(cert, key)) as picker:
        picker.ready(2)
        assert picker.service.url.startswith("grpcs://")
        trusted = grpc.ssl_channel_credentials(Path(cert).read_bytes())
        assert DataPlane(picker.target, credentials=trusted).ask(BODY).status == 200


def test_a_port_in_use_is_refused_in_a_sentence(both: tuple[PickerServed, Served]) -> None:
    with pytest.raises(KvyardError, match=r"can't listen at 127.0.0.1:\d+: it may be taken; choose another --port"):
        PickerServed(port=both[0].service.port).__enter__()


def test_streams_in_flight_end_in_order() -> None:
    with picking(1) as (picker, _):
        (stream,) = busy(picker, 1)
        assert stream.receive().WhichOneof("response") == "request_body"
        ending = picker.end()
        eventually(lambda: health_or_none(picker.target) in (NOT_SERVING, None))
        answer = HttpHeaders(headers=headers({":status": "200"}), end_of_stream=True)
        stream.send(response_headers=answer)
        assert stream.receive().WhichOneof("response") == "response_headers"
        end(stream)
        ending.result(PATIENCE)
        assert picker.gateway.traffic.counters.finished == 1


def health_or_none(target: str) -> int | None:
    try:
        return health(target, "readiness")
    except grpc.RpcError:
        return None  # nothing new is taken


def test_as_a_process(both: tuple[PickerServed, Served], tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    flags = [
        "--fleet",
        both[1].url,
        "--port",
        "0",
        "--http-port",
        "0",
        "--tokenizer",
        "bytes",
        "--ready-file",
        str(ready),
    ]
    command = [sys.executable, "-c", "from kvyard.cli.app import main; main()", "epp", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        eventually(ready.exists)
        target = json.loads(ready.read_text())["urls"][0].removeprefix("grpc://")
        eventually(lambda: health(target, "readiness") == SERVING)
        assert DataPlane(target).ask(BODY).status == 200
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert said.splitlines()[0].startswith("endpoint picker at grpc://127.0.0.1:")
    assert said.splitlines()[-1] == "stopped"
    assert not ready.exists()


def test_its_messages_are_envoys() -> None:
    """What ``scripts/make_ext_proc.py`` wrote has every field of Envoy's own, under the same numbers and types."""
    for ours, theirs in (
        (ext_proc.ProcessingRequest, ProcessingRequest),
        (ext_proc.ProcessingResponse, ProcessingResponse),
    ):
        assert fields(ours.DESCRIPTOR) == fields(theirs.DESCRIPTOR)


def fields(message: Any, seen: frozenset[str] = frozenset()) -> dict[str, Any]:
    if message.full_name in seen:
        return {}
    inside = seen | {message.full_name}
    return {
        field.name: (field.number, field.type, fields(field.message_type, inside) if field.message_type else None)
        for field in message.fields
    }


def test_no_extra_needs_xds_protos() -> None:
    """It brings parts of ``opentelemetry``, which end Ray's agent and break exporters of traces in the same environment."""
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert "epp" in extras and not [one for needed in extras.values() for one in needed if one.startswith("xds-protos")]


def test_the_core_needs_no_grpc() -> None:
    root = Path(kvyard.__file__).parent
    imports = re.compile(r"^\s*(?:import|from) (?:grpc|grpc_health|envoy|google)\b", re.MULTILINE)
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if imports.search(path.read_text())}
    assert found == {"server/epp/ext_proc.py", "server/epp/service.py"}


def test_missing_dependencies_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "kvyard.server.epp.service", None)
    with pytest.raises(SystemExit) as ended:
        main(["epp"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("pip install 'kvyard[epp]'\n")
