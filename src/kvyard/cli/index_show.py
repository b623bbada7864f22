"""Answers of the index as a table and as lines. Knows the shape of answers and nothing of where they come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

TIERS = ("gpu", "cpu", "disk", "remote")


def table(scoring: dict[str, Any]) -> None:
    """Print who has how much, one row per rank, the best first."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for result in scoring["results"]:
        title = f"{result['tokens']} tokens, {result['blocks']} full blocks of {scoring['block_size']}"
        tiers = [name for name in TIERS if name != "remote" or any(name in one["tiers"] for one in result["workers"])]
        rows = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("worker", "tokens", *tiers, "score", "limited by", "state", "confidence", "age"):
            rows.add_column(name, justify="left" if name in ("worker", "limited by", "state") else "right")
        for one in result["workers"]:
            rows.add_row(*_cells(one, tiers))
        console.print(rows)
        for one in result["workers"]:
            if one["reason"]:
                console.print(f"{_name(one)}: {one['reason']}")
        if not result["workers"]:
            console.print("no worker is known")


def explanation_lines(explanations: dict[str, Any] | None) -> Iterator[str]:
    """Why each worker matches no more."""
    if explanations is None:
        return
    for one in explanations["explanations"]:
        yield ""
        yield one["summary"]
        for group in one["groups"]:
            number = "the only group" if group["group"] is None else f"group {group['group']}"
            yield f"  {number} ({group['kind']}) reaches {group['tokens']} tokens: {group['why']}"


def _cells(one: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    found = one["tiers"]
    limited = "" if one["limited_by"] is None else f"group {one['limited_by']}"
    return [
        _name(one),
        str(one["tokens"]),
        *(str(found[name]["tokens"]) if name in found else "0" for name in tiers),
        f"{one['score']:.2f}",
        limited,
        one["state"],
        f"{one['confidence']:.0%}",
        _age(one["age_ms"]),
    ]


def _name(one: dict[str, Any]) -> str:
    return f"{one['instance_id']}@{one['dp_rank']}"


def _age(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms / 60_000:.0f} min"
