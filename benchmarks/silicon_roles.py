"""Prefill and decode apart against measured silicon: the disaggregated runs of ``aiconfigurator-core`` that say all workers.

Of its 5,221 measured runs 1,602 are disaggregated, and 274 of those say how many workers of each role there were and how each
was split. Those with a concurrency are replayed as closed loops on such workers, with the assumptions of ``silicon.py``: its
host times, its burst, its spread of lengths. Where there are operator tables for both roles those give the times, elsewhere the
roofline does. Shown are Kendall's tau within each group, which says whether set-ups are ranked as measured, and errors.

    python benchmarks/silicon_roles.py [--results FILE] [--most 600]     # rows by what they cost, up to 600 requests under way

It needs ``pip install 'kvyard[aic]'``.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import NamedTuple

from silicon import CARDS, ROUNDS, Row, loop_means, settings_of, short_reason, split_size

from kvyard.engine.timing.aic import aic_version
from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

REPLAYED = 3
"""Rounds that are replayed; the others are taken to be like those after the burst."""


class MeasuredFleet(NamedTuple):
    """A measured run: what a worker of each role is, and how many there were."""

    prefill: Row
    decode: Row
    prefills: int
    decodes: int

    @property
    def group(self) -> str:
        return f"{self.prefill.model}, {self.prefill.card}, {self.prefill.backend}"


class Found(NamedTuple):
    """What became of one: milliseconds, or why not."""

    id: str
    timing: str = ""
    ttft: float = 0.0
    tpot: float = 0.0
    why: str = ""


def read_fleets() -> tuple[list[MeasuredFleet], Counter[str]]:
    """The runs that say all workers and their concurrency, and how many others there are, by reason."""
    found, others = [], Counter[str]()
    path = files("aiconfigurator_core").joinpath("systems", "silicon_sample.csv")
    for line in csv.DictReader(path.read_text().splitlines()):
        said = re.search(r"silicon_concurrency=(\d+)", line["silicon_data_source"])
        if line["mode"] != "disagg" or not line["prefill_num_workers"]:
            continue
        if said is None:
            others["no concurrency is said"] += 1
        elif line["system"] not in CARDS:
            others[f"a card that kvyard doesn't know ({line['system']})"] += 1
        else:
            found.append(
                MeasuredFleet(
                    prefill=_role(line, "prefill", int(said[1])),
                    decode=_role(line, "decode", int(said[1])),
                    prefills=int(line["prefill_num_workers"]),
                    decodes=int(line["decode_num_workers"]),
                )
            )
    return found, others


def _role(line: dict[str, str], role: str, concurrency: int) -> Row:
    return Row(
        id=line["id"],
        backend=line["backend"],
        version=line["backend_version"],
        model=QUANTISED_AS.get((line["model_path"], line["precision"]), line["model_path"]),
        card=CARDS[line["system"]],
        precision=line["precision"],
        isl=int(line["isl"]),
        osl=int(line["osl"]),
        concurrency=concurrency,
        tensor=split_size(line[f"{role}_tp_size"]),
        pipeline=split_size(line[f"{role}_pp_size"]),
        data=split_size(line[f"{role}_attention_dp_size"]),
        experts=split_size(line[f"{role}_moe_ep_size"]),
        ttft_ms=float(line["silicon_ttft_ms"]),
        tpot_ms=float(line["silicon_tpot_ms"]),
    )


QUANTISED_AS = {("deepseek-ai/DeepSeek-V3", "fp4"): "nvidia/DeepSeek-R1-NVFP4"}
"""Checkpoints that runs in four bits had instead of the one they name."""
OUTSIDE_MS = 125
"""What a first token takes outside of the engines: a front end, two requests, the set-up of a transfer. The median of what six
rows on a B200 with prompts of 1,024 tokens had more than the replay; none of them is of a group that is shown by itself."""
PROMPTS = 1
"""How many prompts a prefill worker's rank computes at a time: every row says one."""


def loop(fleet: MeasuredFleet, kind: str) -> tuple[float, ...]:
    """The row's loop through workers with roles: TTFT and TPOT in milliseconds."""
    row = fleet.prefill
    requests = [TraceRequest(str(at), 0, row.isl, row.osl) for at in range(REPLAYED * row.concurrency)]
    prefill, decode = settings_of(fleet.prefill, kind), settings_of(fleet.decode, kind)
    config = {
        "workers": [
            prefill | {"role": "prefill", "count": fleet.prefills, "max_num_seqs": PROMPTS},
            decode | {"role": "decode", "count": fleet.decodes},
        ],
        "router": "least-loaded",
        "second_front_end": False,  # Dynamo tokenizes a prompt once
        "protocol": "destination-first" if row.backend == "sglang" else "source-first",
        "concurrency": row.concurrency,
    }
    records = [one for one in replay(requests, config=config).records if one.status == "finished" and one.output > 1]
    burst, rest = records[: row.concurrency], records[row.concurrency :]
    if not rest:
        raise KvyardError("no request fits")
    early, late = loop_means(burst), loop_means(rest)
    return tuple(first / ROUNDS + (1 - 1 / ROUNDS) * later for first, later in zip(early, late, strict=True))


