"""Replay other people's published fleet measurements, and compare: ours, theirs, the error, and the order of arms.

    python benchmarks/published.py                        # every source, and the tables
    python benchmarks/published.py --only llmd-qwen3-32b  # sources whose name has this in it
    python benchmarks/published.py --missing --jobs 2     # what has no rows yet
    python benchmarks/published.py --table                # the tables of the last results alone
    python benchmarks/published.py --silicon --every 40   # closed loops of aiconfigurator-core's silicon rows, apart

The data is read from ``../shared/published`` (``--data``) and isn't part of the repository. One TOML file a source in
``benchmarks/data/published`` states fleet, engine, flags, client, workload and what had to be assumed. A run is one arm of a
table, from empty caches through all its loads; a cell is one run's load.

Results are JSON lines in ``benchmarks/data/published/results.jsonl``, one a cell:

    source   name of the manifest
    cell     arm and load, unique in the source
    arm, load
    half     fit or test: constants may be fitted on cells of ``fit`` alone
    engine, version, card, dtype
    class    of the model: dense, mixture, mla or state
    knee     below or above: above if in *our* replay requests wait a third of their TTFT or more before they are admitted
    waiting  that share
    reuse    our prompt tokens found in caches, and all of them; an arm's ``reuse_pct`` is compared over its cells
    metrics  by name [theirs, ours, resolution of the printed figure]; names end in the unit (_s, _ms, _pct, tok_s, req_s)
    skipped  why it can't be asked; such a row has no knee and no metrics

Figures that the source prints as 0.0 are dropped. An error within the print resolution counts as none. The error of a cell in
one family (throughput, TTFT, TPOT, E2E) is that of its most central figure: the mean, else p50, p90, ...
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import published_errors
from _published_workloads import (
    PAUSE_S,
    RATES,
    aibrix,
    aibrix_rows,
    alone,
    conversations,
    pause,
    random_prompts,
    shared_prefix,
)

from kvyard.errors import KvyardError
from kvyard.replay.fleet import Fleet
from kvyard.replay.record import Record
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest

HERE = Path(__file__).resolve().parent
MANIFESTS = HERE / "data" / "published"
RESULTS = MANIFESTS / "results.jsonl"
DATA = HERE.parents[1] / "shared" / "published"
FAMILIES = {
    "throughput": ("output_tok_s", "throughput_tok_s", "req_s", "turns_s"),
    "ttft": ("ttft_", "prefill_ms"),
    "tpot": ("tpot_", "itl_", "ntpot_"),
    "e2e": ("e2e_",),
}
CENTRAL = ("mean", "p50", "p90", "p95", "p99")
KNEE = 1 / 3
UNASKED = {
    "llmd agentic-serving, nemotron-3-super": (8, "the card isn't named, and the OTel traces aren't available"),
    "llmd hyperconverged-cephfs, qwen3.6-35b-a3b": (78, "the Weka traces with sub-agents aren't available"),
    "llmd pd-disaggregation, glm-5.2": (2, "the Weka traces aren't available"),
    "llmd p2p, glm-5.2": (34, "the Weka traces aren't available; no preset has GLM-5.2's sparse attention"),
    "llmd p2p, hot sets": (20, "the printed times contradict the stated length of answers, and stages aren't stated"),
    "llmd optimized-baseline, qwen3.5-4b": (17, "no preset has Qwen3.5-4B's shape"),
    "llmd summaries of ladders": (15, "they repeat cells of the rates, pauses included"),
    "llmd docqa token-aware, by seed and means": (12, "they repeat the cells of seed 37 with other seeds"),
}
"""Tables that can't be asked: how many cells, and why."""
LOADS = (128, 64, 32)
"""Concurrencies of dstack's runs in the order they were run, minutes apart, with the same prompts: vllm bench's seed is 0."""
OWN_KEYS = ("half", "descending", "counted_output", "prefill", "reuse_pct")
"""Keys of an arm that aren't settings of a replay."""


class Cell(NamedTuple):
    """One published measurement."""

    arm: str
    load: str
    theirs: dict[str, float]


class Run(NamedTuple):
    """One arm: cells by the number that ids of their requests begin with, the replay's settings and its requests."""

    source: str
    arm: str
    cells: dict[int, Cell]
    settings: dict[str, Any]
    requests: list[TraceRequest]
    before: Sequence[TraceRequest] = ()
    """Sent first, to their end, and not counted."""


