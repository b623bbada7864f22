"""The documentation builds, strictly: every page is in the table of contents and every link leads somewhere, outside too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/kvyard/kvyard/blob/main/"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_documentation_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "reference" / "api.html").exists()
    assert (tmp_path / "search" / "search_index.js").exists(), "a page that was opened from disk can load no JSON"


def test_links_outside_the_site_lead_somewhere() -> None:
    """Links of README, changelog and measurements, and those of pages to files of the repository: file and heading exist."""
    outside = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
    outside += sorted((ROOT / "benchmarks").glob("*.md"))
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in (*outside, *sorted((ROOT / "docs").rglob("*.md")))
        for target in LINK.findall(page.read_text())
        if not _leads_somewhere(page, target, page in outside)
    ]
    assert not broken, "\n".join(broken)


def _leads_somewhere(page: Path, target: str, outside: bool) -> bool:
    path, _, heading = target.partition("#")
    if path.startswith(REPOSITORY):
        file = ROOT / path.removeprefix(REPOSITORY)
    elif "://" in path or not outside:
        return True  # elsewhere; or inside the site, which mkdocs checks
    else:
        file = page.parent / path if path else page
    return file.exists() and (not heading or heading in _headings(file))


def _headings(file: Path) -> set[str]:
    """Anchors of a file's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ +(.*?) *$", file.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", title).lower()) for title in titles]
    return {word.replace(" ", "-") for word in words} | {re.sub(r"[- ]+", "-", word) for word in words}


def test_pages_are_short() -> None:
    """A page has at most 1,500 words outside of tables and code; one with more is two pages."""
    long = {}
    for page in (ROOT / "docs").rglob("*.md"):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        words = sum(len(line.split()) for line in prose.splitlines() if not line.startswith(("|", "    ")))
        if words > 1500:
            long[page.name] = words
    assert not long
