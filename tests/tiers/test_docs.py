"""The examples of docs/explain/tiers.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explain" / "tiers.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(example: str) -> None:
    exec(compile(example, "docs/explain/tiers.md", "exec"), {})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2
