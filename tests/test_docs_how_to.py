"""The examples of how-to pages for authors run: an endpoint that is served, a study that is saved."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.replay.traces.support import ROOT, SAMPLES

HOW_TO = ROOT / "docs" / "how-to"


def examples(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", (HOW_TO / page).read_text(), re.DOTALL):
        exec(compile(example, page, "exec"), names)
    return names


def test_the_endpoint() -> None:
    httpx = pytest.importorskip("httpx", reason="needs kvyard[server]")
    pytest.importorskip("httptools", reason="needs kvyard[server]")
    from kvyard.server.running import Running, listen

    ready = threading.Event()
    running = Running(
        examples("add-an-endpoint.md")["application"], listen("127.0.0.1", 0), ready=lambda _: ready.set()
    )
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        assert ready.wait(30)
        with httpx.Client(base_url=running.url, trust_env=False) as client:
            assert client.post("/blocks", json={"tokens": 100}).json() == {"blocks": 6}
            refused = client.post("/blocks", json={"tokens": 100, "block_size": 0})
            assert (refused.status_code, refused.json()["fix"]) == (422, "send 1 or more")
            assert set(client.get("/openapi.json").json()["paths"]) == {"/blocks", "/ping"}
    finally:
        running.stop()
        thread.join(30)
    assert not thread.is_alive()


def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text((SAMPLES / "mooncake_synthetic.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    study = examples("write-a-study.md")["study"]
    assert [point.varied["speedup"] for point, _ in study.done] == ["1", "2", "4"]
    assert "TTFT" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "speeds").iterdir()} >= {"speeds.csv", "speeds.json", "speeds.html"}
