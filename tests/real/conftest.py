"""Tests that start a real vLLM. All of this folder carry the markers ``vllm`` and ``slow``; ``make test-real`` runs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import MODELS, ROOT, Engines

HERE = Path(__file__).parent
SECONDS = 1800
"""What a test may take, the start of its engines with it."""
_ENGINES = pytest.StashKey[Engines]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
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


def pytest_pycollect_makemodule() -> None:
    """Skip the folder as a whole, in one line, where no vLLM was named."""
    if not os.environ.get("KVYARD_VLLM_PYTHON"):
        pytest.skip("needs a real vLLM: run make test-real, or set KVYARD_VLLM_PYTHON to a Python that has it")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM. It has to be named: a folder that happens to be there mustn't make a test run take an hour."""
    named = os.environ["KVYARD_VLLM_PYTHON"]
    assert Path(named).exists(), f"KVYARD_VLLM_PYTHON is {named}, which isn't there: make peers ARGS=vllm makes one"
    return Path(named).absolute()


@pytest.fixture(scope="session")
def engines(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Engines]:
    """Real engines, shared by all tests: ``engines.get(model="gemma3", block_size=32)``."""
    subprocess.run([vllm_python, ROOT / "scripts" / "tiny_models.py", MODELS], check=True)
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
