"""``kvyard conform``: compares our block manager and engine with logs of vLLM, SGLang and TensorRT-LLM, step by step."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvyard.lab.conform import LogDifference, LogError, LogVerdict, scheduler, sglang, trtllm
from kvyard.lab.conform import conform as compare_blocks

SHOWN = 400
"""Characters shown of each result: enough to see a queue differ, short enough for a terminal."""


def conform(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Logs recorded from a real vLLM, SGLang or TensorRT-LLM, plain, .xz or .gz.", show_default=False
        ),
    ],
) -> None:
    """Replay logs of a real vLLM, SGLang or TensorRT-LLM and compare every result.

    vLLM's block manager: hits, block ids, failures, hashes, reference counts, order of free blocks, events. Its scheduler:
    tokens per request and step, hits, preemptions, ends, times, order of free blocks. SGLang's: batches, cached tokens,
    retractions, free, evictable and protected pages, ends, events. TensorRT-LLM's Python schedulers: passes, cached tokens,
    pauses, free blocks, ends. Exit code 0: all are identical. 1: some differ; the first difference of each is printed. 2: none
    differs, but some can't be replayed.
    """
    verdicts = []
    for path in files:
        try:
            verdict = _compare(path)(path)
        except LogError as bad:
            typer.echo(f"Error: {bad}", err=True)
            continue
        verdicts.append(verdict)
        typer.echo(_line(verdict))
        if verdict.difference is not None:
            _show(verdict.difference)
    identical = sum(verdict.difference is None for verdict in verdicts)
    totals = Counter({"operations": 0})
    for verdict in verdicts:
        totals[verdict.unit] += verdict.operations
    counted = ", ".join(f"{count} {unit}" for unit, count in totals.items() if count) or "0 operations"
    unread = len(files) - len(verdicts)
    left_out = f", {unread} can't be replayed" if unread else ""
    typer.echo(f"{identical} of {len(files)} logs identical{left_out}, {counted}")
    if identical < len(verdicts):
        raise typer.Exit(1)
    if unread:
        raise typer.Exit(2)


def _compare(path: Path) -> Callable[[Path], LogVerdict]:
    """Return the comparison for the kind of log that ``path`` is."""
    comparisons: dict[object, Callable[[Path], LogVerdict]] = {
        None: compare_blocks,
        sglang.FORMAT: sglang.conform,
        trtllm.FORMAT: trtllm.conform,
    }
    return comparisons.get(scheduler.log_format(path), scheduler.conform)


def _line(verdict: LogVerdict) -> str:
    if verdict.difference is None:
        return f"{verdict.name}: {verdict.operations} {verdict.unit}, identical"
    return f"{verdict.name}: differs at {verdict.unit[:-1]} {verdict.operations}, in {verdict.difference.field}"


def _show(difference: LogDifference) -> None:
    typer.echo(f"  operation  {_short(difference.op)}")
    typer.echo(f"  recorded   {difference.field} = {_short(difference.recorded)}")
    typer.echo(f"  ours       {difference.field} = {_short(difference.ours)}")
    for op in difference.before:
        typer.echo(f"  before     {_short(op)}")


def _short(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
