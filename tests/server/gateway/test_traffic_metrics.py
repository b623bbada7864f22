"""Metrics that clients can't make grow."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, gated, plain
from tests.server.gateway.support import together

from kvyard.server.http import Refusal

pytestmark = pytest.mark.zmq


def test_a_page_of_refusals_has_no_names_of_its_own() -> None:
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        replies = together([lambda at=at: gate.complete("x", 404, model=f"invented-{at}") for at in range(5)])
        assert all(isinstance(one, httpx.Response) for one in replies)
        assert "invented" not in gate.client.get("/metrics").text
        with pytest.raises(Refusal):
            gate.gateway.members.engine("invented")
