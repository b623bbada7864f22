"""The picker as a service: gRPC for the data plane and its health checks, around a gateway's parts, on one loop."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.epp.config import EppConfig
from kvyard.server.epp.ext_proc import ProcessingResponse
from kvyard.server.epp.messages import read_message
from kvyard.server.epp.picker import TEXTS, EndpointPicker
from kvyard.server.epp.stream import RequestStream
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.routes import assemble
from kvyard.server.running import AsyncService, TlsFiles

LIVE = "liveness"
PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
READY = ("", "readiness", PROCESSOR)
"""Health services that follow whether requests can be placed."""
LOOK = 0.25
"""Seconds between two looks at that."""
ROOM = 1 << 20
"""Bytes of a message beside a body."""


class EppServicer:
    """Envoy's external processor."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    async def Process(self, request_iterator: Any, context: Any) -> None:  # the protocol's name
        """Serve one request of the data plane."""
        stream = RequestStream(self._picker, context.write)
        try:
            read, end = context.read, grpc.aio.EOF
            while (message := await read()) is not end:
                if not await stream.take(message):
                    break
        finally:
            stream.close()


class EppService(AsyncService):
    """A gateway's parts, with gRPC before them. Use it in an ``async with`` block, or ``start`` and ``stop`` it."""

    def __init__(self, config: EppConfig, gateway: Gateway, picker: EndpointPicker, tls: TlsFiles | None) -> None:
        """Opens nothing yet."""
        self.config = config
        self.gateway = gateway
        self.picker = picker
        self.port = 0
        """Port of gRPC, once it is started."""
        self._tls = tls
        self._server: Any = None
        self._health = health_aio.HealthServicer()
        self._hurry = asyncio.Event()

    async def start(self) -> None:
        """Take in the engines and answer the data plane. Raises ``KvyardError`` for what can't be done."""
        await self.gateway.start()
        # Data planes may ask at once, and serve without a picker where none listens: it shouldn't refuse what they would serve.
        await self.gateway.members.looked_at(bool(self.config.names or self.config.services))
        await self.picker.endpoints.look()
        most = self.config.limits.body_bytes + ROOM
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=self.config.streams_at_once,
            options=[
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", most),
                ("grpc.so_reuseport", 0),  # else a second one would share the port without a word
            ],
        )
        process = grpc.stream_stream_rpc_method_handler(
            EppServicer(self.picker).Process,
            request_deserializer=read_message,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        add_HealthServicer_to_server(self._health, self._server)
        self.port = self._bind(self._server)
        await self._health.set(LIVE, HealthCheckResponse.SERVING)
        await self._say_ready(False)
        keep = self.gateway.supervisor.keep
        keep("addresses of engines", self.picker.endpoints.follow)
        keep("health over gRPC", self._follow_health)
        await self._server.start()

    async def stop(self) -> None:
        """Take no more requests, let those in flight end, and release everything."""
        if self._server is not None:
            ending = asyncio.ensure_future(self._server.stop(self.config.drain_seconds))
            hurry = asyncio.ensure_future(self._hurry.wait())
            await asyncio.wait((ending, hurry), return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not ending.done():
                await self._server.stop(None)
            await ending
        await self.gateway.stop()

    def hurry(self) -> None:
        """Stop waiting for requests in flight. On its loop."""
        self._hurry.set()

    @property
    def url(self) -> str:
        """Return the address that the data plane calls."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'grpc' if self._tls is None else 'grpcs'}://{host}:{self.port}"

    def _bind(self, server: Any) -> int:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        address = f"{host}:{self.config.port}"
        try:
            if self._tls is None:
                port: int = server.add_insecure_port(address)
            else:
                pair = tuple(_read(path) for path in (self._tls.key, self._tls.certificate))
                port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            port = 0
        if not port:
            raise KvyardError(f"can't listen at {address}: it may be taken; choose another --port, or 0 for any")
        return port

    async def _follow_health(self) -> None:
        was_ready = False
        while True:
            ready = self.ready
            if ready != was_ready:
                was_ready = ready
                await self._say_ready(ready)
            await pause(LOOK)

    @property
    def ready(self) -> bool:
        """Return true if requests can be placed."""
        engines = self.gateway.members.engines.values()
        return not self.gateway.draining and any(engine.up and not engine.draining for engine in engines)

    async def _say_ready(self, ready: bool) -> None:
        for name in READY:
            await self._health.set(name, HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def build(
    config: EppConfig,
    *,
    upstream_token: str | None = None,
    index_token: str | None = None,
    admin_token: str | None = None,
    tls: TlsFiles | None = None,
) -> tuple[Any, EppService]:
    """Return the application for metrics, health and admin, and the service that is to run around it. Raises
    ``KvyardError``.
    """
    app, gateway, intake = assemble(
        config,
        title="kvyard epp",
        proxies=False,
        upstream_token=upstream_token,
        index_token=index_token,
        admin_token=admin_token,
    )
    picker = EndpointPicker(gateway, intake, config)
    gateway.metrics.add_texts(TEXTS)
    gateway.metrics.sources.append(picker.samples)
    gateway.wrong_beside.append(picker.conditions)
    return app, EppService(config, gateway, picker, tls)
