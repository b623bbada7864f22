"""A real Envoy on loopback, with a configuration of ``deploy/envoy``, and a picker in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.ports import free_ports
from tests.server.support import PATIENCE
from tests.waiting import eventually

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "envoy"


class Config:
    """A file of ``deploy/envoy``, and the parts of it that tests change."""

    def __init__(self, name: str) -> None:
        self.root: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
        resources = self.root["static_resources"]
        self.listener = resources["listeners"][0]
        manager = self.listener["filter_chains"][0]["filters"][0]["typed_config"]
        self.filters: list[dict[str, Any]] = manager["http_filters"]
        self.processor: dict[str, Any] = self.filters[0]["typed_config"]
        self.route: dict[str, Any] = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        self.engines, self.picker = resources["clusters"]

    def bodies(self, request: str, response: str) -> None:
        """How the picker receives bodies; full-duplex streams need trailers too."""
        mode = self.processor["processing_mode"]
        mode["request_body_mode"], mode["response_body_mode"] = request, response
        for body, trailer in (
            ("request_body_mode", "request_trailer_mode"),
            ("response_body_mode", "response_trailer_mode"),
        ):
            mode[trailer] = "SEND" if mode[body] == "FULL_DUPLEX_STREAMED" else "SKIP"

    def subset_header(self, name: str) -> None:
        """Have Envoy take the subset from a client's header, as a data plane takes it from its routes."""
        rule = {
            "header": name,
            "on_header_present": {
                "metadata_namespace": "envoy.lb.subset_hint",
                "key": "x-gateway-destination-endpoint-subset",
                "type": "STRING",
            },
            "remove": True,
        }
        kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
        found = {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {"@type": kind, "request_rules": [rule]},
        }
        self.filters.insert(0, found)
        self.processor["metadata_options"] = {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        }


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


class Envoy:
    """An Envoy in a process of its own. A context manager; ``client`` talks to it."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        picker: str,
        *,
        file: str = "envoy.yaml",
        engines: Sequence[str] = (),
        change: Callable[[Config], None] = lambda _: None,
    ) -> None:
        """``engines`` are those that a fail-open configuration lists; ``change`` may edit the configuration."""
        first = free_ports(2)
        config = Config(file)
        config.listener["address"]["socket_address"]["port_value"] = first
        config.picker["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(picker)]
        if engines:
            config.engines["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(one) for one in engines]
        config.root["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": first + 1}}}
        # A picker that pauses for longer, as one does on a busy machine, would be left out where the configuration allows it.
        config.processor["message_timeout"] = f"{PATIENCE:.0f}s"
        change(config)
        self._config, self._log = folder / f"envoy-{first}.json", folder / f"envoy-{first}.log"
        self._config.write_text(json.dumps(config.root))
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{first}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        self._admin = httpx.Client(base_url=f"http://127.0.0.1:{first + 1}", timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> Envoy:
        command = [
            str(self._program),
            "-c",
            str(self._config),
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "-l",
            "warn",
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            eventually(self._ready, self.tail)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._admin.close()
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.tail()
        with contextlib.suppress(httpx.TransportError):
            return self._admin.get("/ready").status_code == 200 and self.stat("cluster.picker.membership_healthy") > 0
        return False

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def stat(self, name: str) -> int:
        """One of Envoy's counters or gauges; 0 before it is first used."""
        lines = self._admin.get("/stats", params={"filter": f"^{name}$"}).text.splitlines()
        return int(lines[0].rpartition(" ")[2]) if lines else 0

    def complete(self, prompt: Any, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **body}, headers=headers)


class PickerProcess:
    """``kvyard epp`` as a process that can be killed, stopped and started again at the same ports."""

    def __init__(self, folder: Path, fleet: str, *flags: str) -> None:
        self.grpc_port = free_ports(2)
        self.target = f"127.0.0.1:{self.grpc_port}"
        self._log = folder / f"picker-{self.grpc_port}.log"
        ports = ["--port", str(self.grpc_port), "--http-port", str(self.grpc_port + 1)]
        self._command = [
            sys.executable,
            "-m",
            "kvyard",
            "epp",
            "--fleet",
            fleet,
            "--tokenizer",
            "bytes",
            *ports,
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.grpc_port + 1}", timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> PickerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        """Start it, and wait until it has engines and their event streams."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(httpx.TransportError):
                health = self.client.get("/health")
                return self.client.get("/ready").status_code == 200 and health.json()["streams"].get("fresh", 0) > 0
            return False

        eventually(ready, self._log.read_text)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
