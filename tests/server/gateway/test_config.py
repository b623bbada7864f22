"""Settings of engines."""

from __future__ import annotations

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import ScriptedEngine, gated, plain

from kvyard.errors import KvyardError
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine, NameConfig, check_url


def test_urls_and_streams() -> None:
    assert check_url("http://a:1/", "x") == "http://a:1"
    for bad in ("a:1", "ftp://a", "http://", "http://a:x", "http://a b", "http://a?x=1", "http://a:99999"):
        with pytest.raises(KvyardError):
            check_url(bad, "x")
    one = GatewayEngine(url="http://h:1", events="tcp://h:5", replay="tcp://h:9", dp_size=3).registrations("m")
    assert [(told.endpoint, told.dp_size, told.instance_id) for told in one] == [("tcp://h:5", 3, "h:1")]
    listed = GatewayEngine(url="http://h:1", events=["tcp://h:5", "tcp://h:7"], dp_size=2).registrations("m")
    assert [(told.endpoint, told.dp_rank) for told in listed] == [("tcp://h:5", 0), ("tcp://h:7", 1)]
    with pytest.raises(KvyardError, match="2 ranks"):
        GatewayEngine(url="http://h:1", events=["tcp://h:5"], dp_size=2).registrations("m")
    engine = NameConfig(host="n", port=80, events_port=5, model="m").engine("[::1]:80")
    assert (engine.url, engine.events, engine.replay, engine.called) == (
        "http://[::1]:80",
        "tcp://[::1]:5",
        None,
        "[::1]:80",
    )
    with pytest.raises(KvyardError, match="two engines"):
        GatewayConfig(engines=[GatewayEngine(url="http://h:1"), GatewayEngine(url="http://h:1/")])


def test_names_and_urls_that_clients_would_see() -> None:
    with pytest.raises(KvyardError, match="printed in one line"):
        GatewayEngine(url="http://h:1", name="a\r\nset-cookie: b=c")
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        said = gate.post("/admin/engines", 400, url="http://h:1", name="a\r\nx: y").json()
        assert "printed in one line" in said["error"]["message"]
        said = gate.post("/admin/engines", 400, url="http://user:secret@h:1").json()
        assert "has a password in it" in said["error"]["message"] and "secret" not in said["error"]["message"]


def test_whether_some_engine_has_a_role() -> None:
    both, prefill = GatewayEngine(url="http://h:1"), GatewayEngine(url="http://h:2", role="prefill")
    assert not GatewayConfig().has_roles and not GatewayConfig(engines=(both,)).has_roles
    assert GatewayConfig(engines=(prefill,)).has_roles and GatewayConfig(engines=(both, prefill)).has_roles
