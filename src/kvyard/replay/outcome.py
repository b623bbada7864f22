"""An outcome: what a replay leaves behind, simulated or live. It shows and saves; how it came about is its makers' business."""

from __future__ import annotations

from pathlib import Path

from kvyard.replay.record import Record
from kvyard.replay.report import Report
from kvyard.replay.traces import Trace


class ReplayOutcome:
    """A replay that is over: its ``report``, and the ``records`` of its requests."""

    def __init__(self, report: Report, records: dict[str, Record], complete: bool, trace: Trace | None) -> None:
        self.report = report
        self.complete = complete
        """Whether it went to the end of the trace."""
        self.trace = trace
        """The trace, where it can be read again."""
        self._records = records

    @property
    def records(self) -> list[Record]:
        """One for each request, in the order they came or were due."""
        return list(self._records.values())

    def show(self) -> None:
        """Print the report's table."""
        from kvyard.replay.report.table import print_report

        print_report(self.report)

    def save(
        self,
        report: str | Path | None = None,
        per_request: str | Path | None = None,
        html: str | Path | None = None,
    ) -> None:
        """Write the report as JSON, a row per request (.jsonl or .parquet), and the page. Raises ``KvyardError``."""
        from kvyard.replay.report.files import write_report, write_requests
        from kvyard.replay.report.page import write_html

        if report is not None:
            write_report(self.report, report)
        if per_request is not None:
            write_requests(self._records.values(), per_request)
        if html is not None:
            write_html(self.report, html)

    def __repr__(self) -> str:
        from kvyard.replay.report.words import summary

        return f"<{type(self).__name__}: {summary(self.report)}>"
