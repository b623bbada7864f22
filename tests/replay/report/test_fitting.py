"""Tables on narrow terminals: no figure is cut."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.replay.traces.support import CONVERSATION

from kvyard.lab.compare import compare
from kvyard.lab.sweep import sweep
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay

CUT = re.compile(r"…")


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_report_has_whole_figures_at_any_width(width: int) -> None:
    report = replay(CONVERSATION, limit=120, workers=2, host_blocks="5k", num_gpu_blocks=3000, bounds=True).report
    text = report_text(report, width)
    assert not CUT.search(text)
    assert max(map(len, text.splitlines())) <= width
    ttft = next(line for line in text.splitlines() if "TTFT (ms)" in line or "Time to first token" in line)
    assert len(re.findall(r"[\d.,]+k?", ttft)) >= (5 if width == 60 else 8)
    assert ("Not shown, for want of room: std" in text) == (width == 60)


def test_a_sweep_and_a_comparison_too(tmp_path: Path) -> None:
    done = sweep(CONVERSATION, {"workers": [1, 2]}, folder=tmp_path, config={"limit": 60})
    out = StringIO()
    narrow = Console(file=out, width=60, force_terminal=False)
    done.result().show(narrow)
    reports = [report for _, report in done.done]
    compare(reports, ["a run of one worker", "b"]).show(narrow)
    assert not CUT.search(out.getvalue())
    assert max(map(len, out.getvalue().splitlines())) <= 60
