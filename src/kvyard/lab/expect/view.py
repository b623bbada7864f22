"""An expectation as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.lab.expect.expectation import Expectation

if TYPE_CHECKING:
    from rich.console import Console


def summary(expectation: Expectation) -> str:
    """Return the expectation in one line."""
    prompts = max(1, expectation.prompt_tokens)
    text = (
        f"owes {expectation.owed:,} of {expectation.prompt_tokens:,} prompt tokens ({expectation.owed / prompts:.1%})"
    )
    if expectation.counted is not None:
        text += f", counted {expectation.counted:,} ({expectation.counted / prompts:.1%})"
    return text


def verdict(expectation: Expectation) -> str:
    """Return the sentence of the first cause, or that there is none."""
    if expectation.sentence:
        return expectation.sentence
    if expectation.counted is None:
        lost = [step for step in expectation.steps if step.lost > 0 and step.cause != "changing-text"]
        if not expectation.shared:
            return "No prompt begins as an earlier one does, or the trace doesn't say what prompts consist of."
        if not lost:
            return "Nothing takes hits away."
        largest = max(lost, key=lambda step: step.lost)
        return (
            f"Nothing takes a large part of the hits; the largest, {largest.title}, takes "
            f"{largest.lost / expectation.shared:.0%} of what is shared."
        )
    if expectation.counted == expectation.owed and expectation.equal == expectation.compared:
        return "The engine counted what it owes."
    return "The engine counted what it owes, but for less than the tolerance."


def print_expectation(expectation: Expectation, console: Console | None = None) -> None:
    """Print ``expectation``. Without a terminal there are no colours."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from kvyard.replay.report.table import plain_console

    console = console or plain_console()
    prompts = max(1, expectation.prompt_tokens)
    sizes = expectation.granularity
    console.print(
        f"[bold]{escape(expectation.traffic)}[/bold]  {expectation.requests:,} requests, {escape(summary(expectation))}"
    )
    smallest = "none up to a large bound" if sizes.smallest is None else f"{sizes.smallest:,} tokens"
    console.print(f"hits are multiples of {sizes.block_size:,} tokens; the shortest prefix that can hit: {smallest}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    table.add_column("")
    for title in ("prompt tokens", "share"):
        table.add_column(title, justify="right")

    def row(title: str, tokens: int, style: str = "") -> None:
        table.add_row(escape(title), f"{tokens:,}", f"{tokens / prompts:.1%}", style=style)

    row("shared with earlier prompts and answers", expectation.shared)
    for step in expectation.steps:
        if step.cause != "changing-text":
            row(f"- {step.title}", -step.lost, "dim")
    row("owed", expectation.owed, "bold")
    if expectation.owed_loaded:
        row("  of which loaded from lower tiers", expectation.owed_loaded, "dim")
    if expectation.counted is not None:
        row(f"counted ({expectation.counted_by})", expectation.counted, "bold")
    console.print(table)
    if expectation.compared is not None:
        console.print(f"{expectation.equal:,} of {expectation.compared:,} requests were counted to the token")
        for request in expectation.different[:5]:
            counts = f"{request.input:,} tokens, owed {request.owed:,}, counted {request.counted:,}"
            console.print(f"[dim]  {escape(request.id)}: {counts}[/dim]")
    for note in expectation.notes:
        console.print(f"[dim]{escape(note)}[/dim]")
    console.print(escape(verdict(expectation)), style="bold" if expectation.flagged else "")
