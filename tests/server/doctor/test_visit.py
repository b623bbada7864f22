"""A visit: what is noted of an engine that can't be visited."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from kvyard.server.doctor import visit as visiting
from kvyard.server.doctor.visit import Questions, visit


def test_an_engine_that_accepts_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visiting.CONNECT == 5.0
    monkeypatch.setattr(visiting, "CONNECT", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for waiting in (first, second):  # these fill the queue of connections, and nobody accepts them
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        assert visit(f"http://127.0.0.1:{full.getsockname()[1]}", Questions()).problem == "it took too long"


def test_an_engine_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert visit(f"http://127.0.0.1:{port}", Questions()).problem == "Connection refused"
    assert "is no URL" in visit("http://:x", Questions()).problem
