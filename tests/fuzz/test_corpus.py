"""Every kept input, sound ones and those that once broke a reader, and some that are close to them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FEW = 1
"""Changed copies of each kept input: ``make fuzz`` tries millions."""


def test_every_target_has_inputs() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    rng = random.Random(name)
    for path in sorted((CORPUS / name).iterdir()):
        data = path.read_bytes()
        TARGETS[name](data)
        for _ in range(FEW):
            at = rng.randrange(len(data) + 1)
            TARGETS[name](data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(4) :])
