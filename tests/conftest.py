"""Shared parts of all tests: hypothesis profiles, and a CI that refuses to skip quietly."""

from __future__ import annotations

import gc
import os
import re
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Nothing goes by time: the machines are shared, and a slow example is not a wrong one.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=50, stateful_step_count=30, **PATIENT)
settings.register_profile("ci", max_examples=30, derandomize=True, database=None, print_blob=True, **PATIENT)
settings.register_profile("thorough", max_examples=2000, stateful_step_count=100, **PATIENT)
settings.load_profile("ci" if os.environ.get("CI") else "default")  # or pytest --hypothesis-profile=thorough

BYTECODE: list[tempfile.TemporaryDirectory[str]] = []
"""Where compiled modules are for the time of a run, in the process that made the folder."""
if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    # Some machines are set not to write any. Every process that a test starts would compile all modules again, which takes
    # longer than most of them do: so they are written, but nowhere near the sources.
    BYTECODE.append(tempfile.TemporaryDirectory(prefix="kvyard-bytecode-"))
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = BYTECODE[0].name
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run that a shell started in the background ignores Ctrl-C, and so would every command that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    while BYTECODE:
        BYTECODE.pop().cleanup()


@pytest.fixture(scope="session", autouse=True)
def one_list_of_authorities() -> Iterator[None]:
    """httpx reads its list of certificate authorities for every client, and for every request without one: 18 ms of CPU. No
    test meets a server that they vouch for, so the list is read once.
    """
    try:
        import certifi
    except ImportError:
        yield  # then there is no httpx either
        return
    read, listed, kept = ssl.create_default_context, certifi.where(), list[ssl.SSLContext]()

    def create(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **options: Any) -> ssl.SSLContext:
        if options != {"cafile": listed}:
            return read(purpose, **options)
        if not kept:
            kept.append(read(purpose, **options))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create)
        yield


NEEDS = frozenset({"redis", "zmq", "browser"})
"""Markers of the tests that need something besides Python packages, and skip themselves where it is missing."""


class NoSkips:
    """Fails the run if a test that carries a marker of ``NEEDS`` was skipped.

    Registered when KVYARD_CI_STRICT is set: where everything can be installed, a skipped test is a hole in the net.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and NEEDS & set(report.keywords):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that skips itself as a whole has no tests to ask for markers: look for them in its text.
        if report.skipped:
            path = Path(str(report.fspath))
            text = path.read_text() if path.is_file() else ""
            if NEEDS & set(re.findall(r"\bmark\.(\w+)", text)):
                self.skipped.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, but must run here (KVYARD_CI_STRICT)", red=True)
            for nodeid in sorted(set(self.skipped)):
                terminalreporter.line(nodeid)


SLOW_SECONDS = 1800
"""Time limit of a test marked slow, unless it has its own."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes millions of objects that all stay. They aren't searched for garbage meanwhile, which took a third of the
    time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()  # and nothing is frozen: replays count what is, one by one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests have time. Against a compiled install (see tests/test_compiled.py) what replaces compiled parts can't run."""
    from kvyard.blocks import pool

    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if not str(pool.__file__).endswith(".py"):
        compiled = pytest.mark.skip(reason="replaces parts that are compiled here")
        for item in items:
            if item.get_closest_marker("source") is not None:
                item.add_marker(compiled)


def pytest_configure(config: pytest.Config) -> None:
    is_xdist_worker = hasattr(config, "workerinput")
    if os.environ.get("KVYARD_CI_STRICT") and not is_xdist_worker:
        config.pluginmanager.register(NoSkips())


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Searches for garbage and counts of objects pass over the millions that were there before a test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")  # its thread draws random numbers, which Hypothesis takes for a strategy's
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab of a browser, a ``Tab`` of ``tests.replay.report.browser``."""
    from tests.replay.report.browser import browser

    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
