"""Tests that start real SGLang servers on CPU; ``make test-real ARGS=sglang`` runs them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real.engine import MODELS, ROOT, EngineSettings
from tests.real.sglang.engine import STAND_IN, SglangEngine

SIZE, PAGES = 16, 300
"""So few pages that they are evicted all the time."""


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    named = Path(os.environ["KVYARD_SGLANG_PYTHON"])
    assert named.exists(), f"KVYARD_SGLANG_PYTHON is {named}, which doesn't exist: make peers ARGS=sglang makes one"
    return named.absolute()


@pytest.fixture(scope="session", params=os.environ.get("KVYARD_SGLANG_MODELS", "llama-weights").split(","))
def pair(
    request: pytest.FixtureRequest, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SglangEngine]]:
    """Two engines of a model. KVYARD_SGLANG_MODELS=mellum-weights asks a hybrid one, whose promises aren't all kept yet."""
    environment = {**os.environ, "PYTHONPATH": str(STAND_IN)}
    script = ROOT / "scripts" / "tiny_models.py"
    subprocess.run([sglang_python, script, MODELS, request.param], check=True, env=environment)
    folder = tmp_path_factory.mktemp("sglang")
    # Its torch_native attention reads the windows' pool by places in the other one: both have to be of one size.
    settings = EngineSettings(
        model=request.param, blocks=PAGES, block_size=SIZE, flags=("--swa-full-tokens-ratio", "1.0")
    )
    engines = [SglangEngine(sglang_python, folder / f"engine-{number}.log", settings) for number in range(2)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        threads = [threading.Thread(target=engine.start) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for engine in engines:
            assert engine.running, engine.tail()
        yield engines
