"""Tests with a real Envoy before a picker and mock engines. ``.ci/run`` runs the quick ones, ``make test-real`` all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def program() -> Path:
    """Envoy's own program."""
    named = Path(os.environ["KVYARD_ENVOY"])
    assert named.exists(), f"KVYARD_ENVOY is {named}, which doesn't exist: make peers ARGS=envoy makes one"
    return named.absolute()