_NO_TABLES: set[str] = set()
"""Groups that were found to have none: looking takes seconds."""


def work(fleet: MeasuredFleet) -> Found:
    """By the tables where there are any, else by the roofline."""
    logging.disable(logging.WARNING)
    why = ""
    for kind in ("tables", "roofline"):
        if kind == "tables" and fleet.group in _NO_TABLES:
            continue
        try:
            return Found(fleet.prefill.id, kind, *loop(fleet, kind))
        except KvyardError as problem:
            why = short_reason(str(problem))
            if why == "no tables":
                _NO_TABLES.add(fleet.group)
    return Found(fleet.prefill.id, why=why)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of (found, measured)."""
    both = found = measured = 0
    for at, (mine, theirs) in enumerate(pairs):
        for other, its in pairs[:at]:
            a, b = (mine > other) - (mine < other), (theirs > its) - (theirs < its)
            both += a * b
            found += a * a
            measured += b * b
    return both / (found * measured) ** 0.5 if found and measured else 0.0


def line(name: str, rows: Sequence[tuple[MeasuredFleet, Found]], asked: int) -> str:
    """A line of the table."""
    tpot = [(one.tpot, fleet.prefill.tpot_ms) for fleet, one in rows]
    ttft = [(one.ttft + OUTSIDE_MS, fleet.prefill.ttft_ms) for fleet, one in rows]
    by = Counter(one.timing for _, one in rows)
    cells = [name, str(asked), str(len(rows)), ", ".join(f"{timing} {count}" for timing, count in by.items())]
    for pairs in (tpot, ttft):
        cells += [f"{kendall(pairs):+.2f}", f"{_error(pairs):.0%}", f"{_bias(pairs):+.0%}"] if rows else [""] * 3
    return "| " + " | ".join(cells) + " |"


def _error(pairs: Iterable[tuple[float, float]]) -> float:
    return median(abs(mine / theirs - 1) for mine, theirs in pairs)


def _bias(pairs: Iterable[tuple[float, float]]) -> float:
    return median(mine / theirs - 1 for mine, theirs in pairs)


def table(fleets: Sequence[MeasuredFleet], results: dict[str, Found], others: Counter[str]) -> str:
    """Groups of 20 rows or more, then the rest by backend, then all."""
    groups: dict[str, list[MeasuredFleet]] = defaultdict(list)
    for fleet in fleets:
        groups[fleet.group].append(fleet)
    lines = [
        "| rows | asked | replayed | times from | TPOT tau | error | bias | TTFT tau | error | bias |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in sorted(groups.items(), key=lambda one: -len(one[1])):
        if len(own) >= 20:
            lines.append(line(name, _done(own, results), len(own)))
    small = [fleet for own in groups.values() if len(own) < 20 for fleet in own]
    lines.append(line("groups of fewer rows, together", _done(small, results), len(small)))
    lines.append(line("all", _done(fleets, results), len(fleets)))
    why = Counter(one.why for one in results.values() if one.why)
    why["too many requests under way for the time there was"] += sum(one.prefill.id not in results for one in fleets)
    left = "; ".join(f"{reason} ({count})" for reason, count in (others + why).most_common())
    return "\n".join([*lines, "", f"Not replayed: {left}."])


def _done(fleets: Iterable[MeasuredFleet], results: dict[str, Found]) -> list[tuple[MeasuredFleet, Found]]:
    pairs = [(fleet, results[fleet.prefill.id]) for fleet in fleets if fleet.prefill.id in results]
    return [(fleet, one) for fleet, one in pairs if not one.why]


def main() -> int:
    """Run rows, those with the fewest requests first, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="a file to keep results in, line by line, and to go on from")
    parser.add_argument("--most", type=int, default=600, help="leave out rows with more requests under way")
    parser.add_argument("--show", action="store_true", help="print every row too")
    asked = parser.parse_args()
    if aic_version() is None:
        print("measured silicon needs aiconfigurator-core: pip install 'kvyard[aic]'")
        return 0
    fleets, others = read_fleets()
    results: dict[str, Found] = {}
    if asked.results is not None and asked.results.is_file():
        results = {one[0]: Found(*one) for one in map(json.loads, asked.results.read_text().splitlines())}
    for fleet in sorted(fleets, key=lambda one: one.prefill.concurrency * (1 + one.decode.data / 8)):
        if fleet.prefill.id in results or fleet.prefill.concurrency > asked.most:
            continue
        found = results[fleet.prefill.id] = work(fleet)
        if asked.show:
            print(fleet, found, flush=True)
        if asked.results is not None:
            with asked.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print(table(fleets, results, others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
