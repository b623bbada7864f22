"""A visit: how long it waits for an engine."""

from __future__ import annotations

import httpx
import pytest

from kvyard.server.doctor.visit import Questions, visit


def test_an_engine_gets_seconds_to_accept_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[httpx.Timeout] = []

    def refuse(**options: object) -> None:
        assert isinstance(options["timeout"], httpx.Timeout)
        given.append(options["timeout"])
        raise httpx.ConnectError("no")

    monkeypatch.setattr(httpx, "Client", refuse)
    assert visit("http://127.0.0.1:1", Questions()).problem == "no"
    assert given[0].connect == 5.0
