"""The one table of studies: runs and their metrics, for a terminal and for a page.

Runs are rows, or columns where a few runs are compared in many metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

import msgspec

from kvyard.replay.report import html
from kvyard.replay.report.fitting import fitted
from kvyard.replay.report.metrics import COST, METRICS, Metric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Values = Mapping[str, float | None]
"""Metrics by name."""
NAME_WIDTH = 34
RUN_WIDTH = 21
"""Characters that names of metrics and a run with its changes take where runs are columns."""
SHORT, SENTENCE = 8, 28
"""Characters up to which a first column is narrow, and beyond which a column of words wraps."""
KEPT = ("rejected",)
"""Heads of columns that a narrow terminal loses last: a verdict may hang on them."""
LEGEND = "TTFT, ITL, E2E and Queue without a percentile are means. Times are in ms unless a column says s."


class Row(msgspec.Struct, kw_only=True):
    """One run, or several that are shown as one."""

    cells: dict[str, str]
    """Columns before the metrics, by heading."""
    values: Values = {}
    more: dict[str, str] = {}
    """Columns after the metrics, by heading."""
    link: str = ""
    """File with more on it, beside the page."""
    bold: bool = False
    failed: bool = False


class Table(msgspec.Struct, kw_only=True):
    """Rows under one title."""

    rows: list[Row]
    title: str = ""
    shown: Sequence[str] = ()
    """Metrics of a terminal, which has little room, and the order of all. ``rare`` ones are added if there are any."""
    changes: Sequence[str] = ()
    """Metrics that are shown with their change against the row ``base``."""
    base: Values = {}
    runs: list[str] = []
    """Names of the rows where they are columns: all metrics are shown, with changes against the first."""
    tall: bool = False
    """On a page it scrolls."""
    long: bool = False
    """On a page its cells wrap."""

    def metrics(self, page: bool = False) -> list[Metric]:
        """Return the metrics to show: of those that some row has a value of, ``shown`` ones and, on a page, all of tables."""
        levels = ("table", "rare", "comparison") if self.runs else ("table", "rare") if page else ("rare",)
        by_name = {}
        for metric in (*map(wanted, self.shown), *METRICS.values()):
            values = [row.values.get(metric.name) for row in self.rows]
            known = any(value is not None for value in values)
            some = any(values) if self.runs or metric.shown == "rare" else known
            if metric.name == "rejected" and "rejected_share" in self.shown:
                continue  # one column of them is enough
            if (metric.name in self.shown and known) or (metric.shown in levels and some):
                by_name[metric.name] = metric
        return list(by_name.values())

    def fitted(self, page: bool = False) -> list[Metric]:
        """Return the metrics to show, each in the unit that fits its values."""
        return [metric.fitted(row.values.get(metric.name) for row in self.rows) for metric in self.metrics(page)]

    def best(self, metric: Metric) -> list[int]:
        """Return the rows that are best in ``metric``."""
        return metric.best([row.values.get(metric.name) for row in self.rows])

    def print(self, console: Console) -> None:
        """Print it; what doesn't fit is left out by whole columns."""
        for table, leave_out in self._side_by_side(console) if self.runs else self._by_rows():
            console.print(fitted(table, console, leave_out) if leave_out else table)

    def html(self) -> str:
        """Return the table for a page."""
        return self._html_side_by_side() if self.runs else self._html_by_rows()

    def _by_rows(self) -> list[tuple[RichTable, list[str]]]:
        from rich.table import Table as Rich

        table = Rich(box=None, header_style="bold", pad_edge=False, title=self.title or None, title_justify="left")
        for name in self.rows[0].cells:
            table.add_column(name, overflow="fold")
        heads, cells = [], [list(row.cells.values()) for row in self.rows]
        for metric in self.fitted():
            heads.append(f"{metric.head} (change)" if metric.name in self.changes else metric.head)
            table.add_column(heads[-1], justify="right")
            changes = [self._change(metric, row) for row in self.rows]
            width, best = max(map(len, changes)), self.best(metric)
            for index, (row, change) in enumerate(zip(self.rows, changes, strict=True)):
                text = metric.text(row.values.get(metric.name))
                text = f"[bold]{text}[/bold]" if index in best else text
                cells[index].append(f"{text} {change:>{width}}" if width else text)
        for name in self.rows[0].more:
            table.add_column(name)
        for row, row_cells in zip(self.rows, cells, strict=True):
            table.add_row(*row_cells, *row.more.values(), style="bold" if row.bold else "yellow" if row.failed else "")
        return [(table, sorted(heads[::-1], key=lambda head: head in KEPT))]

    def _side_by_side(self, console: Console) -> list[tuple[RichTable, list[str]]]:
        """Return several tables for runs that don't fit into one, each with the first run."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table as Rich

        fit = max(1, (console.width - NAME_WIDTH) // RUN_WIDTH - 1)
        others = list(range(1, len(self.runs)))
        tables: list[tuple[RichTable, list[str]]] = []
        for start in range(0, len(others), fit):
            shown = [0, *others[start : start + fit]]
            table = Rich(
                box=box.SIMPLE_HEAD, pad_edge=False, header_style="", padding=(0, 0, 0, 1), collapse_padding=True
            )
            table.add_column("", overflow="fold")
            for number in shown:
                table.add_column(f"[bold]{escape(self.runs[number])}[/bold]", justify="right", overflow="fold")
                if number:
                    table.add_column("[dim]change[/dim]", justify="right", no_wrap=True)
            for part, metrics in groupby(self.fitted(), lambda metric: metric.part):
                table.add_section()
                table.add_row(f"[dim]{part}[/dim]")
                for metric in metrics:
                    best = self.best(metric)
                    cells = [self._title(metric)]
                    for number in shown:
                        text, change = self._cell(metric, number)
                        cells.append(f"[green]{text} *[/green]" if number in best else f"{text}  ")
                        cells += [change] if number else []
                    table.add_row(*cells)
            tables.append((table, []))
        return tables

    def _html_by_rows(self) -> str:
        metrics = self.fitted(page=True)
        heads, kinds = [*self.rows[0].cells], self._kinds()
        for metric in metrics:
            heads += [metric.heading, "change"] if metric.name in self.changes else [metric.heading]
        rows = []
        for row in self.rows:
            cells: list[str | html.PageLink] = list(row.cells.values())
            if row.link:
                cells[0] = html.PageLink(str(cells[0]), row.link)
            for metric in metrics:
                value = row.values.get(metric.name)
                cells.append(metric.text(value))
                if metric.name in self.changes:
                    cells.append(self._change(metric, row))
            shown = [*cells, *row.more.values()]
            pairs = zip_longest(shown, kinds, fillvalue="")
            rows.append(
                html.row(shown, marks=[f"{kind} missed".strip() if "NOT met" in cell else kind for cell, kind in pairs])
            )
        return html.table([*heads, *self.rows[0].more], rows, self.tall, self.long, kinds)

    def _kinds(self) -> list[str]:
        """Return classes of the columns before the metrics: words begin at the left, and sentences wrap."""
        kinds = []
        for number, name in enumerate(self.rows[0].cells):
            texts = [row.cells[name] for row in self.rows]
            width = max(map(len, texts))
            short = "short" if number == 0 and width <= SHORT else ""
            words = number > 0 and not all(text[:1].isdigit() or text in ("", "–") for text in texts)
            kinds.append(short if not words else "text sentence" if width > SENTENCE else "text")
        return kinds

    def _html_side_by_side(self) -> str:
        heads = ["", f"{self.runs[0]} (yardstick)", *(name for run in self.runs[1:] for name in (run, "change"))]
        rows = []
        for part, metrics in groupby(self.fitted(), lambda metric: metric.part):
            rows.append(f'<tr class="part"><td colspan="{2 * len(self.runs)}">{html.esc(part)}</td></tr>')
            for metric in metrics:
                best = self.best(metric)
                cells, marks = [self._title(metric)], [""]
                for number in range(len(self.runs)):
                    text, change = self._cell(metric, number)
                    cells += [text, change] if number else [text]
                    marks.append("value best" if number in best else "value")
                    marks += ["change"] if number else []
                rows.append(html.row(cells, marks=marks))
        return html.table(heads, rows)

    def _title(self, metric: Metric) -> str:
        """Return the name of a metric below the heading of its part, which says ms."""
        return f"{metric.title}, s" if metric.unit == "s" else metric.title

    def _change(self, metric: Metric, row: Row) -> str:
        value, base = (values.get(metric.name) for values in (row.values, self.base))
        return metric.change_text(value, base) if metric.name in self.changes else ""

    def _cell(self, metric: Metric, number: int) -> tuple[str, str]:
        value, first = (self.rows[row].values.get(metric.name) for row in (number, 0))
        return metric.text(value), metric.change_text(value, first)


def columns(values: Values) -> dict[str, float | None]:
    """Return all metrics by their names in CSV and JSON; ``None`` where ``values`` has none."""
    return {metric.column: values.get(name) for name, metric in METRICS.items()}


def wanted(name: str) -> Metric:
    """Return a metric of a study by name."""
    return COST if name == COST.name else METRICS[name]
