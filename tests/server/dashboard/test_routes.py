"""The dashboard over HTTP: who may see what, viewers that are too many or too slow, and an end in order."""

from __future__ import annotations

import itertools
import socket
import time
import zipfile
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.server.dashboard.support import Fixed, Shown, everything, watched
from tests.server.support import PATIENCE
from tests.waiting import eventually

from kvyard.server.dashboard.routes import ASSETS
from kvyard.server.dashboard.view import DecisionView, FleetView


def get(url: str, **options: object) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=PATIENCE, **options)  # type: ignore[arg-type]


def test_everything_is_guarded_and_nothing_points_elsewhere() -> None:
    with Shown(Fixed(everything())) as shown:
        for path in ("", "/view", *(f"/{name}" for name in ASSETS)):
            reply = get(f"{shown.url}/dashboard{path}")
            assert reply.status_code == 200
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert "://" not in reply.text.replace("http://www.w3.org/", "") or path == "/view"
            assert (
                "innerHTML" not in reply.text and "insertAdjacentHTML" not in reply.text and " style=" not in reply.text
            )
        home = get(f"{shown.url}/")
        assert home.status_code == 307 and home.headers["location"] == "dashboard"


def test_the_view_as_json_is_the_source_s() -> None:
    source = Fixed(everything())
    with Shown(source) as shown:
        reply = get(f"{shown.url}/dashboard/view")
    view = msgspec.json.decode(reply.content, type=FleetView)
    assert msgspec.structs.replace(view, at=source.now.at) == source.now


def test_figures_need_the_token_and_the_page_does_not() -> None:
    with Shown(Fixed(everything("secretive{}")), token="hush") as shown:
        for path in ("", *(f"/{name}" for name in ASSETS)):
            reply = get(f"{shown.url}/dashboard{path}")
            assert reply.status_code == 200 and "secretive" not in reply.text
        for path in ("view", "events"):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                reply = get(f"{shown.url}/dashboard/{path}", headers=headers)
                assert reply.status_code == 401 and "secretive" not in reply.text
                assert reply.headers["www-authenticate"] == "Bearer"
        assert get(f"{shown.url}/dashboard/view", headers={"Authorization": "Bearer hush"}).status_code == 200
        with watched(shown.url, "hush") as events:
            assert [name for name, _ in itertools.islice(events, 2)] == ["history", "view"]


def test_a_viewer_gets_the_past_then_the_present_and_only_new_decisions() -> None:
    source = Fixed(everything(decisions=3))
    with Shown(source) as shown:
        with watched(shown.url) as events:
            name, past = next(events)
            assert name == "history" and [point["finished"] for point in past] == [20]
            assert past[0]["running"] == 6 and past[0]["waiting"] == 2
            name, view = next(events)
            assert name == "view" and [one["number"] for one in view["decisions"]] == [3, 2, 1]
            _, view = next(events)
            assert view["decisions"] == []
            newer = DecisionView(number=4, at=1.0, id="new", worker="w0")
            source.now = msgspec.structs.replace(source.now, decisions=[newer, *source.now.decisions])
            fresh = next(one for _, one in events if one["decisions"])
            assert [one["number"] for one in fresh["decisions"]] == [4]
        with watched(shown.url) as events:
            _, past = next(events)
            assert len(past) >= 3  # as many as were shown
            assert [one["number"] for one in next(events)[1]["decisions"]] == [4, 3, 2, 1]


def _is_still(source: Fixed) -> bool:
    looks = source.looks
    time.sleep(0.5)  # longer than the feed's interval with viewers
    return source.looks == looks


def test_without_viewers_it_costs_nothing() -> None:
    source = Fixed(everything())
    with Shown(source) as shown:
        with watched(shown.url) as events:
            next(events)
            eventually(lambda: source.looks > 2)
        eventually(lambda: shown.dashboard.feed.viewers == 0)
        # The last look may still be under way.
        eventually(lambda: _is_still(source))


def test_viewers_beyond_the_limit_are_refused() -> None:
    with Shown(Fixed(everything()), most_viewers=2) as shown:
        with watched(shown.url) as one:
            next(one)
            with watched(shown.url) as two:
                next(two)
                reply = get(f"{shown.url}/dashboard/events")
                assert reply.status_code == 503 and reply.headers["retry-after"] == "5"
                assert reply.json()["error"] == "2 watch already"
            eventually(lambda: shown.dashboard.feed.viewers == 1)
            with watched(shown.url) as two:
                next(two)
        eventually(lambda: shown.dashboard.feed.viewers == 0)


def test_a_viewer_that_does_not_read_is_dropped_and_others_see_everything() -> None:
    source = Fixed(everything(workers=300, decisions=50))
    with Shown(source, slow=0.5, interval=0.02) as shown:
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect(("127.0.0.1", shown.port))
            idle.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: shown.dashboard.feed.viewers == 1)
            with watched(shown.url) as events:
                next(events)
                eventually(lambda: shown.dashboard.feed.viewers == 1)
                assert [name for name, _ in itertools.islice(events, 5)] == ["view"] * 5
            got = b"".join(iter(lambda: idle.recv(1 << 16), b""))
            assert not got.endswith(b"0\r\n\r\n"), "cut off, so that nothing is kept for it"


def test_the_server_ends_while_somebody_watches() -> None:
    with Shown(Fixed(everything())) as shown, watched(shown.url) as events:
        next(events)
        began = time.monotonic()
        shown.running.stop()
        assert [name for name, _ in events][-1] == "bye"
        # It had 20 s for what is under way, and needed none of them.
        assert time.monotonic() - began < 15
        assert shown.dashboard.feed.join() is False


def test_a_failing_source_is_reported_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    source = Fixed(everything())
    with Shown(source) as shown, watched(shown.url) as events:
        next(events)
        source.broken = True
        trouble = next(value for name, value in events if name == "trouble")
        assert "see its log" in trouble["error"] and "purpose" not in trouble["error"]
        source.broken = False
        assert next(name for name, _ in events if name != "trouble") == "view"
    assert "the dashboard's source failed" in caplog.text


def test_the_wheel_has_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hatchling.builders.wheel import WheelBuilder

    monkeypatch.setenv("KVYARD_PURE", "1")  # compiling takes minutes, and is no concern of the page's
    root = Path(__file__).parents[3]
    built = list(WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(built[0]).namelist()
    for name in {"page.html", *ASSETS} - {"tiers.js"}:  # which the server makes from the list of tiers
        shared = name in ("palette.css", "scales.js")
        assert f"kvyard/{'replay/report' if shared else 'server/dashboard/assets'}/{name}" in names
