"""Every Python example of the docs runs, those of a page one after the other, in a folder with a trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.replay.traces.support import ROOT, SAMPLES

DOCS = ROOT / "docs"
ELSEWHERE = {
    "add-an-endpoint.md": "tests/test_docs_how_to.py",
    "extending.md": "tests/test_extending.py",
    "index-service.md": "tests/server/indexer/test_docs.py",
    "live.md": "tests/lab/rehearsal/test_docs.py",
    "mock-engine.md": "tests/server/mock/test_fleet_process.py",
    "redis-index.md": "tests/index/redis/test_docs.py",
    "routing.md": "tests/router/test_docs.py",
    "write-a-routing-policy.md": "tests/router/test_docs.py",
    "write-a-study.md": "tests/test_docs_how_to.py",
}
"""Pages whose examples need a server, or have an outcome that a test of their own compares."""
NEEDS = {"event-streams.md": ("zmq",), "testing.md": ("zmq", "httptools", "aiohttp")}
"""Modules that a page's examples need."""


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if examples(page)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in NEEDS.get(page.name, ()):
        pytest.importorskip(module)
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "trace.jsonl").write_text((SAMPLES / "mooncake_synthetic.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for example in examples(page):
        exec(compile(example, str(page), "exec"), names)


def test_other_pages_have_a_test_of_their_own() -> None:
    assert set(ELSEWHERE) <= {page.name for page in PAGES}
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(), f"{test} doesn't run {name}"
