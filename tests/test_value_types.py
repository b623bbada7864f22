"""Rules that hold for types in all packages, read from their source: importing all of it would take seconds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvyard.engine.timing.operators import Operators
from kvyard.index import Holder
from kvyard.index.scorer import WorkerMatch
from kvyard.server.dashboard.view import DecisionView
from kvyard.server.mock.incoming import TransferWish

SOURCE = Path(__file__).parents[1] / "src" / "kvyard"
COUNTING = re.compile(r"^class \w*(?:Counters|Tally|Totals\w*|TotalsView)\b", re.MULTILINE)


def test_what_is_counted_begins_at_nothing() -> None:
    checked = 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not COUNTING.search(text):
            continue
        for made in ast.parse(text).body:
            if isinstance(made, ast.ClassDef) and COUNTING.match(f"class {made.name}"):
                for field in made.body:
                    if isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation) == "int" and field.value:
                        assert ast.unparse(field.value) == "0", f"{path}:{field.lineno}"
                        checked += 1
    assert checked > 50


def test_a_worker_of_which_nothing_is_known_earns_nothing() -> None:
    nothing = WorkerMatch(worker=Holder("a"))
    assert (nothing.blocks, nothing.tokens, nothing.score, nothing.tiers) == (0, 0, 0.0, {})


@pytest.mark.parametrize("kind", [Operators, DecisionView, TransferWish])
def test_what_is_handed_on_stays_as_it_is(kind: type) -> None:
    assert kind.__struct_config__.frozen and kind.__struct_fields__  # type: ignore[attr-defined]


def test_fields_of_a_decision_are_given_by_name() -> None:
    """There are many, and most are numbers."""
    named = DecisionView(number=1, at=0.0, id="a", worker="w")
    assert (named.number, named.id, named.worker) == (1, "a", "w")
    with pytest.raises(TypeError):
        DecisionView(1, 0.0, "a", "w")  # type: ignore[misc]
