"""The endpoint picker under attack: messages that are too large or too many, and streams that never end or are dropped."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("grpc", reason="needs kvyard[epp]")
pytest.importorskip("envoy.service.ext_proc", reason="needs kvyard[epp]")

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders
from tests.hostile.support import MIB, MOST_HOLD_S, LoopHolds, ServerProcess, holds
from tests.server.epp.support import Exchanged, PickerServed, config, headers, picking

__all__ = ["holds"]

pytestmark = pytest.mark.zmq
FIRST = {":path": "/v1/completions", ":method": "POST"}
BACK_S = 30.0


def begin(target: str, **more: str) -> Exchanged:
    """A stream that has sent its headers."""
    stream = Exchanged(target)
    stream.send(request_headers=HttpHeaders(headers=headers({**FIRST, **more})), protocol_config=config())
    return stream


def refused(stream: Exchanged) -> int:
    """The status with which the picker ends a stream; 0 where gRPC itself ends it."""
    try:
        while (found := stream.receive()) is not None:
            if found.WhichOneof("response") == "immediate_response":
                return int(found.immediate_response.status.code)
    except grpc.RpcError:
        pass
    return 0


@pytest.fixture(scope="module")
def picker() -> Iterator[PickerServed]:
    with picking(1, held_bytes=8 * MIB, limits={"body_bytes": 4 * MIB}) as (found, _):
        yield found


def test_too_many_headers_are_not_read(picker: PickerServed) -> None:
    for more in ({f"x{at}": "" for at in range(2000)}, {"x": "y" * 300_000}):
        with begin(picker.target, **more) as stream:
            assert refused(stream) == 431
    with begin(picker.target, **{f"x{at}": "y" * 100 for at in range(1000)}) as stream:
        stream.send(request_body=HttpBody(body=b"{}", end_of_stream=True))
        assert stream.receive().WhichOneof("response") == "request_headers", "as many as may be"
    picker.idle()


def test_headers_that_come_twice_before_the_body(picker: PickerServed) -> None:
    with begin(picker.target) as stream:
        stream.send(request_headers=HttpHeaders(headers=headers(FIRST)))
        assert refused(stream) == 400
    picker.idle()


def test_small_and_empty_pieces_count_for_what_they_take(picker: PickerServed) -> None:
    with begin(picker.target) as stream:
        for _ in range(2000):
            stream.send(request_body=HttpBody(body=b""))
        eventually(lambda: picker.picker.held > 2000 * 100, lambda: picker.picker.held)
        stream.call.cancel()
    picker.idle()


def test_bodies_that_never_end_are_bounded_in_all(picker: PickerServed) -> None:
    """Those that there is no room for go on without being read; nobody is refused."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(begin(picker.target)) for _ in range(12)]
        for _ in range(3):
            for stream in streams:
                stream.send(request_body=HttpBody(body=b" " * MIB))
        opened = picker.picker.opened
        eventually(lambda: opened["size"] > 0, lambda: picker.picker.held)
        assert picker.picker.held <= (8 + 12) * MIB, "the limit, and a piece of each"
        for stream in streams:
            stream.call.cancel()
    picker.idle()


