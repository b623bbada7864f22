"""The example in the documentation runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    printed = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_setting_is_on_the_page() -> None:
    from kvyard.router import POLICIES, RouterConfig

    text = PAGE.read_text()
    for name in (*RouterConfig.__struct_fields__, *POLICIES.names()):
        if name not in ("policy", "block_size", "sessions"):
            assert name in text, name
