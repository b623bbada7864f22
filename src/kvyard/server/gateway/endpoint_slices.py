"""Engines by a service of Kubernetes: the endpoints of its EndpointSlices, listed once and then watched.

The API server's state takes effect immediately, unlike an answer of DNS: an endpoint that isn't ready, or terminates, gets no
more requests, and a new one gets them once it is healthy. While the API server is unreachable, known endpoints stay.

Only two requests of the API are needed, so it uses the gateway's own HTTP session. kubernetes-asyncio 36 costs a
process 38 MB, and its models refuse slices whose ``endpoints`` are null, as those of a service without pods are. lightkube 1.0
brings a third HTTP client, and its watches have neither a read timeout nor bookmarks.
"""

import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvyard.clock import pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import ServiceConfig
from kvyard.server.gateway.discovery import Address, Change

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Path of a pod's token, the API server's certificate and its namespace."""
WATCH_SECONDS = 290
"""After which the API server ends a watch, and it is begun again where it was."""
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before the API server is asked again, the last one again and again."""
ADDRESSES = ("IPv4", "IPv6")
GONE = 410


class EndpointConditions(msgspec.Struct, frozen=True):
    """State of an endpoint; missing conditions count as those of a healthy endpoint."""

    ready: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(msgspec.Struct, frozen=True):
    """A pod, or whatever else serves."""

    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()


class SlicePort(msgspec.Struct, frozen=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class ObjectMetadata(msgspec.Struct, rename="camel", frozen=True):
    """Name and version of an object."""

    name: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct, rename="camel", frozen=True):
    """Some endpoints of a service."""

    metadata: ObjectMetadata = ObjectMetadata()
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None
    code: int = 0
    """An error, sent in place of a slice."""


class EndpointSliceList(msgspec.Struct, frozen=True):
    """List of the API server."""

    metadata: ObjectMetadata
    items: list[EndpointSlice] | None = None


class SliceEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: EndpointSlice


class WatchExpired(Exception):
    """The API server no longer knows the version that a watch would go on from."""


class SliceWatch:
    """The endpoints of one service."""

    def __init__(self, session: aiohttp.ClientSession, config: ServiceConfig) -> None:
        """Sends no request yet. Raises ``KvyardError`` if the API server, its certificate or the namespace are unknown."""
        self.config = config
        self.reason = ""
        """Why the API server couldn't be asked the last time; empty where it could."""
        self.failures = 0
        self._session = session
        self._slices: dict[str, frozenset[Address]] = {}
        self._version = ""
        self._tls: ssl.SSLContext | None = None
        url = config.api_url or _own_server()
        namespace = config.namespace or _own_namespace()
        if url.startswith("https:"):
            file = config.ca_file or str(ACCOUNT / "ca.crt")
            try:
                self._tls = ssl.create_default_context(cafile=file)
            except (OSError, ssl.SSLError):
                raise KvyardError(f"{file} is no certificate of an API server: give ca_file as PEM") from None
        self._url = f"{url.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={config.service}"}

    @property
    def addresses(self) -> frozenset[Address]:
        """Return the known addresses."""
        return frozenset().union(*self._slices.values())

    async def watch(self) -> AsyncIterator[Change]:
        """Yield changes, for ever; a failure changes nothing."""
        tries = 0
        while True:
            try:
                if not self._version:
                    yield await self._list()
                tries = 0
                async for change in self._follow():
                    if change:
                        yield change
            except WatchExpired:
                self._version = ""
            except (aiohttp.ClientError, TimeoutError, OSError, KvyardError, *DECODE_ERRORS) as error:
                self._version = ""
                self._failed(str(error) or type(error).__name__)
                await pause(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1

    async def _list(self) -> Change:
        async with self._get(dict(self._query), 30.0) as reply:
            listed = msgspec.json.decode(await _whole(reply), type=EndpointSliceList)
        before = self.addresses
        self._slices = {endpoint_slice.metadata.name: self._of(endpoint_slice) for endpoint_slice in listed.items or ()}
        self._version = listed.metadata.resource_version
        if self.reason:
            log.warning("service %s is found again", self.config.service)
            self.reason = ""
        return _change(before, self.addresses)

    async def _follow(self) -> AsyncIterator[Change]:
        """Yield changes until the API server ends the watch. Raises ``WatchExpired``."""
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": self._version,
        }
        async with self._get(query, WATCH_SECONDS + 30.0) as reply:
            if reply.status == GONE:
                raise WatchExpired
            if reply.status != 200:
                raise KvyardError(f"the API server answered {reply.status}")
            rest = b""
            async for part in reply.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield self._take(msgspec.json.decode(line, type=SliceEvent))

    def _take(self, event: SliceEvent) -> Change:
        if event.type == "ERROR":
            if event.object.code == GONE:
                raise WatchExpired
            raise KvyardError(f"the API server ends the watch with {event.object.code}")
        self._version = event.object.metadata.resource_version or self._version
        before = self.addresses
        name = event.object.metadata.name
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[name] = self._of(event.object)
        elif event.type == "DELETED":
            self._slices.pop(name, None)
        return _change(before, self.addresses)

    def _of(self, endpoint_slice: EndpointSlice) -> frozenset[Address]:
        """Return the addresses of a slice's endpoints that can take requests."""
        wanted = self.config.port
        ports = [
            port.port
            for port in endpoint_slice.ports or ()
            if port.port is not None and wanted in (port.name, port.port)
        ]
        port = ports[0] if ports else wanted
        if endpoint_slice.address_type not in ADDRESSES or not isinstance(port, int):
            return frozenset()
        return frozenset(
            Address(host, port)
            for endpoint in endpoint_slice.endpoints or ()
            if endpoint.conditions.ready is not False and not endpoint.conditions.terminating
            for host in endpoint.addresses[:1]
        )

    def _get(self, query: dict[str, str], seconds: float) -> Any:
        headers = {"accept": "application/json"}
        # Read each time: these tokens are replaced every hour or so.
        file = Path(self.config.api_token_file) if self.config.api_token_file else ACCOUNT / "token"
        if file.exists():
            headers["authorization"] = f"Bearer {file.read_text(encoding='utf-8').strip()}"
        timeout = aiohttp.ClientTimeout(total=seconds)
        return self._session.get(self._url, params=query, headers=headers, timeout=timeout, ssl=self._tls or True)

    def _failed(self, why: str) -> None:
        self.failures += 1
        if not self.reason:
            count = len(self.addresses)
            log.warning("service %s can't be watched: %s; its %d endpoints are kept", self.config.service, why, count)
        self.reason = why


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    if reply.status != 200:
        raise KvyardError(f"the API server answered {reply.status}")
    return await reply.read()


def _change(before: frozenset[Address], after: frozenset[Address]) -> Change:
    return Change(tuple(sorted(after - before)), tuple(sorted(before - after)))


def _own_server() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host is None:
        raise KvyardError("this is no pod of Kubernetes: give api_url with the service")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _own_namespace() -> str:
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        raise KvyardError("this is no pod of Kubernetes: give namespace with the service") from None
