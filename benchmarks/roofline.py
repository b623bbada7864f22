"""The roofline, which has nothing measured in it, against passes that were measured on an H200.

Passes of a Llama-3-8B-shaped model in PyTorch, without a host's part: prompts launched kernel by kernel and decode steps as
CUDA graphs (``h200.jsonl``), and every pass as a graph, mixed ones too (``h200-graphs.jsonl``); both are in
``tests/engine/timing/data``. With the card's shares of its peak, and with the generic set for cards that nobody measured.

    python benchmarks/roofline.py            # prints the table
    python benchmarks/roofline.py --write    # and puts it into benchmarks/RESULTS-accuracy.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvyard.engine.cards import GENERIC, Shares, find_card
from kvyard.engine.models.fields import preset
from kvyard.engine.models.split import Parallelism
from kvyard.engine.timing.operators import make_operators
from kvyard.engine.timing.roofline import RooflineModel

HERE = Path(__file__).resolve().parent.parent
DATA = HERE / "tests" / "engine" / "timing" / "data"
PAGE = HERE / "benchmarks" / "RESULTS-accuracy.md"
BEGIN, END = "<!-- benchmarks/roofline.py: begin -->", "<!-- end of the roofline -->"
FILES = {"prompts eager, steps as graphs": "h200.jsonl", "all as CUDA graphs": "h200-graphs.jsonl"}
KINDS = ("prompts", "prompts after cached tokens", "decode", "mixed")


def kind_of(row: dict[str, Any]) -> str:
    """Which line of the table a row belongs to."""
    if row["kind"] != "prefill":
        return str(row["kind"])
    return "prompts after cached tokens" if row["past"] else "prompts"


def predicted_ms(row: dict[str, Any], model: RooflineModel) -> float:
    """What the model says of a measured row."""
    batch, context = row.get("batch", 0), row.get("ctx", 0)
    if row["kind"] == "prefill":
        prompts, batch = [(row["new"], row["past"])], 0
    else:
        prompts = [(new, past) for new, past in row.get("prefills", ())]
    return model.pass_ns(prompts, batch, batch * context, context) / 1e6


def errors(name: str, kind: str, shares: Shares | None) -> list[float]:
    """Errors of the passes of one kind in a file, with sign: 0.1 is 10 % too long."""
    model = RooflineModel(make_operators(preset("llama-3.1-8b"), Parallelism()), find_card("h200"), shares)
    rows = map(json.loads, (DATA / name).read_text().splitlines())
    return [predicted_ms(row, model) / row["ms"] - 1 for row in rows if kind_of(row) == kind]


def figures(found: list[float]) -> str:
    """Mean and median without sign, the middle with sign, and the largest."""
    plain = [abs(error) for error in found]
    return f"{fmean(plain):.1%} / {median(plain):.1%} / {median(found):+.1%} / {max(plain):.0%}"


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| passes on an H200 | points | the card's shares: mean / median / bias / largest | generic shares |",
        "|---|---|---|---|",
    ]
    for title, name in FILES.items():
        for kind in KINDS:
            found = errors(name, kind, None)
            if found:
                generic = figures(errors(name, kind, GENERIC))
                lines.append(f"| {title}: {kind} | {len(found)} | {figures(found)} | {generic} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; write it where that is asked for."""
    made = table()
    print(made)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
