"""What a league recommends, over one load and over several."""

from __future__ import annotations

from pathlib import Path

from kvyard.lab.league.advice import advice
from kvyard.lab.league.league import FIGURES, League, LeaguePlace
from kvyard.lab.sweep.grid import make_grid
from kvyard.lab.sweep.run import Sweep


def place(policy: str, ttft: float, itl: float) -> LeaguePlace:
    figures: dict[str, float | None] = {figure.name: None for figure in FIGURES}
    return LeaguePlace(policy, figures | {"ttft_mean_ms": ttft, "itl_p99_ms": itl}, 0.0, False)


def told(*overloaded: str, **cells: dict[str, tuple[float, float]]) -> list[str]:
    tables = {
        cell: sorted(
            (place(policy, *figures) for policy, figures in table.items()),
            key=lambda one: one.figures["ttft_mean_ms"] or 0,
        )
        for cell, table in cells.items()
    }
    sweep = Sweep(make_grid({}, {"router": ["kv"]}), "trace", Path("x"))
    return advice(League(sweep, tables, frozenset(overloaded)))


def test_one_load() -> None:
    assert told(a={"kv": (276.0, 11.5), "mine": (237.0, 12.2), "rr": (321.0, 13.4)}) == [
        "Route by mine: its first token comes soonest, after 237.0 ms on average; the next is kv with 276.0 ms.",
        "What it costs: an ITL p99 of 12.20 ms, where kv has 11.50 ms and a first token after 276.0 ms.",
    ]
    assert told(a={"kv": (276.0, 11.5), "rr": (321.0, 13.4)})[1] == (
        "It costs nothing: its ITL p99, 11.50 ms, is the lowest too."
    )
    assert told(a={"kv": (276.0, 11.5)})[0] == "Only kv has played: its first token comes after 276.0 ms on average."


def test_several_loads_and_one_whose_queues_decide() -> None:
    one = {"kv": (276.0, 11.5), "mine": (237.0, 12.2)}
    two = {"kv": (300.0, 20.0), "mine": (306.0, 18.0)}
    assert told(a=one, b=two)[0] == (
        "Route by mine: over 2 loads its first token is 1.0% behind the soonest on average, and 2.0% at worst (b)."
    )
    assert told(a=one, b=one)[0] == "Route by mine: its first token comes soonest at all 2 loads."
    jammed = {"kv": (100.0, 11.5), "mine": (9000.0, 12.2)}
    assert told("b", a=one, b=jammed)[0].startswith("Route by mine: its first token comes soonest")
    assert "Overloaded loads are left out" in told("b", a=one, b=jammed)[-1]
    assert told() == []