def test_what_is_handed_back_counts_until_it_is_read(picker: PickerServed) -> None:
    with begin(picker.target) as stream:
        for _ in range(20):
            stream.send(request_body=HttpBody(body=b" " * (MIB // 8)))
        eventually(lambda: picker.picker.held > 20 * MIB // 8, lambda: picker.picker.held)
        stream.send(request_body=HttpBody(body=b"{}", end_of_stream=True))
        stream.receive()
        assert picker.picker.held > MIB, "gRPC takes some of it from us"
        while not stream.receive().request_body.response.body_mutation.streamed_response.end_of_stream:
            pass
        eventually(
            lambda: picker.picker.held <= 2000, lambda: picker.picker.held
        )  # the last piece is here before that counts
        stream.call.cancel()
    picker.idle()


def test_a_status_that_is_none(picker: PickerServed) -> None:
    """Python reads no number of so many digits."""
    with begin(picker.target) as stream:
        stream.send(request_body=WHOLE)
        stream.receive()
        stream.send(response_headers=HttpHeaders(headers=headers({":status": "9" * 5000})))
        kinds = [stream.receive().WhichOneof("response") for _ in range(2)]
        assert kinds[-1] == "response_headers", kinds
        stream.call.cancel()
    picker.idle()


WHOLE = HttpBody(body=b'{"prompt": "a"}', end_of_stream=True)


def reach(stage: str, stream: Exchanged) -> None:
    """Go on with a stream up to a stage."""
    if stage == "half a body":
        stream.send(request_body=HttpBody(body=b'{"prompt": "a'))
    elif stage != "headers":
        stream.send(request_body=WHOLE)
    if stage in ("destination", "answer"):
        stream.receive()
    if stage == "answer":
        stream.send(response_headers=HttpHeaders(headers=headers({":status": "200"})))
        stream.send(response_body=HttpBody(body=b"data: {}\n\n"))


@pytest.mark.parametrize("stage", ["headers", "half a body", "body", "destination", "answer"])
@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_streams_that_are_dropped(picker: PickerServed, stage: str, count: int) -> None:
    for _ in range(count):
        with begin(picker.target) as stream:
            reach(stage, stream)
            stream.call.cancel()
    picker.idle()


@pytest.mark.slow
def test_no_message_holds_the_loop(picker: PickerServed, holds: LoopHolds) -> None:
    """Messages as large as gRPC lets in."""
    with picking(1) as (large, _):
        many = {f"{at:x}": "" for at in range(1_000_000)}
        unread = b"\x52\x00" * (4 * MIB)  # fields that the message doesn't have
        for kind, send in {
            "headers": lambda stream: stream.send(request_headers=HttpHeaders(headers=headers(many))),
            "a body": lambda stream: stream.send(request_body=HttpBody(body=b"[" * (16 * MIB), end_of_stream=True)),
            "fields": lambda stream: stream.send(request_body=HttpBody.FromString(unread)),
            "an answer": lambda stream: stream.send(response_body=HttpBody(body=b"\n" * (16 * MIB))),
        }.items():
            for _ in range(4):  # another process may have had the caches
                holds.longest, holds.where = 0.0, ""
                with begin(large.target) as stream:
                    send(stream)
                    with contextlib.suppress(grpc.RpcError):
                        stream.receive()
                    stream.call.cancel()
                large.idle()
                if holds.longest <= MOST_HOLD_S:
                    break
            print(f"{kind}: {holds.longest * 1000:.0f} ms in {holds.where}")
            if holds.longest > MOST_HOLD_S:
                holds.failed.append(kind)
    assert not holds.failed


def oversized(target: str) -> None:
    """Messages of 48 MiB, which gRPC refuses."""
    for _ in range(6):
        with begin(target) as stream:
            stream.send(request_body=HttpBody(body=bytes(48 * MIB)))
            refused(stream)


def unfinished(target: str) -> None:
    """Twenty-four bodies of 15 MiB that don't end."""
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            stream = stack.enter_context(begin(target))
            for _ in range(15):
                stream.send(request_body=HttpBody(body=b" " * MIB))
            stack.callback(stream.call.cancel)
        time.sleep(2.0)  # time for the bodies to arrive, which the memory of the server shows


def never_ending(target: str) -> None:
    """A thousand streams that say nothing after their headers."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stream = stack.enter_context(begin(target, **{"x-a": "b" * 10_000}))
            stack.callback(stream.call.cancel)


def flood(target: str) -> None:
    message = HttpHeaders(headers=headers({f"{at:x}": "" for at in range(500_000)}))
    for _ in range(10):
        with Exchanged(target) as stream:
            stream.send(request_headers=message)
            refused(stream)


def pieces(target: str) -> None:
    with begin(target) as stream:
        for _ in range(50_000):
            stream.send(request_body=HttpBody(body=b" "))
        stream.send(request_body=HttpBody(end_of_stream=True))
        stream.receive()
        stream.call.cancel()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_comes_back() -> None:
    with ServerProcess("mock", "--workers", "1") as mock:
        arguments = ["--fleet", mock.url, "--tokenizer", "bytes", "--http-port", "0", "--set", "held_bytes=67108864"]
        with ServerProcess("epp", *arguments) as server:
            target = eventually(lambda: re.findall(r"grpc://(127.0.0.1:\d+)", server.text), lambda: server.text)[0]
            never_ending(target)  # Python keeps some room for objects once it was needed
            unfinished(target)
            flood(target)
            failed = list[str]()
            for attack in (oversized, unfinished, never_ending, flood, pieces):
                before = server.rss
                attack(target)
                peak = server.rss
                end = time.monotonic() + BACK_S
                while server.rss > 1.1 * before and time.monotonic() < end:
                    time.sleep(0.5)
                said = f"{attack.__name__}: {before / MIB:.0f}, {peak / MIB:.0f}, {server.rss / MIB:.0f} MiB"
                print(said, flush=True)
                if server.rss > 1.1 * before:
                    failed.append(said)
            assert not failed
