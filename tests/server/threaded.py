"""A server in a thread of a test's process, with a client of it; and a check of the server's own description."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any, Self

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import HypothesisDeprecationWarning

PATIENCE = 60.0


class ThreadedServer:
    """Runs while its block does. Derived classes define ``run`` and ``stop``."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until ``stop`` is called; call ``ready`` once requests are answered."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have ``run`` return."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.run(self._ready.set)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.__exit__()
            raise failure
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self._failure is None, self._failure

    def get(self, path: str, status: int = 200) -> Any:
        reply = self.client.get(path)
        assert reply.status_code == status, (reply.status_code, reply.text)
        return reply.json()

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.client.get("/metrics").text)


def metrics_of(page: str) -> dict[str, float]:
    """The samples of a page in Prometheus' text format, by name and labels."""
    rows = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def check_description(url: str, examples: int, without: Collection[str] = ()) -> int:
    """Have schemathesis make requests from /openapi.json, right ones and wrong ones, and compare the answers with it, except
    for the paths ``without``; returns the number of operations.
    """
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from schemathesis import checks

    chosen = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.allow_header_conformance,
    ]
    operations = [each.ok() for each in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
    for operation in operations:
        if operation.path in without:
            continue

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            case.call_and_validate(checks=chosen, timeout=30)

        with warnings.catch_warnings():
            # The server in the other thread draws random numbers too, which Hypothesis takes for its strategies'.
            warnings.simplefilter("ignore", HypothesisDeprecationWarning)
            run()
    return len(operations)
