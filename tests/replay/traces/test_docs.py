"""docs/reference/traces.md names every format."""

from __future__ import annotations

import re

from tests.replay.traces.support import ROOT

PAGE = ROOT / "docs" / "reference" / "traces.md"


def test_every_format_is_on_the_page() -> None:
    from kvyard.replay.traces import FORMATS

    section = PAGE.read_text().partition("## Formats")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(FORMATS.names())
