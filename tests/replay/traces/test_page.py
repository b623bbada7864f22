"""The page of plots, opened in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.replay.traces.support import CONVERSATION, SAMPLES

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe
from kvyard.replay.traces.page import page, write_page

pytest.importorskip("plotly", reason="needs plotly: pip install kvyard[report]")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_one_file_that_needs_no_network(tmp_path: Path) -> None:
    text = page(describe(open_trace(CONVERSATION, limit=500)))
    own = re.sub(r"<script>/\*.*?</script>", "", text, flags=re.DOTALL)  # without the library
    assert len(own) < 100_000
    assert not re.search(r'(src|href)="(?!data:)', own)
    with pytest.raises(KvyardError, match="can't write"):
        write_page(describe(open_trace(SAMPLES / "plain.csv")), tmp_path / "no" / "such.html")


def test_names_are_only_text(tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<:script>.csv"
    shutil.copy(SAMPLES / "plain.csv", path)
    text = page(describe(open_trace(path)))
    assert "<script>alert" not in text


@pytest.mark.browser
@pytest.mark.timeout(240)
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize(
    ("source", "plots"),
    [
        (CONVERSATION, 4),
        pytest.param(SAMPLES / "weka_sessions.jsonl.xz", 3, marks=pytest.mark.slow),
        pytest.param(SAMPLES / "azure_conv.csv", 2, marks=pytest.mark.slow),
    ],
)
def test_in_a_browser(source: Path, plots: int, tmp_path: Path) -> None:
    write_page(describe(open_trace(source, limit=500)), tmp_path / "t.html")
    assert BROWSER is not None
    run = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1366,900"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=10000", "--dump-dom", f"file://{tmp_path / 't.html'}"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    dom = run.stdout
    assert dom.count('class="plot js-plotly-plot"') == plots
    assert dom.count('class="main-svg"') >= plots
    widths = [float(width) for width in re.findall(r'class="main-svg"[^>]* width="([\d.]+)"', dom)]
    assert widths and all(400 < width < 1366 for width in widths)
