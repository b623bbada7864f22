"""The documentation builds, strictly: every page is in the table of contents and every link leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_documentation_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "reference" / "api.html").exists()
    assert (tmp_path / "search" / "search_index.js").exists(), "a page that was opened from disk can load no JSON"


def test_every_page_has_its_pictures() -> None:
    """At both widths, light and dark, and small."""
    names = ("report", "comparison", "sweep", "league", "trace", "profile", "dashboard")
    folder = ROOT / "docs" / "pictures"
    wanted = {f"{name}-{width}{dark}.webp" for name in names for width in (1400, 390) for dark in ("", "-dark")}
    found = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(found) == wanted
    assert max(found.values()) < 100_000
