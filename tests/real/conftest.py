"""Tests that start real engines and proxies; ``make test-real`` runs them.

Tests in this folder start a vLLM. Those in a folder below it start what the folder is named after.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.real.engine import MODELS, ROOT, Engines

HERE = Path(__file__).parent
SECONDS = 1800
"""Time limit of a test, the start of its engines included."""
NEEDS = {
    "vllm": ("vLLM", "KVYARD_VLLM_PYTHON", ""),
    "nixl": ("vLLM with NIXL", "KVYARD_NIXL", " ARGS=nixl"),
    "sglang": ("SGLang", "KVYARD_SGLANG_PYTHON", " ARGS=sglang"),
    "envoy": ("Envoy", "KVYARD_ENVOY", " ARGS=envoy"),
}
"""Per suite: what it starts, the variable that names its Python or program, and how ``make test-real`` is asked for it."""
_ENGINES = pytest.StashKey[Engines]()


def suite_of(path: Path) -> str:
    """Return the engine that the tests at ``path`` start: ``vllm``, or the folder's name."""
    return "vllm" if path.parent == HERE else path.relative_to(HERE).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            suite = suite_of(item.path)
            item.add_marker(getattr(pytest.mark, suite))
            if suite != "envoy":  # which starts within a second
                item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    engines = item.session.stash.get(_ENGINES, None)
    if report.failed and engines is not None and HERE in item.path.parents:
        report.sections += [(f"end of {name}", text) for name, text in engines.logs().items()]
    return report


class Unavailable(pytest.Module):
    """A module that is skipped without being imported."""

    def collect(self) -> NoReturn:
        name, variable, how = NEEDS[suite_of(self.path)]
        pytest.skip(f"needs a real {name}: run make test-real{how}, or set {variable}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the modules of a suite where what it starts wasn't named."""
    if HERE in module_path.parents and not os.environ.get(NEEDS[suite_of(module_path)][1]):
        return Unavailable.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM. It has to be named: a folder that happens to be there mustn't make a test run take an hour."""
    named = os.environ["KVYARD_VLLM_PYTHON"]
    assert Path(named).exists(), f"KVYARD_VLLM_PYTHON is {named}, which isn't there: make peers ARGS=vllm makes one"
    return Path(named).absolute()


@pytest.fixture(scope="session")
def models(vllm_python: Path) -> Path:
    """The folder of ``scripts/tiny_models.py``."""
    subprocess.run([vllm_python, ROOT / "scripts" / "tiny_models.py", MODELS], check=True)
    return MODELS


@pytest.fixture(scope="session")
def engines(
    vllm_python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Engines]:
    """Real engines, shared by all tests: ``engines.get(model="gemma3", block_size=32)``."""
    found = Engines(vllm_python, tmp_path_factory.mktemp("engines"))
    request.session.stash[_ENGINES] = found
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="session")
def figures() -> Callable[[str, Any], None]:
    """Keeps what a test measured under a name, in ``build/against-vllm.json``: the documentation's figures come from there."""
    path = ROOT / "build" / "against-vllm.json"

    def keep(name: str, found: Any) -> None:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {name: found}, indent=1) + "\n")

    return keep
