"""The dashboard in a real browser: it is quiet, it moves, it comes back, and names stay words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.replay.report.browser import BINARY, Tab
from tests.server.dashboard.support import HOSTILE, Fixed, Shown, everything
from tests.server.gateway.support import Gated
from tests.server.mock.support import LOOPBACK, Served
from tests.server.support import PATIENCE
from tests.waiting import eventually

from kvyard.server.dashboard.view import Totals

pytestmark = [pytest.mark.browser, pytest.mark.skipif(BINARY is None, reason="no chromium here")]

STATUS = "document.getElementById('status-text').textContent"
TEXT = "document.body.innerText"


@pytest.fixture
def tab(tab: Tab) -> Iterator[Tab]:
    # The page of the test before would go on looking for its server.
    tab.open("about:blank")
    yield tab
    tab.open("about:blank")


def until(tab: Tab, expression: str) -> Any:
    """Wait until a JavaScript expression is true."""
    return eventually(
        lambda: tab.ask(expression), lambda: f"never true: {expression}; status {tab.ask(STATUS)}; {tab.errors}"
    )


def live(tab: Tab, url: str, width: int = 1366, dark: bool = False) -> None:
    """Open a dashboard and wait until it shows something."""
    tab.open(f"{url}/dashboard", width, dark=dark)
    until(tab, f"{STATUS} === 'Live' && document.querySelectorAll('.worker').length > 0")


def sound(tab: Tab, width: int) -> None:
    """No complaint in the console, nothing fetched from elsewhere, nothing sticking out, every chart there and labelled."""
    assert tab.errors == []
    origin = tab.ask("location.origin")
    assert [url for url in tab.requests if not url.startswith((origin, "data:"))] == []
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert (
        tab.ask("[...document.querySelectorAll('.chart')].filter(e => !e.querySelector('svg[aria-label]')).length") == 0
    )


def figure(tab: Tab, name: str) -> str:
    """Return the text of a tile."""
    tiles = tab.ask(
        "[...document.querySelectorAll('.tile')].map(t => [t.children[0].textContent, t.children[1].textContent])"
    )
    return str(dict(tiles)[name])


@pytest.mark.parametrize(
    ("workers", "width", "dark"), [(1, 1280, False), (4, 390, True), (64, 1366, True), (64, 390, False)]
)
def test_any_fleet_at_any_width(tab: Tab, workers: int, width: int, dark: bool) -> None:
    with Shown(Fixed(everything(workers=workers, decisions=50)), interval=0.5) as shown:
        live(tab, shown.url, width, dark)
        until(tab, "document.querySelectorAll('.line').length > 2")
        sound(tab, width)
        assert tab.ask("document.querySelectorAll('.worker').length") == workers
        assert tab.ask("document.querySelectorAll('#streams tr').length") == workers
        assert tab.ask("document.querySelectorAll('#decisions tr').length") == 50
        ground = tab.ask("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(15, 15, 14)") == dark
        if place := os.environ.get("KVYARD_PICTURES"):
            tab.picture(Path(place) / f"dashboard-{workers}-{width}{'-dark' if dark else ''}.png")


def test_each_panel_shows_the_figures_of_its_source(tab: Tab) -> None:
    view = everything(decisions=1)
    roles = [
        msgspec.structs.replace(one, role=role) for one, role in zip(view.workers, ("prefill", "decode"), strict=True)
    ]
    with Shown(Fixed(msgspec.structs.replace(view, workers=roles))) as shown:
        live(tab, shown.url)
        text = tab.ask(TEXT)
        for words in (
            "about w0",
            "policy kv",
            "w0 was late",
            "suspect",
            "1 ready, 1 suspect; 1 prefill, 1 decode",
            "decode · model of w1 · 2 ranks",
        ):
            assert words in text
        assert figure(tab, "Running") == "6"
        assert figure(tab, "First token, median") == "10 ms"
        assert figure(tab, "Failed") == "1"
        meters = tab.ask("[...document.querySelectorAll('.worker')][0].querySelectorAll('.meter')[0].ariaValueText")
        assert meters == "device (G1): 10 blocks held, 20 cached of 100"
        streams = tab.ask(
            "[...document.querySelectorAll('#streams tr')].map(r => [...r.children].map(c => c.textContent))"
        )
        # The one that is stale comes first.
        assert streams[0][:3] == ["w1", "stale", "41"] and streams[0][4:] == ["1.5 ms", "1", "2", "3", "4", "12 s ago"]
        transfers = tab.ask("document.querySelector('#transfers tr').innerText")
        assert "w0 device → host" in transfers and "7 MB" in transfers
        owed = tab.ask("document.getElementById('owed-part').innerText")
        for words in (
            "latest 400 requests",
            "390 counted to the token",
            "60 % of prompt tokens · 60k",
            "45 %",
            "w0 has fewer",
        ):
            assert words in owed
        assert tab.ask("document.getElementById('owed').dataset.tone") == "bad"
        [tenant, others] = tab.ask(
            "[...document.querySelectorAll('#tenants tr')].map(r => [...r.children].map(c => c.textContent))"
        )
        assert tenant == ["tenant of w0", "36", "2", "144k", "75 %", "2,700", "2.5 ms", "81 s"]
        assert others[:5] == ["(others)", "5", "0", "0", "–"]
        session = tab.ask("[...document.querySelector('#sessions tr').children].map(c => c.textContent)")
        assert session[:7] == ["session 0 of w0", "tenant of w0", "12", "w1", "1", "48k", "75 %"]
        assert session[7:] == ["900", "2.5 ms", "2 min", "4 s ago"]
        assert "the latest 3 of 70 sessions remembered" in tab.ask(TEXT)
        row = tab.ask("[...document.querySelector('#decisions tr').children].map(c => c.textContent)")
        assert row[1:8] == ["request 1 of w0", "w0", "w0 costs least", "160", "60 %", "12.5", "w1 has 3 more"]
        tab.ask("document.querySelector('#decisions button').click()")
        assert tab.ask("document.querySelector('#decisions tr.said').textContent") == "Whole story of w0\nsecond line"
        assert tab.ask("document.querySelector('#decisions button').ariaExpanded") == "true"
        tab.ask("document.querySelector('#decisions button').click()")
        assert tab.ask("document.querySelectorAll('#decisions tr.said').length") == 0
    with Shown(Fixed(msgspec.structs.replace(view, expectation=None, sessions=[], tenants=[]))) as shown:
        live(tab, shown.url)
        assert tab.ask(
            "document.getElementById('sessions-part').hidden && document.getElementById('tenants-part').hidden"
        )
        assert tab.ask("document.getElementById('owed-part').hidden"), "no watcher reports"


def test_hostile_names_are_words(tab: Tab) -> None:
    view = everything(HOSTILE.replace("{", "").replace("}", "") + "{}")
    with Shown(Fixed(view)) as shown:
        live(tab, shown.url)
        until(tab, "document.querySelectorAll('#decisions tr').length === 3")
        tab.ask("document.querySelector('#decisions button').click()")
        tab.ask("document.getElementById('workers-sort').value = 'load'")
        tab.hover("#chart-load svg", 0.95)
        sound(tab, 1366)
        assert tab.ask("document.title") == "kvyard gateway"
        assert tab.ask("document.querySelectorAll('main img, main script').length") == 0
        name = view.workers[0].name.removesuffix("0")
        for place in (
            "h3",
            ".model",
            ".reason",
            "#notes li",
            "#streams .clip",
            "#transfers .clip",
            "#decisions tr.said td",
        ):
            assert name in tab.ask(f"document.querySelector('{place}').textContent"), place
        for column in (2, 3, 4):
            assert name in tab.ask(f"document.querySelector('#decisions td:nth-child({column})').textContent")


def test_figures_move_under_load(tab: Tab) -> None:
    stop = threading.Event()
    with Served(workers=2, events_endpoint=LOOPBACK) as served:

        def ask(number: int) -> None:
            with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
                while not stop.is_set():
                    body = {"prompt": [number] * 64, "max_tokens": 40}
                    client.post(f"{served.urls[number % 2]}/v1/completions", json=body).raise_for_status()

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in asking:
            thread.start()
        try:
            live(tab, served.url)
            until(tab, "document.querySelectorAll('#chart-sources rect.blue').length > 0")
            until(tab, "document.querySelectorAll('#chart-output path.line').length > 0")
            until(tab, "parseFloat([...document.querySelectorAll('.tile .value')][1].textContent) > 0")
            first = figure(tab, "Requests"), tab.ask("document.querySelector('.tile .more').textContent")
            top = "document.querySelector('#decisions td:nth-child(2)').textContent"
            seen = tab.ask(top)
            until(tab, f"{top} !== {seen!r}")
            until(tab, f"document.querySelector('.tile .more').textContent !== {first[1]!r}")
            until(tab, "[...document.querySelectorAll('#streams tr')].every(r => +r.children[2].textContent > 0)")
            # Paused, it stands still.
            tab.ask("document.getElementById('hold').click()")
            held = tab.ask("document.querySelector('main').innerText")
            looks = tab.ask("performance.now()")
            until(tab, f"performance.now() > {looks + 2500}")
            assert tab.ask("document.querySelector('main').innerText") == held
            assert tab.ask(STATUS) == "Paused"
            tab.ask("document.getElementById('hold').click()")
            until(tab, f"{top} !== {seen!r} && {STATUS} === 'Live'")
            sound(tab, 1366)
        finally:
            stop.set()
            for thread in asking:
                thread.join(PATIENCE)


def test_it_comes_back_after_the_server_did(tab: Tab) -> None:
    source = Fixed(everything(since=1000.0))
    with Shown(source) as shown:
        port = shown.port
        live(tab, shown.url)
    until(tab, f"{STATUS}.startsWith('Reconnecting')")
    assert tab.ask("document.body.classList.contains('old')")
    assert "as of" in until(tab, "document.getElementById('status-more').textContent")
    assert not tab.ask("document.getElementById('again').hidden")
    # It tries again by itself, ever more slowly, and says when.
    until(tab, "/^in [0-9]+ s/.test(document.getElementById('status-more').textContent)")
    until(tab, f"{STATUS} === 'Reconnecting: the server can\\'t be reached'")
    anew = everything("back{}", since=2000.0, decisions=2)
    with Shown(Fixed(msgspec.structs.replace(anew, totals=Totals(finished=1))), port=port):
        tab.ask("document.getElementById('again').click()")
        until(tab, f"{STATUS} === 'Live' && document.querySelector('h3').textContent === 'back0'")
        assert not tab.ask("document.body.classList.contains('old')")
        # Nothing of the other life is left, and its counters weren't taken for ours.
        assert tab.ask("document.querySelectorAll('#decisions tr').length") == 2
        assert "back0" in tab.ask("document.querySelector('#decisions').innerText")
        until(tab, "document.querySelector('.tile .value').textContent === '0/s'")
    complaints = [one for one in tab.errors if "ERR_CONNECTION_REFUSED" not in one and "ERR_INCOMPLETE" not in one]
    assert complaints == []


def test_the_token_is_asked_for_and_kept_for_the_tab(tab: Tab) -> None:
    with Shown(Fixed(everything()), token="hush hush") as shown:
        tab.open(f"{shown.url}/dashboard")
        until(tab, "!document.getElementById('gate').hidden && document.activeElement.id === 'token'")
        assert not tab.ask(
            "document.getElementById('workers-title').checkVisibility()"
        )  # nothing to show, nothing shown
        fill = "document.getElementById('token').value = {!r}; document.querySelector('#gate button').click()"
        tab.ask(fill.format("wrong"))
        until(tab, "document.getElementById('gate-why').textContent === 'That token is wrong.'")
        tab.ask(fill.format("hush hush"))
        until(tab, f"{STATUS} === 'Live' && document.querySelectorAll('.worker').length === 2")
        assert tab.ask("document.getElementById('gate').hidden")
        live(tab, shown.url)  # again, without being asked
        tab.ask("sessionStorage.clear()")
        tab.open("about:blank")
        tab.open(f"{shown.url}/dashboard#token=hush%20hush")
        until(tab, f"{STATUS} === 'Live'")
        assert tab.ask("location.hash") == "" and "hush" not in tab.ask("location.href")
        assert not [url for url in tab.requests if "hush" in url.partition("#")[0]]
        tab.ask("sessionStorage.clear()")


def test_the_theme_can_be_chosen(tab: Tab) -> None:
    with Shown(Fixed(everything())) as shown:
        live(tab, shown.url, dark=True)
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = tab.ask(ground)
        tab.ask("document.getElementById('theme').click()")
        assert tab.ask("document.getElementById('theme').textContent") == "Theme: light" and tab.ask(ground) != dark
        live(tab, shown.url, dark=True)
        assert tab.ask(ground) != dark  # remembered
        tab.ask("document.getElementById('theme').click()")
        assert tab.ask(ground) == dark
        tab.ask("document.getElementById('theme').click()")
        assert tab.ask("document.getElementById('theme').textContent") == "Theme: auto" and tab.ask(ground) == dark


CONTRAST = """(() => {
  const parse = (c) => c.match(/[0-9.]+/g).map(Number);
  const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const above = (e) => e ? [e, ...above(e.parentElement)] : [];
  const solid = (e) => { const c = parse(getComputedStyle(e).backgroundColor); return c.length < 4 || c[3] > 0.9 ? c : null; };
  const ground = (e) => above(e).map(solid).find((c) => c) || [255, 255, 255];
  const faded = (e) => above(e).some((one) => +getComputedStyle(one).opacity < 1);
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!words || !e.checkVisibility() || faded(e)) continue;
    const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(ground(e))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return poor; })()"""
NAMELESS = """[...document.querySelectorAll('button, select, input, [role=meter]')].filter((e) => e.checkVisibility()
  && !(e.ariaLabel || e.textContent.trim() || (e.labels && e.labels.length))).length"""
TABLES = """[...document.querySelectorAll('table')].every((t) => t.caption
  && [...t.tHead.querySelectorAll('th')].every((h) => h.scope === 'col' && h.textContent.trim()))"""


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_and_used_without_a_mouse(tab: Tab, dark: bool) -> None:
    with Shown(Fixed(everything())) as shown:
        live(tab, shown.url, dark=dark)
        tab.ask("document.querySelectorAll('tr.new').forEach((row) => row.classList.remove('new'))")
        assert tab.ask(CONTRAST) == []
        assert tab.ask(NAMELESS) == 0
        assert tab.ask(TABLES)


def test_a_gateway_s(tab: Tab) -> None:
    """Decisions with their reasons, streams, and what the index knows of each worker's cache."""
    name = '<b onclick="x">bold</b>'
    with Served(
        workers=2, events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK, engine={"num_gpu_blocks": 4096}
    ) as served:
        states = served.get("/admin/workers")
        engines = [
            {
                "name": called,
                "url": state["url"],
                "events": state["streams"][0]["endpoint"],
                "replay": state["streams"][0]["replay_endpoint"],
                "model": "mock",
            }
            for called, state in zip((name, "plain"), states, strict=False)
        ]
        with Gated(engines=engines, block_size=16) as gated:
            gated.ready(2, 2)
            for _ in range(6):
                gated.client.post(
                    "/v1/completions", json={"prompt": list(range(160)), "max_tokens": 4}
                ).raise_for_status()
            live(tab, gated.url)
            until(tab, "document.querySelectorAll('#decisions tr').length === 6")
            until(
                tab, "[...document.querySelectorAll('#decisions tr')].some(r => r.children[5].textContent === '90 %')"
            )
            shown = tab.ask("[...document.querySelectorAll('h3')].map(e => e.textContent)")
            assert sorted(shown) == sorted([name, "plain"])
            assert "policy least-time" in tab.ask(TEXT)
            until(tab, "[...document.querySelectorAll('.tier b')].some(e => +e.textContent >= 10)")
            tab.ask("document.querySelector('#decisions button').click()")
            assert "least-time chose" in tab.ask("document.querySelector('tr.said').textContent")
            sound(tab, 1366)
