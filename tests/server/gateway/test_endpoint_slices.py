"""Engines by a service of Kubernetes, before an API server that answers as the API's reference says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually_async

pytest.importorskip("aiohttp", reason="needs kvyard[server]")

import aiohttp
from aiohttp import web
from tests.server.support import PATIENCE

from kvyard.errors import KvyardError
from kvyard.server.gateway import endpoint_slices as module
from kvyard.server.gateway.config import ServiceConfig
from kvyard.server.gateway.discovery import Address, Change
from kvyard.server.gateway.endpoint_slices import SliceWatch

PATH = "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices"


def slice_of(name: str, version: int, *endpoints: tuple[str, bool, bool], family: str = "IPv4") -> dict[str, Any]:
    """With the fields that a real one has, those that aren't read too."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": "vllm"},
            "ownerReferences": [{"kind": "Service", "name": "vllm"}],
        },
        "addressType": family,
        "ports": [
            {"name": "events", "protocol": "TCP", "port": 5557},
            {"name": "http", "protocol": "TCP", "port": 8000},
        ],
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
                "nodeName": "node-1",
                "targetRef": {"kind": "Pod", "name": f"pod-{host}"},
            }
            for host, ready, terminating in endpoints
        ],
    }


class ApiServer:
    """Lists what it has, and sends what it is told to those who watch."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.asked: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.status = 200
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.tokens.append(request.headers.get("authorization", ""))
        assert request.query["labelSelector"] == "kubernetes.io/service-name=vllm"
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if "watch" not in request.query:
            found = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "10"}, "items": self.items}
            return web.json_response(found)
        reply = web.StreamResponse(headers={"content-type": "application/json"})
        await reply.prepare(request)
        while (event := await self.events.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            await reply.write(line[:20])  # lines come in any pieces
            await reply.write(line[20:])
        return reply


@asynccontextmanager
async def served(token: Path | None = None) -> AsyncIterator[tuple[ApiServer, SliceWatch]]:
    api = ApiServer()
    app = web.Application()
    app.router.add_get(PATH, api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = ServiceConfig(
        service="vllm", namespace="ml", port="http", api_url=url, api_token_file=None if token is None else str(token)
    )
    async with aiohttp.ClientSession() as session:
        try:
            yield api, SliceWatch(session, config)
        finally:
            api.events.put_nowait(None)
            await runner.cleanup()


def told(scenario: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await scenario()

    asyncio.run(bounded())


def at(*hosts: str) -> tuple[Address, ...]:
    return tuple(Address(host, 8000) for host in hosts)


def test_endpoints_come_and_go(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")

    async def scenario() -> None:
        async with served(token) as (api, watch):
            api.items = [
                slice_of("a", 5, ("10.0.0.1", True, False), ("10.0.0.2", False, False), ("10.0.0.3", True, True)),
                slice_of("b", 6, ("10.0.0.4", True, False)),
                slice_of("names", 7, ("pod.example.org", True, False), family="FQDN"),
            ]
            changes = watch.watch()
            assert await anext(changes) == Change(at("10.0.0.1", "10.0.0.4"))
            send = api.events.put_nowait
            send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "11"}}})
            send({"type": "MODIFIED", "object": slice_of("a", 12, ("10.0.0.1", True, True), ("10.0.0.2", True, False))})
            assert await anext(changes) == Change(at("10.0.0.2"), at("10.0.0.1"))
            send({"type": "ADDED", "object": slice_of("six", 13, ("fd00::1", True, False), family="IPv6")})
            assert await anext(changes) == Change((Address("fd00::1", 8000),))
            # A watch that ends goes on from the last version; tokens are read again.
            token.write_text("second")
            send(None)
            send({"type": "ADDED", "object": {**slice_of("empty", 14), "endpoints": None}})  # a service without pods
            send({"type": "DELETED", "object": slice_of("b", 15)})
            assert await anext(changes) == Change((), at("10.0.0.4"))
            assert api.asked[-1]["resourceVersion"] == "13" and api.asked[-1]["allowWatchBookmarks"] == "true"
            assert api.tokens[0] == "Bearer first" and api.tokens[-1] == "Bearer second"
            # One whose version is forgotten is begun again by a list, which may differ.
            api.items = [slice_of("a", 90, ("10.0.0.9", True, False))]
            send({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
            assert await anext(changes) == Change(at("10.0.0.9"), (*at("10.0.0.2"), Address("fd00::1", 8000)))
            assert watch.failures == 0

    told(scenario)


def test_an_api_server_that_is_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.01,))

    async def scenario() -> None:
        async with served() as (api, watch):
            api.items = [slice_of("a", 5, ("10.0.0.1", True, False))]
            changes = watch.watch()
            await anext(changes)
            api.status = 403
            api.events.put_nowait(None)
            following = asyncio.ensure_future(anext(changes))
            await eventually_async(lambda: watch.failures >= 2)
            assert "403" in watch.reason and watch.addresses == frozenset(at("10.0.0.1"))
            api.items, api.status = [slice_of("a", 5, ("10.0.0.2", True, False))], 200
            assert await following == Change(at("10.0.0.2"), at("10.0.0.1")) and not watch.reason

    told(scenario)


def test_outside_of_a_cluster_more_settings_are_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(KvyardError, match="give api_url"):
                SliceWatch(session, ServiceConfig(service="vllm", port=8000))
            with pytest.raises(KvyardError, match="give namespace"):
                SliceWatch(session, ServiceConfig(service="vllm", port=8000, api_url="http://h"))
            with pytest.raises(KvyardError, match="give ca_file"):
                SliceWatch(session, ServiceConfig(service="vllm", port=8000, api_url="https://h", namespace="n"))

    told(scenario)
