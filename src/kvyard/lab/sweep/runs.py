"""Pages of the runs of a grid: one for each point, in a folder of their own, with a link back to the page of the grid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.replay.report.html import PageLink

if TYPE_CHECKING:
    from kvyard.lab.sweep.run import Sweep

RUNS = "runs"
"""The folder, below that of the sweep."""
MOST_PAGES = 100
"""Points up to which each has a page. Beyond that the reports are there, and kvyard compare draws any of them."""


def run_page(sweep: Sweep, report: str) -> str:
    """Where the page of a run lies whose ``report`` is there; the report itself where there are too many for pages."""
    return f"{RUNS}/{Path(report).stem}.html" if len(sweep.grid.points) <= MOST_PAGES else report


def write_runs(sweep: Sweep, home: str, title: str) -> None:
    """Write a page for each run that is done, with a link to ``home``, a file of the sweep's folder. Raises ``KvyardError``."""
    from kvyard.replay.report.page import page

    if len(sweep.grid.points) > MOST_PAGES:
        return
    folder = sweep.folder / RUNS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise KvyardError(f"can't make the folder {folder}: {error.strerror}") from None
    for point, report in sweep.done:
        write_whole(folder / f"{point.key}.html", page(report, PageLink(title, f"../{home}")))
