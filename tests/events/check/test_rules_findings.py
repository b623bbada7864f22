"""The texts of findings: every one is used, every use has one, and none leaves a question open."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import kvyard

SOURCE = Path(kvyard.__file__).parent


@pytest.mark.parametrize("folder", ["events/check", "server/doctor"])
def test_texts_and_rules_name_the_same_findings(folder: str) -> None:
    texts = tomllib.loads((SOURCE / folder / "texts.toml").read_text())
    code = "".join(path.read_text() for path in (SOURCE / folder).glob("*.py"))
    wanted = set(re.findall(r'"([a-z]+(?:-[a-z]+)*(?:\.[a-z]+)?)"', code))
    made = ("bad-", "gateway-promises.")  # with the reason at their end
    assert {name for name in texts if name not in wanted and not name.startswith(made)} == set()
    called = r'(?:broken|note|_said|_explained)\(\s*"([a-z.-]+)"'
    assert set(re.findall(called, code)) <= set(texts)


def test_the_doctor_always_says_what_to_do() -> None:
    texts = tomllib.loads((SOURCE / "server/doctor/texts.toml").read_text())
    assert all(set(text) == {"seen", "means", "fix"} for text in texts.values())
