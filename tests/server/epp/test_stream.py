"""The protocol, by a real gRPC client that plays Envoy and real mock engines that answer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders
from tests.server.epp.support import DataPlane, Exchanged, PickerServed, config, endpoints, headers, metadata, picking
from tests.server.mock.support import Served
from tests.waiting import eventually

from kvyard.server.epp.messages import BUFFERED, NONE, PIECES, STREAMED
from kvyard.server.epp.stream import PIECE_OVERHEAD

pytestmark = pytest.mark.zmq

HINT = "envoy.lb.subset_hint"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PickerServed, Served]]:
    with picking(3, fallbacks=1, sheddable=["batch"], conformance=True, limits={"body_bytes": 1 << 16}) as found:
        yield found


@pytest.fixture
def picker(both: tuple[PickerServed, Served]) -> Iterator[PickerServed]:
    yield both[0]
    both[0].idle()


@pytest.fixture
def plane(picker: PickerServed) -> DataPlane:
    return DataPlane(picker.target)


def prompt(name: str, blocks: int = 20) -> list[int]:
    """Token ids that no other test has."""
    seed = zlib.crc32(name.encode())
    return [(seed + 31 * at) % 50_000 + 1 for at in range(blocks * 16)]


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt(name), "max_tokens": 2, **more}


def announced(picker: PickerServed, name: str) -> None:
    """Wait until the picker would find ``name`` cached."""

    def seen() -> bool:
        found = picker.client.post("/explain", json={"body": asked(name)}).json()
        return found["hit_blocks"] >= 19 and not any(one["predicted"] for one in found["candidates"])

    eventually(seen, lambda: picker.client.post("/explain", json={"body": asked(name)}).text)


@pytest.mark.parametrize(
    ("request_mode", "response_mode"), [(STREAMED, STREAMED), (BUFFERED, BUFFERED), (STREAMED, PIECES)]
)
def test_a_prompt_comes_back_to_the_engine_that_has_it(
    picker: PickerServed, request_mode: int, response_mode: int
) -> None:
    plane = DataPlane(picker.target, request_mode=request_mode, response_mode=response_mode)
    name = f"again {request_mode} {response_mode}"
    first = plane.ask(asked(name), piece=333)
    assert (first.status, first.cached) == (200, 0)
    announced(picker, name)
    again = plane.ask(asked(name), piece=200)
    assert again.endpoint.split(",")[0] == first.endpoint.split(",")[0]
    assert again.cached == 19 * 16  # the block with the last token is always computed
    assert "hit=19/20" in again.headers["x-kvyard-decision"]
    if request_mode == STREAMED:
        assert len(again.request_pieces) > 5


def test_streams_of_tokens_pass_piece_by_piece_and_are_counted(picker: PickerServed, plane: DataPlane) -> None:
    before = picker.metrics()
    answer = plane.ask(asked("stream", stream=True, max_tokens=5, stream_options={"include_usage": True}))
    assert answer.body.endswith(b"data: [DONE]\n\n")
    picker.idle()
    after = picker.metrics()
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert gained['kvyard_gateway_output_tokens_total{model="mock"}'] == 5
    assert gained['kvyard_gateway_requests_total{model="mock",outcome="finished"}'] == 1
    assert gained['kvyard_gateway_reported_prompt_tokens_total{model="mock"}'] == 320
    assert gained['kvyard_gateway_time_to_first_byte_seconds_count{model="mock"}'] == 1


def test_conversations_are_read_too(picker: PickerServed, plane: DataPlane) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me of a picker. " * 20}], "max_tokens": 2}
    first = plane.ask(chat, "/some/prefix/v1/chat/completions?x=1".replace("/some/prefix", ""))
    assert first.status == 200
    eventually(lambda: picker.client.post("/explain", json={"body": chat}).json()["hit_blocks"] > 10)
    again = plane.ask(chat, "/v1/chat/completions")
    assert again.endpoint.split(",")[0] == first.endpoint.split(",")[0]
    assert again.cached > 0


def test_a_subset_is_obeyed_though_others_have_the_prompt(
    picker: PickerServed, both: tuple[PickerServed, Served], plane: DataPlane
) -> None:
    has = plane.ask(asked("subset")).endpoint.split(",")[0]
    announced(picker, "subset")
    others = [one for one in endpoints(both[1]) if one != has]
    for subset in (others[:1], ",".join(others), [others[0].rpartition(":")[0] + ":1", others[1]]):
        hint = metadata(HINT, x_gateway_destination_endpoint_subset=subset)
        answer = plane.ask(asked("subset"), context=hint)
        assert answer.status == 200
        assert set(answer.endpoint.split(",")) <= set(others)
    # An address without a port means all ports of it.
    hint = metadata(HINT, x_gateway_destination_endpoint_subset=[has.rpartition(":")[0]])
    assert plane.ask(asked("subset"), context=hint).status == 200


@pytest.mark.parametrize("subset", [[], "", ["10.1.1.1:80"]])
def test_a_subset_without_an_engine_is_a_503(plane: DataPlane, subset: Any) -> None:
    answer = plane.ask(asked("none"), context=metadata(HINT, x_gateway_destination_endpoint_subset=subset))
    assert answer.immediate
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["type"] == "ServiceUnavailableError"


def test_fallbacks_are_named_and_who_served_is_booked(picker: PickerServed, plane: DataPlane) -> None:
    before = picker.picker.moved
    answer = plane.ask(asked("fallback"), served=lambda named: named.split(",")[1])
    chosen, fallback = answer.endpoint.split(",")
    assert chosen != fallback
    worker = picker.inside(lambda: picker.picker.endpoints.at(fallback))
    assert f"worker={worker.name}@0" in answer.headers["x-kvyard-decision"]
    assert picker.picker.moved == before + 1
    assert answer.headers["x-conformance-test-served-endpoint"] == fallback
    picker.idle()
    assert (
        picker.metrics()[f'kvyard_gateway_engine_failures_total{{engine="{_name(picker, chosen)}",model="mock"}}'] >= 1
    )


def _name(picker: PickerServed, endpoint: str) -> str:
    return str(picker.inside(lambda: picker.picker.endpoints.at(endpoint).name))


def test_an_endpoint_that_is_no_engine_of_ours_is_counted(picker: PickerServed) -> None:
    before = picker.picker.elsewhere
    with Exchanged(picker.target) as stream:
        told = metadata("envoy.lb", x_gateway_destination_endpoint_served="10.9.9.9:80")
        stream.send(
            request_headers=HttpHeaders(headers=headers({":path": "/v1/models", ":method": "GET"}), end_of_stream=True)
        )
        assert stream.receive().WhichOneof("response") == "request_headers"
        found = HttpHeaders(headers=headers({":status": "200"}), end_of_stream=True)
        stream.send(response_headers=found, metadata_context=told)
        assert stream.receive().WhichOneof("response") == "response_headers"
    picker.idle()
    assert picker.picker.elsewhere == before + 1


def test_the_extensions_tests_choose_by_a_header(both: tuple[PickerServed, Served], plane: DataPlane) -> None:
    for endpoint in endpoints(both[1]):
        answer = plane.ask(asked("wanted"), given={"test-epp-endpoint-selection": endpoint})
        assert answer.endpoint == endpoint
        assert answer.headers["x-conformance-test-served-endpoint"] == endpoint


def test_requests_without_a_body_are_placed_by_load(plane: DataPlane) -> None:
    answer = plane.ask(None, "/v1/models", method="GET")
    assert answer.json["data"][0]["id"] == "mock"


@pytest.mark.parametrize(
    ("body", "given", "why", "status"),
    [
        (b"not JSON", {}, "body", 400),
        (json.dumps(asked("gzip")).encode(), {"content-encoding": "gzip"}, "body", 200),
        (json.dumps({"prompt": "x" * (1 << 17), "max_tokens": 1}).encode(), {}, "size", 400),
    ],
)
def test_unreadable_bodies_are_placed_by_load_and_counted(
    picker: PickerServed, plane: DataPlane, body: bytes, given: dict[str, str], why: str, status: int
) -> None:
    before = picker.picker.opened[why]
    answer = plane.ask(body, given=given)
    assert not answer.immediate
    assert answer.status == status  # in the engine's own words
    assert "x-kvyard-decision" in answer.headers
    assert picker.picker.opened[why] == before + 1
    assert picker.metrics()[f'kvyard_epp_opened_total{{reason="{why}"}}'] >= 1


def test_an_unknown_model_is_refused_as_vllm_refuses_it(plane: DataPlane) -> None:
    answer = plane.ask(asked("other", model="other"))
    assert (answer.immediate, answer.status) == (True, 404)
    assert answer.json["error"]["message"].startswith("The model `other` does not exist;")


def test_trailers_end_a_request(plane: DataPlane) -> None:
    assert plane.ask(asked("trailers"), trailers=True).status == 200


def test_a_data_plane_that_sends_no_bodies_gets_an_engine_by_load(picker: PickerServed) -> None:
    plane = DataPlane(picker.target, request_mode=NONE, response_mode=NONE)
    answer = plane.ask(asked("headers only"))
    assert answer.status == 200
    assert "hit=0/0" in answer.headers["x-kvyard-decision"]


def test_a_client_cant_say_where_it_goes(picker: PickerServed, plane: DataPlane) -> None:
    given = {
        "x-gateway-destination-endpoint": "10.9.9.9:22",
        "x-data-parallel-rank": "7",
        "accept-encoding": "gzip",  # usage in a compressed answer couldn't be counted
    }
    answer = plane.ask(asked("forged"), given=given)
    assert answer.status == 200
    assert "10.9.9.9" not in answer.endpoint
    assert sorted(answer.removed) == ["accept-encoding", "x-data-parallel-rank"]


def test_a_stream_that_is_cut_holds_nothing(picker: PickerServed) -> None:
    before = picker.gateway.traffic.counters.cancelled
    with Exchanged(picker.target) as stream:
        first = HttpHeaders(headers=headers({":path": "/v1/completions", ":method": "POST"}))
        stream.send(request_headers=first, protocol_config=config())
        stream.send(request_body=HttpBody(body=b'{"prompt": "hal'))
        eventually(lambda: picker.picker.held > PIECE_OVERHEAD + 15)
        stream.call.cancel()
    picker.idle()
    with Exchanged(picker.target) as stream:
        stream.send(request_headers=first, protocol_config=config())
        stream.send(request_body=HttpBody(body=b'{"prompt": "whole"}', end_of_stream=True))
        assert stream.receive().WhichOneof("response") == "request_headers"
        assert picker.gateway.traffic.counters.under_way == 1
        stream.call.cancel()
    picker.idle()
    assert picker.gateway.traffic.counters.cancelled == before + 1


@pytest.mark.parametrize("first", [{":path": "/v1/models", ":method": "GET"}, {}])
def test_headers_that_come_twice_end_the_stream_and_hold_nothing(picker: PickerServed, first: dict[str, str]) -> None:
    with Exchanged(picker.target) as stream:
        whole = HttpHeaders(headers=headers(first), end_of_stream=True)
        stream.send(request_headers=whole)
        assert stream.receive().WhichOneof("response") == "request_headers"
        stream.send(request_headers=whole)
        refused = stream.receive().immediate_response
        assert refused.status.code == 400
        assert b"open a stream for each request" in refused.body
    picker.idle()


def test_an_engine_that_fails_is_looked_at(picker: PickerServed) -> None:
    with Exchanged(picker.target) as stream:
        stream.send(
            request_headers=HttpHeaders(headers=headers({":path": "/v1/models", ":method": "GET"}), end_of_stream=True)
        )
        stream.receive()
        failed = HttpHeaders(headers=headers({":status": "503"}), end_of_stream=True)
        before = sum(one.failed for one in picker.gateway.members.engines.values())
        stream.send(response_headers=failed)
        stream.receive()
    picker.idle()
    assert sum(one.failed for one in picker.gateway.members.engines.values()) == before + 1
    picker.ready(3)


def test_messages_that_only_watch_are_not_answered(picker: PickerServed) -> None:
    with Exchanged(picker.target) as stream:
        shown = HttpHeaders(headers=headers({":path": "/v1/models"}), end_of_stream=True)
        stream.send(request_headers=shown, observability_mode=True)
        stream.send(request_headers=HttpHeaders(headers=headers({":path": "/v1/models"}), end_of_stream=True))
        assert stream.receive().WhichOneof("response") == "request_headers"
        assert picker.gateway.traffic.counters.under_way == 1
