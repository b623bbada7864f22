"""Sampling parameters: which values are taken."""

from __future__ import annotations

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")

from kvyard.server.http import Refusal
from kvyard.server.mock.intake import _check


class Asked:
    """A request that says one thing."""

    def __init__(self, **said: float) -> None:
        self.__dict__.update(said)

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize("name", ["temperature", "min_p", "frequency_penalty"])
def test_nothing_is_a_value(name: str) -> None:
    _check(Asked(**{name: 0.0}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_nothing_is_no_value(name: str) -> None:
    with pytest.raises(Refusal, match=f"{name} must be above 0"):
        _check(Asked(**{name: 0.0}))  # type: ignore[arg-type]
