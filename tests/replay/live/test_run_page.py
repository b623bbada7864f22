"""The page of a live run in a real browser: drawn without complaint, and without figures that it has no data for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.test_page import unfold
from tests.replay.support import request
from tests.server.mock.support import Served

from kvyard.lab.compare import compare
from kvyard.replay import replay
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.run import replay_live
from kvyard.replay.report.page import write_html

pytestmark = [pytest.mark.browser, pytest.mark.skipif(BINARY is None, reason="no chromium here")]


def test_live_page(tab: Tab, tmp_path: Path) -> None:
    rows = [
        request(str(at), at * 0.02, ids=[0, 10 + at], id_block_size=64, input_length=128, output_length=6)
        for at in range(40)
    ]
    with Served(engine={"num_gpu_blocks": 4096, "max_model_len": 8192}) as served:
        live = replay_live(rows, served.url, LiveConfig()).report
    simulated = replay(rows, workers=1, block_size=16, num_gpu_blocks=4096).report
    reports = [simulated, live]
    write_html(live, tmp_path / "live.html")
    (tmp_path / "both.html").write_text(compare(reports, ["simulated", "live"]).page())
    for name in ("live", "both"):
        for dark in (False, True):
            tab.open(tmp_path / f"{name}.html", 1280, dark=dark)
            assert tab.errors == []
            assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
            unfold(tab)
            drawn = "e => e.dataset.drawn === 'yes' && e.children.length"
            assert tab.ask(f"[...document.querySelectorAll('.chart')].every({drawn})")
            assert tab.ask("document.documentElement.scrollWidth") <= 1280
            if place := os.environ.get("KVYARD_PICTURES"):
                tab.picture(Path(place) / f"live-{name}{'-dark' if dark else ''}.png")
    tab.open(tmp_path / "live.html", 1280)
    heads = tab.ask("[...document.querySelectorAll('h2, h3')].map(e => e.textContent)")
    assert "Latency" in heads and "Workers" in heads
    assert not {"Router", "Tiers and links", "Cache use by tier", "Queue time"} & set(heads)
