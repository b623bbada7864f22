"""``kvyard mock`` in the place of the engine that vLLM's tests of its HTTP routes start."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from typing import Any

import schemathesis
import tests.utils

ENDS_THE_MOCK = "/admin/kill"
"""A route that is left out of the schema: after it no other would be answered."""
SECONDS = 60
"""What the mock may take to start."""


class MockServer:
    """As far as those tests use ``RemoteOpenAIServer``. ``KVYARD_SUITE_MOCK`` names the ``kvyard`` to run."""

    def __init__(self, model: str, arguments: list[str], **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url_root = f"http://127.0.0.1:{port}"
        command = [os.environ["KVYARD_SUITE_MOCK"], "mock", "--port", str(port), "--served-model-name", model]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""})

    def __enter__(self) -> MockServer:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url_root}/health", timeout=5).close()
                return self
            except OSError:
                assert self._process.poll() is None, "kvyard mock did not start"
                time.sleep(0.2)
        raise TimeoutError(f"kvyard mock did not answer within {SECONDS} s")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def before_load_schema(context: schemathesis.HookContext, schema: dict[str, Any]) -> None:
    """Leave out what ends the mock; ``schemathesis`` knows the hook by its name."""
    del schema["paths"][ENDS_THE_MOCK]


def install() -> None:
    """Have vLLM's tests start the mock. Test modules must not be imported yet."""
    schemathesis.hook(before_load_schema)
    tests.utils.RemoteOpenAIServer = MockServer
