"""Pieces of a page: cards, tiles, tables, and the frame around them with its style and script. Escapes all it is given."""

import html
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from kvyard.files import encode_json
from kvyard.integers import ceil_div
from kvyard.replay.report.figures import Figure
from kvyard.replay.report.words import MET, NOT_MET

MANY = 3
"""Sections from which a page has a list of them."""
MOST_TILES = 6
"""Headline figures in a row of a wide page."""
LONG_VALUE = 12
"""Characters beyond which a headline figure has smaller letters."""


FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")
"""A command-line flag in a sentence."""


class Page:
    """Collects parts and figures; ``text`` is the file."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._figures: list[Figure] = []
        self._sections: dict[str, str] = {}
        """Titles by the names that links have."""
        self._folding = False
        """True while parts go into a folded section."""

    def add(self, *parts: str) -> None:
        """Append HTML."""
        self._parts += parts

    def cards(self, kind: str, *cards: str) -> None:
        """Append cards side by side."""
        self.add(f'<div class="grid {kind}">' + "\n".join(cards) + "</div>")

    def section(self, title: str, text: str, folded: bool = False) -> None:
        """Begin a section: a heading that can be linked to, and a sentence on what is below it. What is added from here to the
        next section is part of it. A ``folded`` section shows its heading and sentence until it is opened.
        """
        self._end_section()
        name = re.sub("[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        while name in self._sections:
            name += "-2"
        self._sections[name] = title
        link = f'<a class="anchor" href="#{name}" aria-label="Link to {esc(title)}"></a>'
        if folded:
            paragraph = f"<p>{esc(text)}</p>" if text else ""
            self.add(f'<details class="fold" id="{name}"><summary><h2>{esc(title)}{link}</h2>{paragraph}</summary>')
        else:
            self.add(f'<h2 id="{name}">{esc(title)}{link}</h2><p>{esc(text)}</p>')
        self._folding = folded

    def footer(self, text: str) -> None:
        """End the last section, and add the page's last line."""
        self._end_section()
        self.add(f"<footer>{esc(text)}</footer>")

    def _end_section(self) -> None:
        if self._folding:
            self.add("</details>")
        self._folding = False

    def figure(self, title: str, text: str, figure: Figure, wide: bool = False) -> str:
        """Return a card with a chart in it."""
        return card(title, text, self.chart(figure), wide)

    def chart(self, figure: Figure) -> str:
        """Return the element in which a chart is drawn."""
        self._figures.append(figure)
        return f'<div class="chart" data-figure="{len(self._figures) - 1}"></div>'

    def text(self) -> str:
        """Return the whole page, in one piece that needs no network."""
        self._end_section()
        here = files("kvyard.replay.report")
        palette, style, scales, script = (
            (here / name).read_text("utf-8") for name in ("palette.css", "page.css", "scales.js", "page.js")
        )
        scales = scales.replace("export const", "const")
        figures = encode_json(self._figures).decode().replace("<", "\\u003c")
        head, *rest = self._parts or [""]
        body = "\n".join([head, self._contents(), *rest])
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{esc(self._title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
{palette}{style}</style></head><body><main>
{body}
</main><div id="tip"></div>
<script id="figures" type="application/json">{figures}</script>
<script>
{scales}
{script}</script></body></html>
"""

    def _contents(self) -> str:
        """Return links to the sections, if there are enough of them to scroll for long."""
        if len(self._sections) < MANY:
            return ""
        links = "".join(f'<a href="#{name}">{esc(title)}</a>' for name, title in self._sections.items())
        return f'<nav class="toc" aria-label="Contents">{links}</nav>'


def esc(text: object) -> str:
    """Return text as HTML."""
    return html.escape(str(text))


def head(title: str, text: str, notes: Iterable[str] = (), times: str = "") -> str:
    """Return the top of a page; ``times`` says where those in it come from."""
    more = f"<p>{esc(times)}</p>" if times else ""
    return f"<header><h1>{esc(title)}</h1><p>{esc(text)}</p>{more}</header>" + "".join(
        f'<p class="note">{esc(note)}</p>' for note in notes
    )


def answer(sentences: Sequence[str], met: bool | None = None, verdict: str = "") -> str:
    """Return the page's answer in plain words; empty without sentences. ``met`` is shown above it in large letters: the SLO
    is met or not; by ``verdict`` if that is given.
    """
    paragraphs = "".join(f"<p>{_whole_flags(esc(sentence))}</p>" for sentence in sentences)
    if met is not None:
        paragraphs = f'<p class="verdict">{esc(verdict or (MET if met else NOT_MET))}</p>{paragraphs}'
    kind = {True: "answer met", False: "answer missed", None: "answer"}[met]
    return f'<section class="{kind}">{paragraphs}</section>' if paragraphs else ""


def _whole_flags(text: str) -> str:
    """Return ``text`` with flags that no line breaks."""
    return FLAG.sub(r'<span class="flag">\g<0></span>', text)


def tile(name: str, value: str, unit: str, more: str, missed: bool = False) -> str:
    """Return a headline figure; one that ``missed`` its limit says so."""
    kind, verdict = ("tile missed", f"<b>{NOT_MET}</b> ") if missed else ("tile", "")
    size = "value long" if len(value) > LONG_VALUE else "value"
    shown = esc(value).replace(" ", "\u00a0").replace("→\u00a0", "→ ")
    return (
        f'<div class="{kind}"><div class="name">{esc(name)}</div><div class="{size}">{shown}'
        f'<small>{esc(unit)}</small></div><div class="more">{verdict}{esc(more)}</div></div>'
    )


def tiles(parts: Iterable[str]) -> str:
    """Return headline figures side by side, in rows of about equal length."""
    shown = list(parts)
    rows = ceil_div(len(shown), MOST_TILES) or 1
    return f'<div class="tiles" style="--most: {ceil_div(len(shown), rows) or 1}">{"".join(shown)}</div>'


def table(
    columns: Sequence[str], rows: Iterable[str], tall: bool = False, long: bool = False, marks: Sequence[str] = ()
) -> str:
    """Return a table of rows made by ``row``. One that is ``tall`` scrolls; cells that are ``long`` wrap; ``marks`` are the
    classes of headings.
    """
    heads = ""
    for name, mark in zip_longest(columns, marks, fillvalue=""):
        kind = " ".join(filter(None, ("words" if " / " in name else "", mark)))
        shown = esc(name).replace("_", "_<wbr>").replace(", ", ",\u00a0")
        heads += f'<th class="{kind}">{shown}</th>' if kind else f"<th>{shown}</th>"
    body = "".join(rows)
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    kind, cells = "scroll tall" if tall else "scroll", "data long" if long else "data"
    return f'<div class="{kind}"><table class="{cells}">{inner}</table></div>'


class PageLink(NamedTuple):
    """Text that leads to another file, beside this one."""

    text: str
    href: str

    def __str__(self) -> str:
        return f'<a href="{esc(self.href)}">{esc(self.text)}</a>'


def row(cells: Sequence[str | PageLink], kind: str = "", marks: Sequence[str] = ()) -> str:
    """Return a row of cells that are text, or links; ``marks`` are their classes."""
    inner = ""
    for cell, mark in zip_longest(cells, marks, fillvalue=""):
        shown = str(cell) if isinstance(cell, PageLink) else esc(cell)
        inner += f'<td class="{mark}">{shown}</td>' if mark else f"<td>{shown}</td>"
    return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"


def card(title: str, text: str, inner: str, wide: bool = True) -> str:
    """Return a card with anything in it."""
    paragraph = f"<p>{esc(text)}</p>" if text else ""
    return f'<section class="{"card wide" if wide else "card"}"><h3>{esc(title)}</h3>{paragraph}{inner}</section>'


def listing(title: str, value: object) -> str:
    """Return a value as JSON, folded away."""
    text = msgspec.json.format(encode_json(value, order="deterministic"), indent=2).decode()
    return f"<details><summary>{esc(title)}</summary><pre>{esc(text)}</pre></details>"
