"""Headers on their way through."""

from __future__ import annotations

from kvyard.index import Identity, Indexer
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.server.gateway.headers import decision_header, downstream, upstream


def test_headers_of_one_hop_stay() -> None:
    given = [
        (b"host", b"x"),
        (b"authorization", b"Bearer c"),
        (b"connection", b"keep-alive, x-a"),
        (b"x-a", b"1"),
        (b"x-b", "ü".encode()),
        (b"x-c", b"\xff"),
        (b"x-request-id", b"old"),
        (b"content-length", b"5"),
    ]
    assert upstream(given, "new", None, True) == [
        (b"x-request-id", b"new"),
        (b"authorization", b"Bearer c"),
        (b"x-b", "ü".encode()),
        (b"x-c", b"\xff"),
    ]
    assert (b"authorization", b"Bearer c") not in upstream(given, "new", None, False)
    assert upstream(given, "new", "Bearer e", True)[-1] == (b"authorization", b"Bearer e")
    down = downstream([(b"Date", b"x"), (b"Content-Type", b"y"), (b"Transfer-Encoding", b"chunked")], "d")
    assert down == [(b"content-type", b"y"), (b"x-kvyard-decision", b"d")]


def test_a_decision_in_a_line() -> None:
    router = Router(RouterConfig(policy="round-robin"), ["w"], Indexer(Identity(16)))
    decision = router.route(RouteRequest("a", [1, 2], 40), 0)
    assert decision_header(decision, 1) == "worker=w@0; policy=round-robin; why=turn; hit=0/2; best=0; cost=0.000"
    assert decision_header(decision, 2).endswith("; tries=2")


def test_a_decision_says_what_was_only_predicted() -> None:
    router = Router(RouterConfig(), ["w"], Indexer(Identity(16)))
    router.route(RouteRequest("a", [1, 2], 40), 0)
    found = decision_header(router.route(RouteRequest("b", [1, 2, 3], 60), 0), 1)
    assert "hit=2/3;" in found and found.endswith("; predicted=2")


def test_headers_named_by_connection_are_not_forwarded() -> None:
    sent = [(b"connection", b"X-Hop"), (b"x-hop", b"1"), (b"x-other", b"2")]
    assert upstream(sent, "id", None, True) == [(b"x-request-id", b"id"), (b"x-other", b"2")]
    # Not even by that can a client take away what we say ourselves.
    sent = [(b"connection", b"close, x-request-id, authorization"), (b"authorization", b"Bearer theirs")]
    assert upstream(sent, "id", "Bearer ours", True) == [(b"x-request-id", b"id"), (b"authorization", b"Bearer ours")]
    said = [(b"Connection", b"x-private"), (b"X-Private", b"1"), (b"X-Public", b"2")]
    assert downstream(said, "d") == [(b"x-public", b"2"), (b"x-kvyard-decision", b"d")]
