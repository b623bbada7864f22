"""Shared parts of the picker's tests: a real picker in a thread, and a client over real gRPC that plays the data plane."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc
import httpx
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from tests.server.gateway.support import SWIFT, fleet
from tests.server.mock.support import Served
from tests.server.support import PATIENCE
from tests.server.threaded import metrics_of
from tests.waiting import eventually

from kvyard.server.epp.config import convert
from kvyard.server.epp.messages import BUFFERED, NONE, STREAMED
from kvyard.server.epp.service import EppService, build
from kvyard.server.running import HttpServer, TlsFiles, listen

DESTINATION = "x-gateway-destination-endpoint"
STOP: Any = None
"""Ends what a client sends."""


@cache
def loop() -> asyncio.AbstractEventLoop:
    """One loop for all pickers of this process: gRPC has one poller a process, which doesn't get over loops that are closed."""
    found = asyncio.new_event_loop()
    threading.Thread(target=found.run_forever, daemon=True).start()
    return found


class PickerServed:
    """A picker on a loop in another thread."""

    def __init__(self, *, tls: TlsFiles | None = None, **settings: Any) -> None:
        self._app, self.service = build(
            convert({**SWIFT, "port": 0, "drain_seconds": 2, **settings}, "the test"), tls=tls
        )
        assert isinstance(self.service, EppService)
        self.gateway, self.picker = self.service.gateway, self.service.picker
        self._bound = listen("127.0.0.1", 0)
        self._server = HttpServer(self._app, self._bound, drain_seconds=2)
        self.client = httpx.Client(base_url=self._server.url, timeout=PATIENCE, trust_env=False)
        self._ending: Future[None] | None = None

    def __enter__(self) -> PickerServed:
        try:
            self._run(self._start()).result(PATIENCE)
        except BaseException:
            self.client.close()
            self._bound.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.end().result(PATIENCE)
        self._bound.close()

    def end(self) -> Future[None]:
        """Have it end, as a signal would; done once it has."""
        if self._ending is None:
            self.gateway.drain()
            self._ending = self._run(self._stop())
        return self._ending

    async def _start(self) -> None:
        try:
            await self.service.start()
            await self._server.start()
        except BaseException:
            await self.service.stop()
            raise

    async def _stop(self) -> None:
        await self._server.stop()
        await self.service.stop()

    def _run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, loop())

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.service.port}"

    def inside(self, action: Callable[[], Any]) -> Any:
        """Have ``action`` done on the picker's loop."""

        async def done() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(done(), loop()).result(PATIENCE)

    def ready(self, count: int, streams: int = 0) -> PickerServed:
        """Wait until so many engines get requests, and so many event streams are whole."""

        def well() -> bool:
            health = self.client.get("/health").json()
            return health["engines"].get("ready", 0) >= count and health["streams"].get("fresh", 0) >= streams

        eventually(well, lambda: self.client.get("/health").text)
        return self

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.client.get("/metrics").text)

    def idle(self) -> None:
        """Wait until nothing is under way, and see that nothing is held."""

        def quiet() -> bool:
            for pool in self.gateway.members.pools.values():
                pool.router.check_integrity()
            return self.picker.streams == 0 and self.gateway.traffic.counters.under_way == 0

        eventually(lambda: self.inside(quiet), lambda: (self.picker.streams, self.gateway.traffic.counters))
        assert self.picker.held == 0
        assert all(engine.in_flight == 0 for engine in self.gateway.members.engines.values())
        assert all(not pool.router.loads.active and not pool.waiting for pool in self.gateway.members.pools.values())


@contextmanager
def picking(
    workers: int = 2, *, mock: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[PickerServed, Served]]:
    """A picker for a fleet, both ready."""
    with fleet(workers=workers, **(mock or {})) as served, PickerServed(fleets=[served.url], **settings) as picker:
        yield picker.ready(workers, served.fleet.config.dp_size * workers), served


