"""An expectation as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.lab.expect.expectation import Expectation

if TYPE_CHECKING:
    from rich.console import Console


def summary(found: Expectation) -> str:
    """The expectation in one line."""
    prompts = max(1, found.prompt_tokens)
    text = f"owes {found.owed:,} of {found.prompt_tokens:,} prompt tokens ({found.owed / prompts:.1%})"
    if found.counted is not None:
        text += f", counted {found.counted:,} ({found.counted / prompts:.1%})"
    return text


def verdict(found: Expectation) -> str:
    """The sentence of the first cause, or that there is none."""
    if found.sentence:
        return found.sentence
    return (
        "The engine counted what it owes." if found.counted is not None else "Nothing takes a large part of the hits."
    )


def print_expectation(found: Expectation, console: Console | None = None) -> None:
    """Print ``found``. Without a terminal there are no colours."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from kvyard.replay.report.table import plain_console

    console = console or plain_console()
    prompts = max(1, found.prompt_tokens)
    sizes = found.granularity
    console.print(f"[bold]{escape(found.traffic)}[/bold]  {found.requests:,} requests, {escape(summary(found))}")
    smallest = "none up to a large bound" if sizes.smallest is None else f"{sizes.smallest:,} tokens"
    console.print(f"hits are multiples of {sizes.block_size:,} tokens; the shortest prefix that can hit: {smallest}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    table.add_column("")
    for title in ("prompt tokens", "share"):
        table.add_column(title, justify="right")

    def row(title: str, tokens: int, style: str = "") -> None:
        table.add_row(escape(title), f"{tokens:,}", f"{tokens / prompts:.1%}", style=style)

    row("shared with earlier prompts and answers", found.shared)
    for step in found.steps:
        if step.cause != "changing-text":
            row(f"- {step.title}", -step.lost, "dim")
    row("owed", found.owed, "bold")
    if found.owed_loaded:
        row("  of which loaded from lower tiers", found.owed_loaded, "dim")
    if found.counted is not None:
        row(f"counted ({found.counted_by})", found.counted, "bold")
    console.print(table)
    if found.compared is not None:
        console.print(f"{found.equal:,} of {found.compared:,} requests were counted to the token")
        for one in found.different[:5]:
            console.print(
                f"[dim]  {escape(one.id)}: {one.input:,} tokens, owed {one.owed:,}, counted {one.counted:,}[/dim]"
            )
    for note in found.notes:
        console.print(f"[dim]{escape(note)}[/dim]")
    console.print(escape(verdict(found)), style="bold" if found.flagged else "")
