"""``kvyard conform``: does our block manager do what vLLM's did, operation by operation?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvyard.blocks.conform import Difference, LogError, Verdict
from kvyard.blocks.conform import conform as compare

SHOWN = 400
"""Characters shown of each result: enough to see a queue differ, short enough for a terminal."""


def conform(
    files: Annotated[
        list[Path], typer.Argument(help="Operation logs recorded from a real vLLM, plain or .xz.", show_default=False)
    ],
) -> None:
    """Replay operation logs of a real vLLM block manager and compare every result.

    Compared are hits, block ids, failures, hashes, reference counts, the order of free blocks, and events. Exit code 0: all
    are identical. 1: some differ; the first difference of each is shown. 2: none differs, but some can't be replayed.
    """
    verdicts = []
    for path in files:
        try:
            verdict = compare(path)
        except LogError as bad:
            typer.echo(f"Error: {bad}", err=True)
            continue
        verdicts.append(verdict)
        typer.echo(_line(verdict))
        if verdict.difference is not None:
            _show(verdict.difference)
    identical = sum(verdict.difference is None for verdict in verdicts)
    operations = sum(verdict.operations for verdict in verdicts)
    unread = len(files) - len(verdicts)
    left_out = f", {unread} can't be replayed" if unread else ""
    typer.echo(f"{identical} of {len(files)} logs identical{left_out}, {operations} operations")
    if identical < len(verdicts):
        raise typer.Exit(1)
    if unread:
        raise typer.Exit(2)


def _line(verdict: Verdict) -> str:
    if verdict.difference is None:
        return f"{verdict.name}: {verdict.operations} operations, identical"
    return f"{verdict.name}: differs at operation {verdict.operations}, in {verdict.difference.field}"


def _show(difference: Difference) -> None:
    typer.echo(f"  operation  {_short(difference.op)}")
    typer.echo(f"  recorded   {difference.field} = {_short(difference.recorded)}")
    typer.echo(f"  ours       {difference.field} = {_short(difference.ours)}")
    for op in difference.before:
        typer.echo(f"  before     {_short(op)}")


def _short(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
