"""Reports of a study on its single runs: missing ones, the sources of their times, and a page for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.replay.report.html import PageLink
from kvyard.replay.report.room import what_ifs
from kvyard.replay.report.words import timing_text

if TYPE_CHECKING:
    from kvyard.lab.study.grid import Point
    from kvyard.lab.study.study import Study

RUNS = "runs"
"""Folder of the pages, below that of the study."""
MOST_PAGES = 100
"""Points up to which each has a page. Beyond that there are the reports, and kvyard compare draws any of them."""
MOST_TIMES = 4
"""Sources of times that are named."""


def notes(study: Study) -> list[str]:
    """Return sentences on points that have not run, that have more blocks than their card holds, and that failed."""
    sentences = [f"{study.missing} of {len(study.points)} replays have not run yet."] if study.missing else []
    if beyond := [point.label for point, report in study.done if what_ifs(report.config)]:
        sentences.append(f"What-ifs, with more blocks than the card has room for: {'; '.join(beyond)}.")
    return sentences + [f"{point.label}: {why}" for point, why in study.failed]


def times(study: Study, file: str) -> str:
    """Return where times come from, each source once, with a point that has it if there are several. ``file`` has the rest."""
    by: dict[str, list[str]] = {}
    for point, report in study.done:
        if report.timing:
            by.setdefault("; ".join(map(timing_text, report.timing)), []).append(point.label)
    if not by:
        return ""
    if len(by) == 1:
        known = any(report.ranges for _, report in study.done)
        cancels = " An error that all points have cancels between them." if known and len(study.done) > 1 else ""
        return f"Times: {next(iter(by))}.{cancels}"
    alike = {timing.kind for _, report in study.done for timing in report.timing}
    some = [f"{text} ({labels[0]}{', ...' if len(labels) > 1 else ''})" for text, labels in by.items()]
    shown = 1 if len(alike) == 1 else MOST_TIMES
    more = f"; and {len(some) - shown} more{' like it' if shown == 1 else ''}, in {file}" if len(some) > shown else ""
    return f"Times: {'; '.join(some[:shown])}{more}. Differences smaller than these errors may be theirs."


def run_page(study: Study, point: Point) -> str:
    """Return where the page of a run lies; its report's path if there are too many for pages."""
    return f"{RUNS}/{point.key}.html" if len(study.points) <= MOST_PAGES else f"points/{point.key}.json"


def write_runs(study: Study, home: str, title: str) -> None:
    """Write a page for each run that is done, with a link to ``home``, a file of the study's folder. Raises ``KvyardError``."""
    from kvyard.replay.report.page import page

    if len(study.points) > MOST_PAGES:
        return
    folder = study.folder / RUNS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise KvyardError(f"can't make the folder {folder}: {error.strerror}") from None
    for point, report in study.done:
        write_whole(folder / f"{point.key}.html", page(report, PageLink(title, f"../{home}")))