# -- theirs -----------------------------------------------------------------------------------------------------------


def manifests(only: str = "") -> dict[str, dict[str, Any]]:
    """Manifests by name."""
    return {
        path.stem: tomllib.loads(path.read_text()) for path in sorted(MANIFESTS.glob("*.toml")) if only in path.stem
    }


def runs_of(name: str, manifest: Mapping[str, Any], data: Path) -> Iterable[Run]:
    """The runs of a source."""
    return READERS[manifest["reader"]](name, manifest, data / manifest["file"])


def arm_settings(manifest: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Settings of one arm's replay."""
    own = manifest.get("arms", {}).get(arm, {})
    settings = dict(manifest["settings"])
    if manifest["engine"] == "vllm" and manifest["version"][0].isdecimal():
        settings["vllm_version"] = manifest["version"]
    if "workers" in manifest:
        settings["workers"] = [
            dict(kind, **(own.get("prefill", {}) if kind["role"] == "prefill" else {})) for kind in manifest["workers"]
        ]
    return settings | {key: value for key, value in own.items() if key not in OWN_KEYS}


def read_aibrix(name: str, manifest: Mapping[str, Any], path: Path) -> Iterable[Run]:
    for arm, own in manifest["arms"].items():
        rates = aibrix_rows(path, arm)
        cells = {number: Cell(arm, f"{rate}/s", aibrix_figures(rates[rate])) for number, rate in enumerate(RATES)}
        requests = list(aibrix(rates, own.get("descending", False)))
        yield Run(name, arm, cells, arm_settings(manifest, arm), requests)


def aibrix_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of one file of requests."""
    ttft = sorted(row["ttft"] for row in rows)
    gaps = [
        1e3 * row["generation_time"] / (row["generation_tokens"] - 1) for row in rows if row["generation_tokens"] > 1
    ]
    span = max(row["finish_time"] for row in rows) - min(row["launch_time"] for row in rows)
    return {
        "output_tok_s": sum(row["generation_tokens"] for row in rows) / span,
        "ttft_mean_s": fmean(ttft),
        "ttft_p50_s": median(ttft),
        "ttft_p90_s": percentile(ttft, 0.9),
        "tpot_mean_ms": fmean(gaps),
        "tpot_p50_ms": median(gaps),
    }


def read_dstack(name: str, manifest: Mapping[str, Any], path: Path) -> Iterable[Run]:
    for row in csv.DictReader(path.open()):
        arm = f"{row['prefill']}P{row['decode']}D"
        isl, osl, concurrency = int(row["isl"]), int(row["osl"]), int(row["conc"])
        completed, made = int(row["completed"]), int(row["total_output_tokens"])
        theirs = {
            "output_tok_s": float(row["output_throughput"]),
            "ttft_mean_ms": float(row["mean_ttft_ms"]),
            "ttft_p50_ms": float(row["median_ttft_ms"]),
            "ttft_p99_ms": float(row["p99_ttft_ms"]),
            "tpot_mean_ms": float(row["mean_tpot_ms"]),
            "tpot_p50_ms": float(row["median_tpot_ms"]),
            "itl_mean_ms": float(row["mean_itl_ms"]),
        }
        load = f"{isl}/{osl} x{concurrency}"
        broken = completed < 500
        prefill, decode = int(row["prefill"]), int(row["decode"])
        ranks = manifest["gpus"] // (prefill + decode)
        settings = dict(
            manifest["settings"], prefill=prefill, decode=decode, tensor_parallel_size=ranks, concurrency=concurrency
        )
        earlier = LOADS.index(concurrency)
        before, requests = ([], []) if broken else random_prompts(isl, made / completed, osl, completed, earlier)
        yield Run(name, arm, {0: Cell(arm, load, theirs)}, settings, requests, before)


def read_llmd(name: str, manifest: Mapping[str, Any], path: Path) -> Iterable[Run]:
    table: dict[str, list[Cell]] = defaultdict(list)
    left_out = tuple(manifest.get("unasked", ()))
    for row in csv.DictReader(path.open()):
        theirs = {}
        for column, value in row.items():
            if family(column) and value and not column.startswith(left_out) and (figure := float(value.lstrip("~"))):
                theirs[column] = figure
        load = "x" + row["concurrency"] if row["concurrency"] else f"{row['rate']}/s" if row["rate"] else ""
        load += f"{row.get('prefix_tokens') or ''}" + (f" run {row['run']}" if row.get("run") else "")
        table[row["arm"]].append(Cell(row["arm"], load, theirs))
    workload = manifest["workload"]
    for arm in manifest["arms"]:
        settings = arm_settings(manifest, arm)
        if workload["kind"] == "shared-prefix":
            rates = {f"{stage.partition('/')[0]}/s": at for at, stage in enumerate(workload["stages"].split())}
            cells = {rates[cell.load]: cell for cell in table[arm]}
            yield Run(name, arm, cells, settings, shared_prefix(workload))
        elif workload["kind"] == "alone":
            lengths = [int(cell.load) for cell in table[arm]]
            yield Run(name, arm, dict(enumerate(table[arm])), settings, alone(lengths))
        else:
            settings["concurrency"] = workload["concurrency"]
            settings["turnaround"] = f"{PAUSE_S:g}s"
            for cell in table[arm]:
                yield Run(name, arm, {0: cell}, settings, conversations(workload))


READERS = {"aibrix": read_aibrix, "dstack": read_dstack, "llmd": read_llmd}


# -- ours -------------------------------------------------------------------------------------------------------------


def percentile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def figure(
    column: str, records: Sequence[Record], counted: float, total: bool, paused: Callable[[str], int] = lambda name: 0
) -> float:
    """Our figure of a column. ``counted``: output tokens that the client counts for one of ours; ``total``: its throughput
    counts prompts, too; ``paused``: nanoseconds that it adds to the end-to-end time of a request.
    """
    if family(column) == "throughput":
        span = (max(record.ended for record in records) - min(record.arrival for record in records)) / 1e9
        if column in ("req_s", "turns_s"):
            return len(records) / span
        prompts = sum(record.input for record in records) if total else 0
        return (prompts + counted * sum(record.output for record in records)) / span
    name, statistic, unit = (column if column != "prefill_ms" else "ttft_mean_ms").rsplit("_", 2)
    asked = [record for record in records if name in ("ttft", "e2e", "ntpot") or record.output > 1]
    values = sorted(VALUES[name](record) + (paused(record.id) if name == "e2e" else 0) for record in asked)
    made = fmean(values) if statistic == "mean" else percentile(values, int(statistic[1:]) / 100)
    if name == "itl" and statistic == "mean":  # over tokens, not over requests
        longer = [record for record in records if record.output > 1]
        made = sum(record.ended - record.first_token for record in longer) / sum(record.output - 1 for record in longer)
    return made / (1e9 if unit == "s" else 1e6)


VALUES = {
    "ttft": lambda record: record.ttft,
    "e2e": lambda record: record.ended - record.arrival,
    "tpot": lambda record: (record.ended - record.first_token) / (record.output - 1),
    "itl": lambda record: (record.ended - record.first_token) / (record.output - 1),
    "ntpot": lambda record: (record.ended - record.arrival) / record.output,
}


def family(column: str) -> str:
    """The family of a figure; empty for columns that aren't compared."""
    return next((name for name, heads in FAMILIES.items() if column.startswith(heads)), "")


def replayed(run: Run, extra: Mapping[str, Any]) -> list[Record]:
    """The records of a run's requests."""
    settings = dict(run.settings) | dict(extra)
    if not run.before:
        return replay(run.requests, config=settings).records
    fleet = Fleet(make_config(settings))
    fleet.run(run.requests, None, run.before)
    return list(fleet.records.values())


def work(name: str, at: int, data: Path, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Replay one run of a source; its rows. Runs in a process of its own."""
    manifest = manifests(name)[name]
    run = list(runs_of(name, manifest, data))[at]
    own = manifest.get("arms", {}).get(run.arm, {})
    head = {
        "half": own.get("half", manifest.get("half", "test")),
        **{key: manifest[key] for key in ("engine", "version", "card", "dtype", "class")},
    }

    def row(cell: Cell, **rest: Any) -> dict[str, Any]:
        cell_name = f"{cell.arm} {cell.load}".strip()
        return {"source": name, "cell": cell_name, "arm": cell.arm, "load": cell.load, **head, **rest}

    if not run.requests:
        return [row(cell, skipped="the run is broken by the source's own figures") for cell in run.cells.values()]
    try:
        records = replayed(run, extra)
    except KvyardError as problem:
        return [row(cell, skipped=str(problem)[:200]) for cell in run.cells.values()]
    parts: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        key = record.id.partition(":")[0]
        if key.isdecimal() and record.status == "finished":
            parts[int(key)].append(record)
    workload = manifest.get("workload")
    workload = workload if isinstance(workload, dict) else {}
    counted = own.get("counted_output", workload.get("answer", 1)) / workload.get("answer", 1)
    resolution = manifest.get("resolution", {})
    paused = pause if workload.get("kind") == "conversations" else lambda name: 0
    rendering = run.settings.get("render_token_us", 0.0) * 1e3
    rows = []
    for number, cell in run.cells.items():
        records = parts[number]
        if not records:
            rows.append(row(cell, skipped="no request was answered"))
            continue
        total = workload.get("throughput") == "total"
        metrics = {
            column: [theirs, round(figure(column, records, counted, total, paused), 5), resolution.get(column, 0)]
            for column, theirs in cell.theirs.items()
        }
        waits = sum(
            max(0, record.admitted - record.arrival - record.loading - round(rendering * record.input))
            for record in records
        )
        share = waits / max(1, sum(record.ttft for record in records))
        knee = "above" if share >= KNEE else "below"
        found = sum(record.cached + sum(record.loaded) for record in records)
        reuse = [found, sum(record.input for record in records)]
        rows.append(row(cell, knee=knee, waiting=round(share, 3), reuse=reuse, metrics=metrics))
    return rows


# -- results ----------------------------------------------------------------------------------------------------------


def load_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not path.is_file():
        return {}
    return {(row["source"], row["cell"]): row for row in map(json.loads, path.read_text().splitlines())}


def save_rows(path: Path, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(rows[key], separators=(",", ":")) + "\n" for key in sorted(rows)))


def error(theirs: float, ours: float, resolution: float) -> float:
    """Signed error as a share; none within the print resolution."""
    return 0.0 if abs(ours - theirs) <= resolution / 2 else ours / theirs - 1


def central(row: Mapping[str, Any], kind: str) -> str | None:
    """The figure that stands for a family in a cell."""
    found = [column for column in row.get("metrics", {}) if family(column) == kind]
    return min(found, key=_rank) if found else None


def _rank(column: str) -> int:
    return next((rank for rank, name in enumerate(CENTRAL) if f"_{name}_" in column), 0)


def errors(rows: Iterable[Mapping[str, Any]], kind: str) -> list[float]:
    found = []
    for row in rows:
        column = central(row, kind)
        if column is not None:
            found.append(error(*row["metrics"][column]))
    return found


def off(found: Sequence[float]) -> str:
    """The median error without sign, and with it."""
    return f"{median(map(abs, found)):.1%} ({median(found):+.0%})" if found else ""


def tau(rows: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Pairs of arms in the right and in the wrong order, over loads and families, where theirs differ by more than 10 %."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["source"], row["load"]].append(row)
    right = wrong = 0
    for same_load in groups.values():
        for one, other in combinations(same_load, 2):
            for kind in FAMILIES:
                column = central(one, kind)
                if column is None or column != central(other, kind):
                    continue
                (theirs, ours, _), (theirs_other, ours_other, _) = one["metrics"][column], other["metrics"][column]
                if abs(theirs - theirs_other) <= 0.1 * min(theirs, theirs_other):
                    continue
                if (theirs > theirs_other) == (ours > ours_other) and ours != ours_other:
                    right += 1
                else:
                    wrong += 1
    return right, wrong


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """The result in Markdown: medians by source, the median of those, classes, order, and what wasn't asked."""
    lines = [
        "| source | half | cells | " + " | ".join(FAMILIES) + " | tau |",
        "|---|---|---|" + "---|" * (len(FAMILIES) + 1),
    ]
    asked = [row for row in rows if "metrics" in row]
    by_source: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in asked:
        by_source[row["source"], row["half"]].append(row)
    medians: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (source, half), found in sorted(by_source.items()):
        cells = []
        for kind in FAMILIES:
            mine = errors(found, kind)
            cells.append(off(mine))
            if mine:
                medians[half, kind].append(median(map(abs, mine)))
        lines.append(f"| {source} | {half} | {len(found)} | " + " | ".join([*cells, order(found)]) + " |")
    for half in ("fit", "test"):
        found = [row for row in asked if row["half"] == half]
        cells = [f"**{median(medians[half, kind]):.1%}**" if medians[half, kind] else "" for kind in FAMILIES]
        lines.append(f"| **median of medians** | {half} | {len(found)} | " + " | ".join([*cells, order(found)]) + " |")
    lines.append(f"| **all arms** | | {len(asked)} |" + " |" * len(FAMILIES) + f" {order(asked)} |")
    lines += ["", "| test cells | cells | " + " | ".join(FAMILIES) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    test = [row for row in asked if row["half"] == "test"]
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in test:
        groups[f"class {row['class']}"].append(row)
        groups[f"engine {row['engine']}"].append(row)
        groups[f"{row['knee']} the knee"].append(row)
    for name, found in sorted(groups.items()):
        lines.append(f"| {name} | {len(found)} | " + " | ".join(off(errors(found, kind)) for kind in FAMILIES) + " |")
    lines += ["", *reuse_lines(asked)]
    reasons: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if "skipped" in row:
            reasons[row["source"], row["skipped"]] += 1
    for name, manifest in manifests().items():
        if "unasked" in manifest:
            reasons[name, f"{', '.join(manifest['unasked'])}: {manifest['unasked_reason']}"] = 0
    for name, (count, why) in UNASKED.items():
        reasons[name, why] = count
    lines += [
        "",
        "Not asked:",
        *(f"- {source}, {count or 'all'} cells: {why}" for (source, why), count in sorted(reasons.items())),
    ]
    return "\n".join(lines)


def reuse_lines(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Ours and theirs where a source counts hits."""
    for name, manifest in manifests().items():
        for arm, own in manifest.get("arms", {}).items():
            cells = [row["reuse"] for row in rows if (row["source"], row["arm"]) == (name, arm) and "reuse" in row]
            if "reuse_pct" in own and cells:
                ours = 100 * sum(found for found, _ in cells) / sum(tokens for _, tokens in cells)
                yield f"Reuse, {name}, {arm}: {ours:.1f} % of prompt tokens for {own['reuse_pct']} %."


def order(rows: Iterable[Mapping[str, Any]]) -> str:
    right, wrong = tau(rows)
    return f"{(right - wrong) / (right + wrong):.2f} of {right + wrong}" if right + wrong else ""


def show(row: Mapping[str, Any]) -> str:
    """One cell in one line."""
    if "skipped" in row:
        return f"{row['source']}  {row['cell']}: {row['skipped']}"
    parts = [
        f"{column} {ours:.4g} for {theirs:.4g} ({error(theirs, ours, resolution):+.0%})"
        for column, (theirs, ours, resolution) in row["metrics"].items()
    ]
    return f"{row['source']}  {row['cell']} [{row['knee']} {row['waiting']:.2f}]: " + ", ".join(parts)


def main() -> int:
    """Replay what is asked for, keep the rows, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sources whose name has this in it")
    parser.add_argument("--arm", default="", help="arms whose name has this in it")
    parser.add_argument("--every", type=int, default=1, help="every so manieth run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--missing", action="store_true", help="only runs without rows")
    parser.add_argument(
        "--table", action="store_true", help="print the tables of the results there are, and replay nothing"
    )
    parser.add_argument(
        "--silicon", action="store_true", help="closed loops of silicon rows instead, by benchmarks/silicon.py"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for every replay")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published data")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    asked = parser.parse_args()
    if asked.silicon:
        command = [sys.executable, str(HERE / "silicon.py"), "--timing", "roofline", "--every", str(asked.every)]
        return subprocess.call([*command, "--only", asked.only, "--processes", str(asked.jobs)])
    rows = load_rows(asked.results)
    extra = dict(text.split("=", 1) for text in asked.set)
    if not asked.table:
        todo = []
        for name, manifest in manifests(asked.only).items():
            for at, run in enumerate(runs_of(name, manifest, asked.data)):
                known = all((name, f"{cell.arm} {cell.load}".strip()) in rows for cell in run.cells.values())
                if asked.arm in run.arm and not (asked.missing and known):
                    todo.append((name, at))
        todo = todo[:: asked.every]
        with ProcessPoolExecutor(asked.jobs) as pool:
            jobs = [pool.submit(work, name, at, asked.data, extra) for name, at in todo]
            for done in as_completed(jobs):
                try:
                    made = done.result()
                except Exception:  # one run's failure must not lose the others
                    traceback.print_exc()
                    continue
                for row in made:
                    rows[row["source"], row["cell"]] = row
                    print(show(row), flush=True)
                save_rows(asked.results, rows)
        if asked.results == RESULTS:
            published_errors.write()
    print(tables([row for row in rows.values() if asked.only in row["source"] and asked.arm in row["arm"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
