"""Charts of studies: axes that neither flatten nor magnify, limits as lines, and how a browser draws them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.test_page import sound

from kvyard.lab.study.axes import setting_text
from kvyard.lab.study.charts import Bar, Dot, Dots, bars, curves, dots
from kvyard.lab.study.result import Chart
from kvyard.replay.report.html import Page
from kvyard.replay.report.metrics import METRICS
from kvyard.replay.report.slo import Limit

TTFT = METRICS["ttft_mean"]
ONE_LOSER = [Bar("kv", 400.0), Bar("least-time", 380.0), Bar("sticky", 420.0), Bar("random", 90_000.0)]


def test_one_loser_is_cut_off_and_named() -> None:
    chart = bars(TTFT, ONE_LOSER)
    assert chart.text == "The axis ends at 483.0 ms; cut off: random." and chart.figure["cut"] == 483.0
    assert [row["text"] for row in chart.figure["rows"]] == ["400.0", "380.0", "420.0", "90 s"]
    level = bars(TTFT, [Bar("kv", 400.0), Bar("random", 900.0)])
    assert "cut" not in level.figure and level.text == ""


def test_times_are_in_the_unit_that_fits() -> None:
    chart = bars(TTFT, [Bar("kv", 40_000.0), Bar("random", 90_000.0)])
    assert chart.title == chart.figure["xTitle"] == "TTFT mean, s"
    assert [row["text"] for row in chart.figure["rows"]] == ["40.00", "90.00"]
    line = curves(TTFT, {"kv": [(1, 40_000.0), (2, 9_000.0)]}, "workers")
    assert line.title == "TTFT mean, s" and line.figure["series"][0]["y"] == [40.0, 9.0]


def test_values_over_decades_have_a_logarithmic_axis() -> None:
    chart = curves(TTFT, {"kv": [(1, 40_000.0), (2, 900.0)]}, "workers", Limit("ttft_mean", 2000.0))
    assert chart.text == "the axis is logarithmic" and chart.figure["yScale"] == "log"
    assert chart.figure["series"][0]["y"] == [40_000.0, 900.0] and chart.figure["yTitle"] == "TTFT mean (log)"


def test_the_limit_is_a_line_unless_it_is_far_above() -> None:
    points = {"kv": [(1.0, 900.0), (4.0, 700.0)]}
    near = curves(TTFT, points, "workers", Limit("ttft_mean", 1000.0)).figure["series"][-1]
    assert (near["name"], near["x"], near["y"], near["dots"]) == ("limit: 1 s", [1.0, 4.0], [1000.0, 1000.0], False)
    far = curves(TTFT, points, "workers", Limit("ttft_mean", 60_000.0))
    assert len(far.figure["series"]) == 1
    assert far.text == "the axis doesn't begin at 0; the limit, 60 s, is far above"


def test_the_limit_is_marked_among_bars() -> None:
    near = bars(TTFT, [Bar("kv", 400.0), Bar("random", 900.0)], limit=Limit("ttft_mean", 1000.0)).figure
    assert near["marks"] == [{"name": "limit: 1 s", "x": 1000.0}] and near["max"] == 1000.0, "the axis reaches to it"
    cut = bars(TTFT, ONE_LOSER, limit=Limit("ttft_mean", 450.0)).figure
    assert cut["marks"][0]["x"] == 450.0 and cut["cut"] == 483.0
    crossed = bars(TTFT, ONE_LOSER, limit=Limit("ttft_mean", 900.0)).figure
    assert crossed["marks"][0]["x"] == 900.0 and crossed["cut"] == 1035.0, "the axis ends beyond the limit"
    both = [Bar("kv", 400.0), Bar("least-time", 380.0), Bar("sticky", 420.0), Bar("random", 1_300.0)]
    assert "cut" not in bars(TTFT, both, limit=Limit("ttft_mean", 1_200.0)).figure
    far = bars(TTFT, ONE_LOSER, limit=Limit("ttft_mean", 120_000.0))
    assert "marks" not in far.figure and "The limit, 2 min 0 s, is far above." in far.text
    hidden = bars(TTFT, ONE_LOSER, limit=Limit("ttft_mean", 60_000.0))
    assert "marks" not in hidden.figure and "The limit, 60 s, is in the part that is cut off." in hidden.text


def test_a_number_in_a_legend_says_what_it_is() -> None:
    assert setting_text("num_gpu_blocks", "6000") == "num gpu blocks 6000"
    assert setting_text("router", "least-time") == "least-time"
    assert setting_text("split", "none") == "split none", "a bar named none, cut off, reads as no bar"
    figure = dots(
        TTFT, [Dots("SLO met", [Dot(2.0, 400.0, "a")], "blue")], "cards", "x", Limit("ttft_mean", 500.0)
    ).figure
    assert [entry["name"] for entry in figure["legend"]] == ["SLO met", "limit: 500 ms"]
    assert figure["series"][-1]["x"] == [figure["xMin"], figure["xMax"]] == [1.0, 3.0], "a limit beside a single dot"


def test_dots_near_the_limit_lie_apart_and_the_answer_is_large() -> None:
    fleets = [Dot(8, 2100.0, "one"), Dot(12, 3900.0, "two")]
    groups = [Dots("SLO NOT met", fleets, "orange"), Dots("answer", [Dot(16, 1800.0, "three")], "green", large=True)]
    chart = dots(TTFT, groups, "cards", "x", Limit("ttft_mean", 2000.0), counts=True)
    assert chart.text == "the axis doesn't begin at 0" and chart.figure["xFormat"] == "count"
    assert [line.get("names") for line in chart.figure["series"]] == [["one", "two"], ["three"], None]
    assert [line.get("large", False) for line in chart.figure["series"]] == [False, True, False]
    assert dots(TTFT, [Dots("all", [*fleets, Dot(4, 9000.0, "")], "blue")], "cards", "x").figure["yScale"] == "log"


def drawn(tab: Tab, folder: Path, chart: Chart, width: int = 800) -> None:
    page = Page("charts")
    page.cards("one", page.figure(*chart))
    (folder / "c.html").write_text(page.text())
    tab.open(folder / "c.html", width)
    sound(tab, 1, width)


@pytest.mark.browser
@pytest.mark.timeout(400)
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
class TestInABrowser:
    def test_a_cut_bar_is_broken_and_others_can_be_compared(self, tab: Tab, tmp_path: Path) -> None:
        for width in (400, 1280):
            drawn(tab, tmp_path, bars(TTFT, ONE_LOSER), width)
            lengths = tab.ask("[...document.querySelectorAll('rect.series')].map(e => e.getBBox().width)")
            assert lengths[0] > 0.7 * lengths[3] and lengths[0] / lengths[1] == pytest.approx(400 / 380, rel=0.02)
            assert tab.ask("document.querySelectorAll('path.break').length") == 1

    @pytest.mark.parametrize(("other", "low", "high"), [(1010.0, 0.0, 0.1), (1300.0, 0.5, 0.95)])
    def test_a_range_of_one_percent_is_drawn_nearly_level(
        self, tab: Tab, tmp_path: Path, other: float, low: float, high: float
    ) -> None:
        drawn(tab, tmp_path, curves(TTFT, {"kv": [(1.0, 1000.0), (2.0, other)]}, "workers"))
        line = tab.ask("document.querySelector('path.series').getBBox().height")
        plot = tab.ask("document.querySelector('svg').getBoundingClientRect().height") - 50
        assert low < line / plot < high

    def test_a_dot_under_the_mouse_names_its_fleet(self, tab: Tab, tmp_path: Path) -> None:
        groups = [
            Dots("SLO met", [Dot(8.0, 1000.0, "below"), Dot(8.0, 2000.0, "above"), Dot(9, 1500.0, "beside")], "blue")
        ]
        drawn(tab, tmp_path, dots(TTFT, groups, "cards", "x", counts=True))
        ticks = tab.ask("[...document.querySelectorAll('svg text[text-anchor=middle]')].map(e => e.textContent)")
        assert "8" in ticks and "9" in ticks and "8.5" not in ticks
        for number, name in enumerate(("below", "above", "beside")):
            tab.hover(f"circle.dot:nth-of-type({number + 1})")
            assert tab.ask("document.querySelector('#tip b').textContent") == name
