"""Result of a study, as plain values: printed for a terminal, written as CSV and JSON, and drawn as one page."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvyard import __version__
from kvyard.errors import KvyardError
from kvyard.files import encode_json, write_whole
from kvyard.lab.study.table import LEGEND, Table
from kvyard.replay.report.figures import Figure
from kvyard.replay.report.html import Page, answer, esc, head, listing, tiles
from kvyard.replay.report.words import MET, NOT_MET

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 120
"""Characters of a line that goes to no terminal."""


class Chart(NamedTuple):
    """A figure with its heading."""

    title: str
    text: str
    figure: Figure


class Section(msgspec.Struct, kw_only=True):
    """A part of the page: charts, then a table."""

    title: str
    text: str
    charts: Sequence[Chart] = ()
    columns: str = "two"
    """Charts side by side."""
    tiles: Sequence[str] = ()
    table: Table | None = None


class Result(msgspec.Struct, kw_only=True):
    """Content of a study."""

    kind: str
    """Command, and the name of its files."""
    title: str
    about: str
    """Description of the runs, in a line under the title."""
    tables: list[Table]
    """Printed one after the other."""
    rows: list[dict[str, Any]]
    """Values of each row, for CSV and JSON."""
    facts: dict[str, Any]
    """Keys of the JSON beside its rows."""
    rows_key: str = "points"
    advice: list[str] = []
    notes: list[str] = []
    """Reasons why the result is incomplete."""
    times: str = ""
    legend: str = LEGEND
    """Printed below the tables."""
    remarks: list[str] = []
    """Printed before the advice."""
    commands: list[str] = []
    """Command lines that do what the advice says, to be pasted."""
    met: bool | None = None
    """True if the SLO is met; ``None`` without one."""
    verdict: str = ""
    """Verdict in words, if there is one."""
    tiles: Sequence[str] = ()
    sections: list[Section] = []
    config: tuple[str, object] | None = None
    """Heading and value of the settings at the page's end."""
    files: dict[str, Callable[[], str]] = {}
    """Further files that are made of it, by name."""
    pages: Callable[[], None] | None = None
    """Writes the pages of single runs."""

    @property
    def empty(self) -> bool:
        """True if nothing has run: there is nothing to print or draw then."""
        return not self.tables

    def show(self, console: Console | None = None) -> None:
        """Print tables, notes and advice."""
        from rich.console import Console as Terminal

        console = console or Terminal(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
        for number, table in enumerate(self.tables):
            if number:
                console.print()
            table.print(console)
        for text, style in ((self.legend, "dim"), (self.times, "dim"), *((note, "yellow") for note in self.notes)):
            if text:
                console.print(text, style=style, markup=False, highlight=False)
        if self.met is not None:
            console.print(self.verdict or (MET if self.met else NOT_MET), style="green" if self.met else "bold red")
        for sentence in (*self.remarks, *self.advice):
            console.print(sentence, markup=False, highlight=False)
        for command in self.commands:
            console.print(command, markup=False, highlight=False, soft_wrap=True)

    def json(self) -> bytes:
        """Return all facts and rows as JSON."""
        value = {"kind": f"kvyard {self.kind}", **self.facts, self.rows_key: self.rows}
        return msgspec.json.format(encode_json(value), indent=1) + b"\n"

    def csv(self) -> str:
        """Return all rows as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]) if self.rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def page(self) -> str:
        """Return the page: one file that needs no network."""
        page = Page(f"{self.title} · kvyard")
        page.add(head(self.title, self.about, self.notes, self.times), answer(self.advice, self.met, self.verdict))
        if self.tiles:
            page.add(tiles(self.tiles))
        if self.commands:
            page.section("To paste", "")
            page.add(f'<section class="card"><pre>{esc((2 * chr(10)).join(self.commands))}</pre></section>')
        for section in self.sections:
            page.section(section.title, section.text)
            if section.tiles:
                page.add(tiles(section.tiles))
            if section.charts:
                page.cards(section.columns, *(page.figure(*chart) for chart in section.charts))
            if section.table is not None:
                page.add(f'<section class="card wide">{section.table.html()}</section>')
        if self.config is not None:
            page.section("What was run", "What is not varied is the same for all.")
            page.add(f'<section class="card">{listing(*self.config)}</section>')
        page.footer(f"kvyard {__version__}")
        return page.text()

    def save(self, folder: Path) -> list[Path]:
        """Write CSV, JSON and, unless it is empty, the pages and further files; returns where. Raises ``KvyardError``."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvyardError(f"can't make the folder {folder}: {error.strerror}") from None
        page, further = folder / f"{self.kind}.html", [folder / name for name in self.files]
        texts: dict[Path, str | bytes] = {
            folder / f"{self.kind}.csv": self.csv(),
            folder / f"{self.kind}.json": self.json(),
        }
        if self.empty:
            for path in (page, *further):  # an earlier study's answer isn't this one's
                path.unlink(missing_ok=True)
        else:
            if self.pages is not None:
                self.pages()
            texts |= {page: self.page(), **{folder / name: make() for name, make in self.files.items()}}
        for path, text in texts.items():
            write_whole(path, text)
        return list(texts)
