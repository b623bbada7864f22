"""The page of a search, in a browser: every chart drawn, in the dark too."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.lab.tune.test_tune import searched
from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.test_page import sound, titled

from kvyard.lab.tune import Tuned

SEARCH = "router=round-robin|kv,host_bytes=1GiB..3GiB,workers=2..5"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    made = searched(tmp_path_factory.mktemp("tune"), "min ttft_p99, min cost", "itl_p99=190", search=SEARCH, trials=12)
    made.save()
    return made


def test_the_page_needs_no_network_and_escapes(done: Tuned) -> None:
    text = done.result().page()
    assert not re.search(r'(src|href)="(?!data:|#)|https?://|@import|url\((?!#)', text)
    done.trace, before = "</script><script>alert(1)</script>", done.trace
    assert "<script>alert" not in done.result().page()
    done.trace = before


def test_every_goal_has_a_chart(tmp_path: Path) -> None:
    made = searched(tmp_path, "max reuse, min cost, min ttft_p99", None, search="workers=2..5", trials=6)
    front = made.result().sections[0]
    titles = [chart.title for chart in front.charts if chart.title != "What matters"]
    assert front.title == "The Pareto front" and titles == ["Reused in all and cost", "TTFT p99 and cost"]
    groups = [group for chart in front.charts[:2] for group in chart.figure["series"]]
    assert groups and all(group["only"] == "dots" for group in groups), "a front of three goals is no line between two"


@pytest.mark.browser
@pytest.mark.timeout(400)
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (800, False)])
def test_charts(tab: Tab, done: Tuned, width: int, dark: bool) -> None:
    tab.open(done.folder / "tune.html", width, dark=dark)
    assert done.importance, "12 points are enough"
    sound(tab, 5, width)
    titles = titled(tab)
    assert titles[0] == ["your prices per hour", "TTFT p99 (log)"] and all(titles)
    dots = tab.ask("document.querySelectorAll('.chart')[0].querySelectorAll('circle.dot').length")
    assert dots == sum(one.state == "done" for one in done.trials)
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(15, 15, 14)") == dark
    if place := os.environ.get("KVYARD_PICTURES"):
        tab.picture(Path(place) / f"tune-{width}{'-dark' if dark else ''}.png")
