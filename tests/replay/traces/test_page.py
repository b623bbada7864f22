"""The page of plots, opened in a browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.replay.report.browser import BINARY, browser
from tests.replay.traces.support import CONVERSATION, SAMPLES

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe
from kvyard.replay.traces.page import page, write_page


def test_one_file_that_needs_no_network(tmp_path: Path) -> None:
    text = page(describe(open_trace(CONVERSATION, limit=500)))
    assert len(text) < 100_000
    assert not re.search(r'(src|href)="(?!data:)', text)
    with pytest.raises(KvyardError, match="can't write"):
        write_page(describe(open_trace(SAMPLES / "plain.csv")), tmp_path / "no" / "such.html")


def test_names_are_only_text(tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<:script>.csv"
    shutil.copy(SAMPLES / "plain.csv", path)
    text = page(describe(open_trace(path)))
    assert "<script>alert" not in text


@pytest.mark.browser
@pytest.mark.timeout(400)
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
def test_in_a_browser(tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as tab:
        for source, charts in (
            (CONVERSATION, 6),
            (SAMPLES / "weka_sessions.jsonl.xz", 4),
            (SAMPLES / "azure_conv.csv", 4),
        ):
            path = tmp_path / f"{charts}-{source.name}.html"
            write_page(describe(open_trace(source, limit=500)), path)
            tab.open(path)
            assert not tab.errors and {*tab.requests} <= {path.as_uri(), "data:,"}
            assert tab.ask("document.querySelectorAll('.chart[data-drawn=yes] svg').length") == charts
            assert tab.ask("[...document.querySelectorAll('svg')].every(s => s.clientWidth > 400)")
            assert tab.ask("document.querySelectorAll('.series').length") > charts
            tab.hover(".chart svg", 0.5, 0.5)
            assert "requests" in tab.ask("document.getElementById('tip').innerText")
