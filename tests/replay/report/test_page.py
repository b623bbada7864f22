"""The pages, as text and as a real browser shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.support import config, reported
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.compare import compare
from kvyard.replay import replay
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.html import answer
from kvyard.replay.report.page import page, write_html
from kvyard.replay.report.words import latency

pytestmark = pytest.mark.timeout(400)

HIDDEN = (
    "[...document.querySelectorAll('.card, .tile, header *')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
)
CLIPPED = """[...document.querySelectorAll('.chart')].filter(e => [...e.querySelectorAll('text')].some(t => {
  const a = t.getBoundingClientRect(), b = e.closest('.card').getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
})).map(e => e.closest('.card').querySelector('h3').textContent)"""


def tiered() -> Report:
    return reported(policy="kv", blocks=2200, host=4000, label="kv + host")


def runs() -> list[Report]:
    return [reported(policy="round-robin", blocks=2200), reported(policy="kv"), tiered()]


# -- text -----------------------------------------------------------------------------------------------------------


def test_a_flag_in_a_sentence_stays_in_one_line() -> None:
    shown = answer(["Try -tp 2 or --host-blocks 16000 (--kv-cache-dtype fp8), a well-known way."])
    flags = ("-tp", "--host-blocks", "--kv-cache-dtype")
    assert [shown.count(f'<span class="flag">{flag}</span>') for flag in flags] == [1, 1, 1]
    assert shown.count("span class") == 3


def test_one_small_file_that_needs_no_network() -> None:
    for text in (page(tiered()), compare(runs()).page()):
        assert len(text) < 600_000
        assert not re.search(r'(src|href)="(?!data:|#)|https?://|@import|url\((?!#)', text)


def test_made_from_the_file_alone() -> None:
    report = tiered()
    assert page(from_json(to_json(report))) == page(report)


def test_names_are_only_text() -> None:
    nasty = "</script><script>alert(1)</script>"
    report = replace(tiered(), label=nasty, trace={"name": nasty}, config={nasty: nasty})
    for text in (page(report), compare([report, reported()]).page()):
        assert "<script>alert" not in text


def test_says_every_figure_and_ratio() -> None:
    report = tiered()
    text = page(report)
    for share in (
        *report.reuse.values(),
        *report.missed_tokens.values(),
        *report.bounds.values(),
        report.router.regret,
    ):
        assert share.of in text or not share.part
    assert f"{report.reuse['all'].part:,}" in text and latency(report.latency["ttft"].p99) in text


def test_unwritable(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="can't write"):
        write_html(reported(), tmp_path / "no" / "x.html")
    assert not list(tmp_path.iterdir())


# -- in a browser ---------------------------------------------------------------------------------------------------


def unfold(tab: Tab) -> None:
    """Open every section, and wait until its charts are drawn."""
    tab.ask(
        "new Promise(done => { document.querySelectorAll('details.fold').forEach(fold => { fold.open = true; });"
        " requestAnimationFrame(() => setTimeout(done)); })"
    )


def sound(tab: Tab, charts: int, width: int) -> None:
    """No complaint in the console, nothing fetched, every chart drawn and labelled, nothing sticking out, folded or not."""
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(HIDDEN) == 0
    unfold(tab)
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert tab.ask("document.querySelectorAll('.chart').length") == charts
    assert tab.ask(
        "[...document.querySelectorAll('.chart')].every(e => e.dataset.drawn === 'yes' && e.children.length)"
    )
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(HIDDEN) == 0
    assert tab.ask(CLIPPED) == []


def contrast(*colors: str) -> float:
    """The contrast ratio of two colours, as WCAG defines it."""

    def light(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(light, colors))
    return (high + 0.05) / (low + 0.05)


def titled(tab: Tab) -> list[list[str]]:
    found: list[list[str]] = tab.ask(
        "[...document.querySelectorAll('.chart')].map(e => [...e.querySelectorAll('text.title')].map(t => t.textContent))"
    )
    return found


@pytest.mark.browser
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
class TestInABrowser:
    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (1920, False), (800, False)])
    def test_report(self, tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.open(tmp_path / "r.html", width, dark=dark)
        sound(tab, 14, width)
        assert all(len(titles) >= 1 and all(titles) for titles in titled(tab))
        assert tab.ask("document.querySelectorAll('.chart .series').length") > 200
        ground = tab.ask("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(15, 15, 14)") == dark
        if place := os.environ.get("KVYARD_PICTURES"):
            tab.picture(Path(place) / f"report-{width}{'-dark' if dark else ''}.png")

    def test_tooltips(self, tab: Tab, tmp_path: Path) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        unfold(tab)
        for number, words in (
            (0, "%"),
            (1, "requests"),
            (6, "TTFT"),
            (7, "p50"),
            (8, "running"),
            (11, "prompt tokens"),
        ):
            tab.hover(f".chart[data-figure='{number}'] svg", 0.5, 0.45 if number else 0.6)
            assert tab.ask("getComputedStyle(document.getElementById('tip')).display") == "block", number
            assert words in tab.ask("document.getElementById('tip').textContent")
        tab.hover("h1")
        assert tab.ask("getComputedStyle(document.getElementById('tip')).display") == "none"
        assert tab.errors == []

    def test_the_heat_map_shows_another_quantity(self, tab: Tab, tmp_path: Path) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        unfold(tab)
        names = tab.ask("[...document.querySelectorAll('.picks button')].map(b => b.textContent)")
        assert {"Prompt tokens routed", "Requests routed", "Running", "Waiting", "Device held", "Host filled"} <= set(
            names
        )
        drawn = set()
        for number, name in enumerate(names):
            tab.ask(f"document.querySelectorAll('.picks button')[{number}].click()")
            assert tab.ask("document.querySelector('.picks button[aria-pressed=true]').textContent") == name
            drawn.add(tab.ask("document.querySelector('canvas').toDataURL()"))
        assert len(drawn) >= len(names) - 1  # nobody may have waited
        tab.hover("canvas", 0.3, 0.1)
        assert "w0" in tab.ask("document.getElementById('tip').textContent")
        assert tab.errors == []

    def test_comparison(self, tab: Tab, tmp_path: Path) -> None:
        reports = runs()
        (tmp_path / "c.html").write_text(compare(reports).page())
        for dark in (False, True):
            tab.open(tmp_path / "c.html", dark=dark)
            sound(tab, 10, 1280)
            if place := os.environ.get("KVYARD_PICTURES"):
                tab.picture(Path(place) / f"compare{'-dark' if dark else ''}.png")
        assert all(titles and all(titles) for titles in titled(tab))
        assert tab.ask("document.querySelectorAll('td.best').length") > 5
        counts = tab.ask("[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('path.series').length)")
        assert counts[2:] == [3] * 8
        tab.hover(".chart[data-figure='2'] svg")
        assert "kv + host" in tab.ask("document.getElementById('tip').textContent")

    @pytest.mark.parametrize("dark", [False, True])
    def test_a_phone(self, tab: Tab, tmp_path: Path, dark: bool) -> None:
        reports = runs()
        write_html(tiered(), tmp_path / "r.html")
        (tmp_path / "c.html").write_text(compare(reports).page())
        for name, charts in (("r", 14), ("c", 10)):
            tab.open(tmp_path / f"{name}.html", 390, dark=dark)
            sound(tab, charts, 390)

    def test_tables_sort_and_sections_can_be_linked_to(self, tab: Tab, tmp_path: Path) -> None:
        write_html(reported(policy="kv", workers=4, blocks=2200), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        table = (
            "[...document.querySelectorAll('table.sorts')].find(t => t.tHead.textContent.includes('evicted blocks'))"
        )
        column = f"[...{table}.tBodies[0].rows].map(r => parseInt(r.cells[3].textContent.replace(/,/g, '')))"
        before = tab.ask(column)
        tab.ask(f"{table}.tHead.rows[0].cells[3].click()")
        assert tab.ask(column) == sorted(before)
        tab.ask(f"{table}.tHead.rows[0].cells[3].click()")
        assert tab.ask(column) == sorted(before, reverse=True)
        assert tab.ask(f"{table}.tHead.rows[0].cells[3].getAttribute('aria-sort')") == "descending"
        # What has parts and sums in it stays as it is.
        assert not tab.ask(
            "[...document.querySelectorAll('tr.sum')].some(r => r.closest('table').classList.contains('sorts'))"
        )
        links = tab.ask("[...document.querySelectorAll('.toc a')].map(a => a.getAttribute('href'))")
        assert len(links) > 4 and all(tab.ask(f"document.querySelector('{link}') !== null") for link in links)
        assert tab.errors == []

    def test_dragging_zooms(self, tab: Tab, tmp_path: Path) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        unfold(tab)
        chart = ".chart[data-figure='7']"
        ticks = f'[...document.querySelectorAll("{chart} text:not(.title)")].map(t => t.textContent)'
        before = tab.ask(ticks)
        tab.drag(f"{chart} svg", 0.4, 0.6)
        assert (
            tab.ask(ticks) != before
            and tab.ask(f'document.querySelector("{chart} button.all").textContent') == "Show all"
        )
        tab.ask(f'document.querySelector("{chart} button.all").click()')
        assert tab.ask(ticks) == before and tab.errors == []

    def test_the_first_screen_answers_and_the_rest_folds(self, tab: Tab, tmp_path: Path) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        below = "[...document.querySelectorAll('.answer, .tiles')].filter(e => e.getBoundingClientRect().bottom > 900)"
        assert tab.ask(f"{below}.length") == 0
        folds = tab.ask("[...document.querySelectorAll('details.fold')].map(e => [e.id, e.open])")
        assert len(folds) >= 6 and not any(opened for _, opened in folds)
        assert tab.ask("document.documentElement.scrollHeight") < 1800
        tab.open("about:blank")
        tab.open(f"{(tmp_path / 'r.html').as_uri()}#over-time")
        folds = tab.ask("[...document.querySelectorAll('details.fold')].filter(e => e.open).map(e => e.id)")
        assert folds == ["over-time"], "a link opens its section"
        tab.ask("[...document.querySelectorAll('.toc button')].find(b => b.textContent === 'Open all').click()")
        assert tab.ask("[...document.querySelectorAll('details.fold')].every(e => e.open)")

    @pytest.mark.parametrize("width", [400, 1280])
    @pytest.mark.parametrize("dark", [False, True])
    def test_a_missed_slo_comes_first_and_is_visible(self, tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
        report = replay(CONVERSATION, limit=60, workers=1, slo="ttft_p99<1ms,itl_p99<10s").report
        write_html(report, tmp_path / "r.html")
        tab.open(tmp_path / "r.html", width, dark=dark)
        place = "document.querySelector('.verdict')"
        assert tab.ask(f"{place}.textContent") == "SLO NOT met"
        assert tab.ask(f"{place}.getBoundingClientRect().bottom") < 500
        ink, ground = (tab.ask(f"getComputedStyle({place}).{name}") for name in ("color", "backgroundColor"))
        assert contrast(ink, ground) > 4.5
        tiles = tab.ask("[...document.querySelectorAll('.tile.missed')].map(e => e.textContent)")
        assert len(tiles) == 1 and "TTFT p99 ≤ 1 ms" in tiles[0] and "SLO NOT met" in tiles[0]
        sound(tab, 13, width)

    def test_a_day_of_an_autoscaler_is_drawn(self, tab: Tab, tmp_path: Path) -> None:
        scaled = {"autoscale": "threshold:ttft_p99=1s,min=1,max=4,startup=20s", "slo": "ttft=1000"}
        write_html(replay(CONVERSATION, limit=120, workers=1, **scaled).report, tmp_path / "r.html")
        for width in (400, 1280):
            tab.open(tmp_path / "r.html", width)
            day = "[...document.querySelector('#autoscaling ~ .grid').querySelectorAll('.card')]"
            assert tab.ask(f"{day}.map(e => e.querySelector('h3').textContent)") == ["Workers", "Load", "SLO"]
            assert tab.ask(f"{day}.every(e => e.querySelector('path.series').getBBox().width > 100)")
            sound(tab, 16, width)

    @pytest.mark.parametrize(("most", "ticks"), [(1, ["0", "1"]), (2, ["0", "1", "2"]), (9, ["0", "5"])])
    def test_an_axis_of_counts_has_whole_numbers(self, tab: Tab, tmp_path: Path, most: int, ticks: list[str]) -> None:
        report = replay(CONVERSATION, limit=120, workers=1, autoscale="threshold:ttft_p99=1s,min=1,max=4").report
        assert report.scaling is not None
        counts = [float(most)] * len(report.series.arrived)
        write_html(replace(report, scaling=replace(report.scaling, workers={"both": counts})), tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        card = "document.querySelector('#autoscaling ~ .grid .card')"
        assert tab.ask(f"[...{card}.querySelectorAll('.gridline + text')].map(e => e.textContent)") == ticks

    def test_long_times_stay_in_their_tiles(self, tab: Tab, tmp_path: Path) -> None:
        report = tiered()
        slow = {name: replace(spread, p50=1_250_300.0, p99=36e6) for name, spread in report.latency.items()}
        write_html(replace(report, latency=slow), tmp_path / "r.html")
        for width in (400, 1280):
            tab.open(tmp_path / "r.html", width)
            tiles = tab.ask("document.querySelector('.tiles').textContent").replace("\u00a0", " ")
            assert "20 min 50 s" in tiles and "10 h 0 min" in tiles
            assert tab.ask(HIDDEN) == 0

    def test_without_scripts_sections_open_all_the_same(self, tab: Tab, tmp_path: Path) -> None:
        write_html(tiered(), tmp_path / "r.html")
        tab.call("Emulation.setScriptExecutionDisabled", value=True)
        try:
            tab.open(tmp_path / "r.html")
            tab.press("#router summary h2")
            assert tab.ask("document.querySelector('#router').open")
            assert tab.ask("document.querySelector('#router table').getBoundingClientRect().height") > 40
        finally:
            tab.call("Emulation.setScriptExecutionDisabled", value=False)

    @pytest.mark.parametrize(
        "report",
        [
            pytest.param(lambda: make_report(Fleet(config())), id="nothing"),
            pytest.param(lambda: reported(policy="kv", limit=1), id="one-request"),
            pytest.param(lambda: reported(policy="round-robin", workers=400, blocks=2000, limit=150), id="400-workers"),
            pytest.param(
                lambda: reported(policy="kv", blocks=2000, host=2500, storage=20000, workers=2, limit=400), id="storage"
            ),
        ],
    )
    def test_odd_runs(self, tab: Tab, tmp_path: Path, report: object) -> None:
        made: Report = report()  # type: ignore[operator]
        write_html(made, tmp_path / "r.html")
        tab.open(tmp_path / "r.html")
        sound(tab, 14 if made.waterfall.steps else 13, 1280)
        (tmp_path / "c.html").write_text(compare([made, tiered()]).page())
        tab.open(tmp_path / "c.html")
        sound(tab, 10, 1280)
