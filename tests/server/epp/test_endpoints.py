"""Addresses of engines, as a data plane needs them."""

from __future__ import annotations

import asyncio

from kvyard.server.epp.endpoints import Endpoints
from kvyard.server.gateway.config import GatewayEngine
from kvyard.server.gateway.engine import Engine


def engine(url: str, name: str) -> Engine:
    return Engine(GatewayEngine(url=url, name=name))


def test_addresses_are_known_at_once_and_names_are_looked_up() -> None:
    answers: dict[str, list[str] | OSError] = {"vllm": ["fd00::5", "10.0.0.7", "10.0.0.5"]}

    async def resolve(host: str) -> list[str]:
        found = answers[host]
        if isinstance(found, OSError):
            raise found
        return list(found)

    named = engine("http://vllm:8000", "named")
    engines = {one.name: one for one in (engine("http://10.0.0.1", "v4"), engine("https://[fd00::1]", "v6"), named)}
    known = Endpoints(engines, resolve)
    assert known.of(engines["v4"]) == "10.0.0.1:80"
    assert known.of(engines["v6"]) == "[fd00::1]:443"
    assert known.of(named) is None
    asyncio.run(known.look())
    assert known.of(named) == "10.0.0.5:8000"  # of IPv4 first, and always the same one
    assert known.at("10.0.0.5:8000") is named
    assert known.at("10.0.0.7:8000") is None

    answers["vllm"] = OSError("no such host")
    asyncio.run(known.look())
    assert known.of(named) == "10.0.0.5:8000"  # a lookup that fails changes nothing
    answers["vllm"] = ["10.0.0.9"]
    asyncio.run(known.look())
    assert (known.at("10.0.0.5:8000"), known.at("10.0.0.9:8000")) == (None, named)

    del engines["named"]
    asyncio.run(known.look())
    assert known.at("10.0.0.9:8000") is None


def test_why_an_engine_has_none_is_known_until_it_has_one() -> None:
    answers: list[list[str] | OSError] = [OSError(0, "no such host"), [], ["10.0.0.9"]]

    async def resolve(host: str) -> list[str]:
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    known = Endpoints({"e": engine("http://gone:8000", "e")}, resolve)
    asyncio.run(known.look())
    assert known.reasons == {"e": "no such host"}
    asyncio.run(known.look(again=False))
    assert known.reasons == {"e": "it has no addresses"}
    asyncio.run(known.look(again=False))
    assert known.reasons == {}
