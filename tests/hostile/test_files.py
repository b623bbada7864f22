"""Configuration files with absurd contents: refused in a sentence, and a gateway that runs keeps what it had."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from kvyard.errors import KvyardError
from kvyard.server.gateway.config import GatewayConfig, convert
from kvyard.server.indexer.config import load
from kvyard.server.running import listen

ABSURD = {
    "no UTF-8": b"host = '\xff'",
    "deep": b"a=" + b"[" * 100_000,
    "a long number": b"queue = " + b"9" * 5000,
    "a number beyond": b"queue = 99999999999999999999999",
    "no number": b"silent_seconds = nan",
    "infinity": b"silent_seconds = inf",
    "half a character": b'host = "\\ud800"',
    "twice": b"port = 1\nport = 2",
    "no list": b"engines = 5",
    "a bracket": b'engines = [{url = "http://[::1"}]',
    "a label too long": b'engines = [{url = "http://%b.example"}]' % ("ä" * 70).encode(),
    "an empty label": b'engines = [{url = "http://a..b"}]',
    "a control character": b'fleets = ["http://a\\u0000b"]',
}


def read(path: Path) -> GatewayConfig:
    return convert(load(path), str(path))


@pytest.mark.parametrize("kind", ABSURD)
def test_it_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_bytes(ABSURD[kind])
    with pytest.raises(KvyardError) as refused:
        read(path)
    assert len(str(refused.value)) < 500 + len(str(path))


def test_a_host_that_is_no_name() -> None:
    for host in ("a\0b", "ä" * 70, "a..b"):
        with pytest.raises(KvyardError, match="can't find"):
            listen(host, 0)
