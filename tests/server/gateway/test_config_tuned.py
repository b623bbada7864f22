"""A gateway that is started with the file a search wrote."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.lab.tune.test_tune import searched
from tests.server.gateway.support import PATIENCE, GatewayProcess, fleet

from kvyard.errors import KvyardError
from kvyard.server.gateway.config import convert, own_part

pytestmark = pytest.mark.zmq


@pytest.mark.timeout(400)
def test_a_tuned_file_sets_policy_and_options(tmp_path: Path) -> None:
    made = searched(tmp_path, "min ttft_mean", None, search="router.*,workers=2..4", trials=3, router="least-time")
    made.save()
    assert made.answer is not None
    options = made.answer.point["router_options"]
    assert isinstance(options, dict) and options
    with fleet() as served:
        arguments = ("--config", str(tmp_path / "tune.toml"), "--fleet", served.url, "--tokenizer", "bytes")
        with GatewayProcess(*arguments) as process, httpx.Client(base_url=process.url, timeout=PATIENCE) as client:
            eventually(lambda: client.get("/health").status_code == 200)
            reply = client.post("/v1/completions", json={"prompt": "once upon a time " * 8, "max_tokens": 2})
            assert reply.status_code == 200 and "policy=least-time" in reply.headers["x-kvyard-decision"]
            assert "policy least-time" in process.text


def test_settings_of_replays_are_ignored_and_no_others() -> None:
    found = own_part(
        {
            "router": {"policy": "random"},
            "replay": {"workers": 3, "host_bytes": "1GiB"},
            "prices": {"card": 1},
            "gateway": {"port": 9},
        },
        "x.toml",
    )
    made = convert(found, "x.toml")
    assert made.router.policy == "random" and made.port == 9
    with pytest.raises(KvyardError, match="port is given twice, once in \\[gateway\\]"):
        own_part({"port": 1, "gateway": {"port": 2}}, "x.toml")
    with pytest.raises(KvyardError, match="gateway must be a table"):
        own_part({"gateway": 3}, "x.toml")
    with pytest.raises(KvyardError, match="worker"):
        convert(own_part({"workers": 3}, "x.toml"), "x.toml")
