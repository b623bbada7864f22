"""Pictures of every page for the documentation: 1400 and 390 wide, light and dark, into docs/pictures.

    .venv/bin/python -m scripts.screenshots

Makes the pages from the trace in examples/data, and a dashboard from a mock fleet behind a gateway. Needs Chromium.
"""

from __future__ import annotations

import base64
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.replay.report.browser import Tab, browser
from tests.server.gateway.support import Gated, fleet

from kvyard.engine.timing.profile import load_profile, shipped
from kvyard.lab.compare import compare
from kvyard.lab.league import league
from kvyard.lab.sweep import sweep
from kvyard.replay import replay
from kvyard.replay.report.profile_page import page as profile_page
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe
from kvyard.replay.traces.page import write_page

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
OUT = ROOT / "docs" / "pictures"
WIDTHS = (1400, 390)
HEIGHT = {1400: 1300, 390: 1400}
"""The top of a page, so much of it as is worth showing."""
SMALL = {"limit": 1500, "workers": 4, "num_gpu_blocks": 8000}


def main() -> None:
    """Write all of them."""
    OUT.mkdir(exist_ok=True)
    with TemporaryDirectory() as temporary, TemporaryDirectory() as profile, browser(Path(profile)) as tab:
        folder = Path(temporary)
        for name, path in pages(folder).items():
            for width in WIDTHS:
                for dark in (False, True):
                    tab.open(path, width, dark=dark)
                    take(tab, name, width, dark)
        dashboard(tab)


def pages(folder: Path) -> dict[str, Path]:
    """Every page, by name."""
    settings = {"round-robin": {"router": "round-robin"}, "kv": {"router": "kv"}}
    settings["least-time, host memory"] = {"router": "least-time", "host_bytes": "256GiB"}
    runs = [replay(TRACE, label=name, bounds=True, **SMALL, **more) for name, more in settings.items()]  # type: ignore[arg-type]
    runs[-1].save(html=folder / "report.html")
    reports = [run.report for run in runs]
    (folder / "comparison.html").write_text(compare(reports).page())
    vary = {"host_bytes": ["0", "128GiB", "256GiB", "512GiB"], "router": ["kv", "least-time"]}
    grid = {name: value for name, value in SMALL.items() if name != "router"}
    sweep(TRACE, vary, folder=folder / "sweep", **grid).save()  # type: ignore[arg-type]
    names = ("round-robin", "kv", "least-time", "lmetric", "sticky")
    league(TRACE, folder=folder / "league", policies=names, **grid).save()
    write_page(describe(open_trace(TRACE)), folder / "trace.html")
    (folder / "profile.html").write_text(profile_page(load_profile(name=shipped()[0]), None))
    pages = {name: folder / f"{name}.html" for name in ("report", "comparison", "trace", "profile")}
    return pages | {"sweep": folder / "sweep" / "sweep.html", "league": folder / "league" / "league.html"}


def dashboard(tab: Tab) -> None:
    """A gateway's, while a mock fleet works behind it."""
    with fleet(workers=4, speed=4.0) as served, Gated(fleets=[served.url]) as gate:
        gate.ready(4, 4)
        ends = time.monotonic() + 60
        texts = [f"{number} " + "a shared beginning of some length " * (4 + number % 5) for number in range(12)]

        def work(start: int) -> None:
            number = start
            while time.monotonic() < ends:
                gate.complete(texts[number * 5 % 12] + "x" * (number % 40), max_tokens=40)
                number += 1

        threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(25)
        for width in WIDTHS:
            for dark in (False, True):
                tab.open(f"{gate.url}/dashboard", width, dark=dark)
                time.sleep(3)
                take(tab, "dashboard", width, dark)
        tab.open("about:blank")
        for thread in threads:
            thread.join()


def take(tab: Tab, name: str, width: int, dark: bool) -> None:
    """One picture, as a small WebP."""
    size = tab.call("Page.getLayoutMetrics")["cssContentSize"]
    assert size["width"] <= width, f"{name} is {size['width']} wide at {width}"
    clip = {
        "x": 0,
        "y": 0,
        "width": width,
        "height": min(size["height"], HEIGHT[width]),
        "scale": 0.75 if width > 800 else 1,
    }
    taken = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True, format="webp", quality=50)
    (OUT / f"{name}-{width}{'-dark' if dark else ''}.webp").write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