class Exchanged:
    """One stream between a data plane and a picker."""

    def __init__(self, target: str, credentials: Any = None) -> None:
        options = [
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.max_send_message_length", 64 << 20),
            # Without probes the window stays at 64 KiB, so what the picker can't write yet doesn't depend on the machine.
            ("grpc.http2.bdp_probe", 0),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._out: queue.Queue[Any] = queue.Queue()
        self.call = ExternalProcessorStub(self._channel).Process(iter(self._out.get, STOP), timeout=PATIENCE)

    def send(self, **message: Any) -> None:
        self._out.put(ProcessingRequest(**message))

    def receive(self) -> Any:
        """The next answer: what it is about, and the whole message. ``None`` where the picker has ended the stream."""
        found: ProcessingResponse = next(self.call, None)
        return found

    def __enter__(self) -> Exchanged:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.put(STOP)
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass  # cancelled by the test
        self._channel.close()


def headers(pairs: dict[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()])


def metadata(namespace: str, **values: Any) -> Metadata:
    inner = Struct()
    inner.update({name.replace("_", "-"): value for name, value in values.items()})
    return Metadata(filter_metadata={namespace: inner})


def config(request: int = STREAMED, response: int = STREAMED) -> ProtocolConfiguration:
    return ProtocolConfiguration(request_body_mode=request, response_body_mode=response)


class Answer:
    """Answer to a client of the data plane, and what went over gRPC on the way."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.endpoint = ""
        """As the header says."""
        self.immediate = False
        self.sent: dict[str, str] = {}
        """Headers that the picker set on the request."""
        self.removed: list[str] = []
        self.request_pieces: list[bytes] = []
        """Parts of the request that the picker handed back."""
        self.log: list[str] = []

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cached(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def mutations(common: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in common.header_mutation.set_headers}


class DataPlane:
    """Plays an Envoy: it asks the picker, sends requests to the engine that is named, and shows the picker the answer.

    Checks at each step what Envoy would refuse.
    """

    def __init__(
        self,
        target: str,
        *,
        request_mode: int = STREAMED,
        response_mode: int = STREAMED,
        says: bool = True,
        credentials: Any = None,
    ) -> None:
        self.target = target
        self.request_mode, self.response_mode = request_mode, response_mode
        self.says = says
        """True if it reports its modes."""
        self.credentials = credentials

    def ask(
        self,
        body: Any = None,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        given: dict[str, str] | None = None,
        piece: int = 1 << 14,
        context: Metadata | None = None,
        served: Callable[[str], str] | None = None,
        trailers: bool = False,
    ) -> Answer:
        """Carry a request. ``served`` chooses who really gets it, of the endpoints that the picker names."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        answer = Answer()
        first = {":method": method, ":path": path, "content-type": "application/json", **(given or {})}
        more: dict[str, Any] = (
            {} if not self.says else {"protocol_config": config(self.request_mode, self.response_mode)}
        )
        if context is not None:
            more["metadata_context"] = context
        with Exchanged(self.target, self.credentials) as stream:
            ends = not content
            stream.send(request_headers=HttpHeaders(headers=headers(first), end_of_stream=ends), **more)
            if not self._request(stream, content, piece, answer, trailers, ends):
                return answer
            endpoint = answer.endpoint.split(",")[0] if served is None else served(answer.endpoint)
            self._response(stream, answer, method, endpoint, path, content, first)
        return answer

    def _request(
        self, stream: Exchanged, content: bytes, size: int, answer: Answer, trailers: bool, ends: bool
    ) -> bool:
        if ends or self.request_mode == NONE:
            return self._destination(stream.receive(), answer, "request_headers")
        if self.request_mode == BUFFERED:
            passed = stream.receive()
            assert passed.WhichOneof("response") == "request_headers", passed
            assert not passed.request_headers.response.header_mutation.set_headers
            stream.send(request_body=HttpBody(body=content, end_of_stream=True))
            return self._destination(stream.receive(), answer, "request_body")
        parts = [content[at : at + size] for at in range(0, len(content), size)]
        for number, part in enumerate(parts):
            last = number == len(parts) - 1 and not trailers
            stream.send(request_body=HttpBody(body=part, end_of_stream=last))
        if trailers:
            stream.send(request_trailers=HttpTrailers(trailers=headers({"x-checksum": "1"})))
        if not self._destination(stream.receive(), answer, "request_headers"):
            return False
        back = b""
        while len(back) < len(content):
            found = stream.receive()
            assert found.WhichOneof("response") == "request_body", found
            streamed = found.request_body.response.body_mutation.streamed_response
            answer.request_pieces.append(streamed.body)
            back += streamed.body
            assert streamed.end_of_stream == (back == content and not trailers)
        assert back == content
        if trailers:
            assert stream.receive().WhichOneof("response") == "request_trailers"
        return True

    def _destination(self, found: Any, answer: Answer, kind: str) -> bool:
        what = found.WhichOneof("response")
        answer.log.append(what)
        if what == "immediate_response":
            said = found.immediate_response
            answer.immediate = True
            answer.status, answer.body = said.status.code, said.body
            answer.headers = {one.header.key: one.header.raw_value.decode() for one in said.headers.set_headers}
            return False
        assert what == kind, found
        common = getattr(found, kind).response
        answer.sent = mutations(common)
        answer.removed = list(common.header_mutation.remove_headers)
        answer.endpoint = answer.sent[DESTINATION]
        told = json_format.MessageToDict(found.dynamic_metadata)
        assert told == {"envoy.lb": {DESTINATION: answer.endpoint}}, "header and metadata must say the same"
        assert all(one.append_action == 2 for one in common.header_mutation.set_headers)
        return True

    def _response(
        self,
        stream: Exchanged,
        answer: Answer,
        method: str,
        endpoint: str,
        path: str,
        content: bytes,
        given: dict[str, str],
    ) -> None:
        """Have the engine answer, and show that to the picker as it comes."""
        sent = {
            name: value
            for name, value in {**given, **answer.sent}.items()
            if name[0] != ":" and name not in answer.removed
        }
        told = metadata("envoy.lb", x_gateway_destination_endpoint_served=endpoint)
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            with client.stream(method, f"http://{endpoint}{path}", content=content or None, headers=sent) as reply:
                said = {":status": str(reply.status_code), **dict(reply.headers)}
                stream.send(response_headers=HttpHeaders(headers=headers(said)), metadata_context=told)
                found = stream.receive()
                assert found.WhichOneof("response") == "response_headers", found
                answer.status = reply.status_code
                answer.headers = {**dict(reply.headers), **mutations(found.response_headers.response)}
                chunks = [*reply.iter_raw(), b""] if self.response_mode != BUFFERED else [reply.read()]
                if self.response_mode == NONE:
                    answer.body = b"".join(chunks)
                    return
                for number, chunk in enumerate(chunks):
                    stream.send(response_body=HttpBody(body=chunk, end_of_stream=number == len(chunks) - 1))
                    self._echo(stream, chunk, number == len(chunks) - 1)
                    answer.body += chunk

    def _echo(self, stream: Exchanged, chunk: bytes, last: bool) -> None:
        found = stream.receive()
        assert found.WhichOneof("response") == "response_body", found
        streamed = found.response_body.response.body_mutation.streamed_response
        if self.response_mode == STREAMED:
            assert streamed.body == chunk
            assert streamed.end_of_stream == last
        else:
            assert not found.response_body.response.HasField("body_mutation")


def endpoints(served: Served) -> Sequence[str]:
    """Where a fleet's workers are, as a data plane calls them."""
    return [url.removeprefix("http://") for url in served.urls]
