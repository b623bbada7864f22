"""A server that wants TLS and a user: by its URL, with no more rights than the index needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="needs kvyard[redis]")

from tests.index.redis.server import PROGRAM, RedisServer
from tests.ports import free_ports
from tests.server.tls import certificate

from kvyard.clock import WallClock
from kvyard.errors import KvyardError
from kvyard.index.redis.rows import RedisIndex
from kvyard.index.redis.server import Server

pytestmark = pytest.mark.redis

RIGHTS = "~kvyard:* ~kvy:* +@read +@write +@scripting +info +select +ping"
"""As docs/how-to/redis-index.md says."""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[RedisServer, str]]:
    """A server that speaks TLS beside, and the query that makes a client trust it."""
    if PROGRAM is None:
        pytest.skip("needs redis-server: scripts/setup-test-deps.sh")
    cert, key = certificate(tmp_path)
    port = free_ports(1)
    tls = ("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key)
    server = RedisServer(tmp_path, *tls, "--tls-auth-clients", "no", "--tls-ca-cert-file", cert)
    try:
        try:
            server.start()
        except AssertionError:
            pytest.skip("this redis-server has no TLS")
        assert "OK" in server.ask("ACL", "SETUSER", "kvyard", "on", ">a password", *RIGHTS.split())
        server.ask("ACL", "SETUSER", "default", "off")
        yield server, f"kvyard:a%20password@127.0.0.1:{port}/0?ssl_ca_certs={cert}"
    finally:
        server.close()


def test_an_index_over_tls_as_a_user_with_few_rights(secured: tuple[RedisServer, str]) -> None:
    _, address = secured
    index = RedisIndex(f"rediss://{address}", namespace="n")
    index.store(0, [1, 2, 3])
    index.flush()
    assert index.lookup([1, 2, 3]) == [(3, 1)] and not index.reason
    index.remove(0, [3])
    index.clear(0)
    index.flush()
    assert index.lookup([1, 2, 3]) == [] and not index.server.errors
    assert "password" not in index.server.address
    index.close()


def test_load_is_shared_over_tls_too(secured: tuple[RedisServer, str]) -> None:
    from kvyard.server.gateway.sharing import probe

    asyncio.run(probe(f"rediss://{secured[1]}"))


@pytest.mark.parametrize("change", [("a%20password", "wrong"), ("?ssl_ca_certs", "?ssl_ca_path")])
def test_a_wrong_password_and_a_stranger_are_one_sentence(
    secured: tuple[RedisServer, str], change: tuple[str, str]
) -> None:
    address = secured[1].replace(*change)
    server = Server(f"rediss://{address}", timeout=5.0, backoff=0, clock=WallClock())
    with pytest.raises(KvyardError, match="can't be used"):
        server.connect()
    assert {"auth", "wrongpass"} & server.errors.keys() or "certificate" in server.reason, server.reason
    server.close()
