"""The example in the documentation runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.router.support import Fleet

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explain" / "routing.md"
AUTHOR = DOCS / "how-to" / "write-a-routing-policy.md"
SETTINGS = DOCS / "reference" / "routing-policies.md"


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    printed = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_policy_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvyard.router import POLICIES

    monkeypatch.setattr(POLICIES, "_loaded", dict(POLICIES._loaded))
    (example,) = re.findall(r"```python\n(.*?)```", AUTHOR.read_text(), re.DOTALL)
    exec(compile(example, str(AUTHOR), "exec"), {})
    for workers in (3, 100):
        names = [f"w{at}" for at in range(workers)]
        fleet = Fleet(names, policy="fewest-new-tokens", predicted_ttl_s=0)
        fleet.store("w2", "abcd")
        assert fleet.route("abcdef", id_=1).worker.name == "w2"  # 9 of 25 tokens
        assert fleet.route("abcdef", id_=2).worker.name == "w2"  # 9 and 9
        assert fleet.route("abcdef", id_=3).worker.name != "w2"  # 27 would be more than 25


def test_every_setting_is_on_the_page() -> None:
    from kvyard.router import POLICIES, RouterConfig

    text = SETTINGS.read_text()
    for name in (*RouterConfig.__struct_fields__, *POLICIES.names()):
        if name not in ("policy", "block_size", "sessions"):
            assert name in text, name
