"""The examples in the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.replay.traces.support import ROOT

PAGE = ROOT / "docs" / "reference" / "traces.md"
MAKING = ROOT / "docs" / "how-to" / "make-traces.md"


@pytest.mark.parametrize(("page", "count"), [(PAGE, 2), (MAKING, 2)])
def test_examples_of_the_page(page: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(examples) == count
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)


def test_every_format_is_on_the_page() -> None:
    from kvyard.replay.traces import FORMATS

    section = PAGE.read_text().partition("## Formats")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(FORMATS.names())
