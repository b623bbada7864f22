"""Pytest plugin for vLLM's own tests: writes each outcome, and puts kvyard's classes in the place of vLLM's if asked to.

Settings come by environment: ``KVYARD_SUITE_CLASSES`` is ``vllm``, ``kvyard`` or, for tests of HTTP routes, ``mock``;
``KVYARD_SUITE_OUT`` is the file of outcomes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed import parallel_state
from vllm.transformers_utils import repo_utils

OUTCOMES = Path(os.environ["KVYARD_SUITE_OUT"])


class Outcomes:
    """Writes one line of JSON per test: its id, its outcome, the reason if it didn't pass, and kvyard managers it made."""

    def __init__(self) -> None:
        self._managers_before = 0
        self._written: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid, "error", _last_line(str(report.longrepr)))

    def pytest_runtest_setup(self, item: Any) -> None:
        self._managers_before = managers_made()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed and report.when != "call":
            return
        if report.nodeid in self._written:
            return
        if report.skipped:
            self._write(report.nodeid, "skipped", str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write(
                report.nodeid, "failed", crash.message if crash is not None else _last_line(str(report.longrepr))
            )
        else:
            self._write(report.nodeid, "passed", "")

    def _write(self, test: str, outcome: str, reason: str) -> None:
        self._written.add(test)
        made = managers_made() - self._managers_before
        with OUTCOMES.open("a") as file:
            print(json.dumps({"test": test, "outcome": outcome, "reason": reason[:600], "managers": made}), file=file)


def managers_made() -> int:
    """Number of kvyard managers constructed in this process."""
    if os.environ["KVYARD_SUITE_CLASSES"] != "kvyard":
        return 0
    import views

    return views.InspectedManager.made


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out vLLM's clean-up after each test, which takes longer than the test: see ``pytest_runtest_teardown``."""
    for item in items:
        item.add_marker("skip_global_cleanup")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Clean up after a test that left a parallel group, which no later test could make again."""
    if parallel_state.model_parallel_is_initialized() or parallel_state._WORLD is not None:
        parallel_state.cleanup_dist_env_and_memory()


def pytest_configure(config: pytest.Config) -> None:
    # Ask for a model's files once instead of again after 2 s: they aren't to be had from Hugging Face here, as before.
    repo_utils.with_retry.__defaults__ = (1, 0, ())
    config.pluginmanager.register(Outcomes(), "kvyard-outcomes")


if os.environ["KVYARD_SUITE_CLASSES"] == "kvyard":
    import views

    views.install()
elif os.environ["KVYARD_SUITE_CLASSES"] == "mock":
    import mock_server

    mock_server.install()
