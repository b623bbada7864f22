"""Nobody gets in: pages of other sites, names that are made to point here, clients at operators' routes, strange networks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import Gated, GatewayProcess
from tests.server.mock.support import Served as MockServed
from tests.server.support import Served
from tests.server.tls import certificate

from kvyard.errors import KvyardError
from kvyard.server.guard import Guard
from kvyard.server.http import Refusal
from kvyard.server.mock.config import make_config
from kvyard.server.mock.fleet import MockFleet
from kvyard.server.networks import Networks
from kvyard.server.running import tls_files

REGISTER = {"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:5557"}
ATTACKS: list[tuple[str, str, dict[str, Any]]] = [
    ("index", "/register", REGISTER),
    ("index", "/unregister", {"model_name": "m", "instance_id": 1}),
    ("index", "/score", {"model_name": "m", "token_ids": [1]}),
    ("mock", "/admin/stall", {"seconds": 1}),
    ("mock", "/admin/kill", {}),
    ("mock", "/admin/faults", {"error_rate": 1.0}),
    ("mock", "/v1/completions", {"prompt": "x"}),
    ("mock", "/reset_prefix_cache", {}),
    ("gateway", "/admin/engines", {"url": "http://127.0.0.1:1"}),
    ("gateway", "/v1/completions", {"prompt": "x"}),
    ("gateway", "/explain", {"body": {}}),
]


@pytest.fixture(scope="module")
def servers() -> Any:
    with Served() as index, MockServed() as mock, Gated() as gateway:
        yield {"index": index.client, "mock": mock.client, "gateway": gateway.client}


@pytest.mark.parametrize(("server", "path", "body"), ATTACKS)
def test_pages_of_other_sites_get_nowhere(servers: dict[str, httpx.Client], server: str, path: str, body: Any) -> None:
    client = servers[server]
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example:8000"},
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    ):
        reply = client.post(path, json=body, headers=headers)
        assert reply.status_code == 403, (headers, reply.text)
    host = client.base_url.netloc.decode()
    own = client.post("/nowhere", headers={"Origin": f"http://{host}", "Host": host})
    assert own.status_code == 404


def test_bodies_of_forms_are_refused(servers: dict[str, httpx.Client]) -> None:
    for server, path in (("index", "/register"), ("mock", "/admin/stall"), ("gateway", "/admin/engines")):
        reply = servers[server].post(path, content=b"{}", headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415, reply.text
    # As curl -d says it.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert servers["index"].post("/score", content=b"{}", headers=form).status_code == 422
    assert servers["mock"].get("/admin/workers", headers={"Origin": "https://evil.example"}).status_code == 403
    assert servers["gateway"].get("/health", headers={"Host": "evil.example"}).status_code == 503


def test_names_it_may_be_called_by() -> None:
    def passes(guard: Guard, host: str, *, token: bool = False) -> bool:
        try:
            guard.check("POST", {"host": host}, token)
        except Refusal as refusal:
            assert refusal.status == 403
            return False
        return True

    here = Guard("127.0.0.1")
    for name in ("localhost:1", "LOCALHOST", "127.0.0.1:8", "[::1]:8", "10.1.2.3", "x.localhost", "", "localhost."):
        assert passes(here, name), name
    assert not passes(here, "evil.example") and passes(here, "evil.example", token=True)
    assert passes(Guard("127.0.0.1", ("api.example",)), "api.example:80")
    assert passes(Guard("0.0.0.0"), "any.example"), "its name isn't known here"
    assert not passes(Guard("0.0.0.0", ("api.example",)), "any.example")
    Guard("127.0.0.1", ("api.example",)).check("POST", {"host": "127.0.0.1:1", "origin": "https://api.example"}, False)


def test_clients_are_no_operators_unless_configured() -> None:
    with Gated(token="clients") as gated:
        reply = gated.client.post("/admin/drain", json={"engine": "x"})
        assert reply.status_code == 403 and "KVYARD_ADMIN_TOKEN" in reply.text
        assert gated.client.get("/dashboard/view").status_code == 403
        assert gated.client.get("/v1/models").status_code == 200
    with Gated(token="clients", admin_token="operators") as gated:
        assert gated.client.get("/admin/engines").status_code == 401
        admin = {"Authorization": "Bearer operators"}
        assert gated.client.get("/admin/engines", headers=admin).status_code == 200
        assert gated.client.get("/dashboard/view", headers=admin).status_code == 200
    with Gated(token="same", admin_token="same") as gated:
        assert gated.client.get("/admin/engines").status_code == 200


def test_networks_of_workers() -> None:
    with Served(networks=["127.0.0.0/30", "::1/128"]) as served:
        for endpoint in ("tcp://10.0.0.1:5557", "tcp://127.0.0.9:5557", "ipc:///tmp/x", "tcp://169.254.169.254:80"):
            reply = served.client.post("/register", json={**REGISTER, "endpoint": endpoint})
            assert reply.status_code == 403 and "127.0.0.0/30" in reply.text, reply.text
        served.register(instance_id=1, endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://localhost:5558")
        reply = served.client.post(
            "/register", json={**REGISTER, "instance_id": 2, "replay_endpoint": "tcp://8.8.8.8:1"}
        )
        assert reply.status_code == 403
    with Gated(networks=["10.0.0.0/8"]) as gated:
        gated.post("/admin/engines", 403, url="http://127.0.0.1:1")
        gated.post("/admin/engines", 403, url="http://10.0.0.1:1", events="tcp://127.0.0.1:1")
        gated.post("/admin/engines", 201, url="http://10.0.0.1:1", events=["tcp://10.0.0.1:2"])
    with pytest.raises(KvyardError, match=r"networks: .*write 10\.0\.0\.0/8"):
        Networks(["10.0.0.1/8"])
    with pytest.raises(Refusal, match="can't be looked up"):
        asyncio.run(Networks(["10.0.0.0/8"]).check(["http://no.such.name.invalid:1"]))


def test_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)
    fleet = MockFleet(make_config({}), tls=tls_files(cert, key))

    async def ask() -> int:
        async with fleet, httpx.AsyncClient(verify=trusting, trust_env=False) as client:
            assert fleet.urls[0].startswith("https://127.0.0.1:")
            return (
                await client.post(f"{fleet.urls[0]}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            ).status_code

    assert asyncio.run(ask()) == 200
    with GatewayProcess("--tls-cert", cert, "--tls-key", key) as process:
        with httpx.Client(verify=trusting, trust_env=False) as client:
            url = str(eventually(lambda: https_url(process.text)))
            assert client.get(f"{url}/ready").status_code == 503
            with pytest.raises(httpx.TransportError):
                client.get(url.replace("https", "http") + "/ready")


def https_url(text: str) -> str:
    return next((word.strip(",") for word in text.split() if word.startswith("https://")), "")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (lambda cert, key: (cert, None), "give both"),
        (lambda cert, key: (key, cert), "as PEM"),
        (lambda cert, key: ("/nowhere", key), "No such file"),
    ],
)
def test_certificates_that_cannot_be_used(tmp_path: Path, files: Callable[[str, str], Any], said: str) -> None:
    with pytest.raises(KvyardError, match=said):
        tls_files(*files(*certificate(tmp_path)))
