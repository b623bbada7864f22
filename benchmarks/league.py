"""The league of routing policies over a grid of traces, fleets and loads, and whether ``least-time`` is first in each cell.

    .venv/bin/python benchmarks/league.py [--only tenants] [--again least-time] [--judge]

Traces are Mooncake's conversation and synthetic ones, a tenth of the Weka sessions and one made up with many tenants; workers
4, 8 and 32; once and twice the load; arrivals as recorded and spread within their ticks (where a trace has ticks); with and
without a host tier; the polynomial timing and one measured on an H200. With 8 workers all policies play; then ``kv``,
``round-robin``, ``least-time`` and the ``BEST`` three of the rest everywhere. All that is done is kept in ``build/league``:
the same command goes on where it was interrupted. ``--again`` plays a policy once more, after a change, and ``--policies``
that one alone; ``--judge`` and ``--markdown``, which prints the tables of benchmarks/RESULTS-league.md, play nothing.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from _peers import conversation_trace
from _plain import plain_environment

from kvyard.files import write_whole
from kvyard.lab.league import OVERLOADED

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "league"
SHARED = Path(os.environ.get("KVYARD_SHARED", ROOT.parent / "shared")) / "traces"
ALWAYS = ("least-time", "kv", "round-robin")
BEST = 3
JITTER = "3s"
HOST_BLOCKS = 32_768
MADE = (
    *("--requests", "8000", "--arrivals", "gamma:3,2", "--tree", "24x3000/40x6000", "--zipf", "0.8"),
    *("--turns", "geometric:4", "--think", "exponential:30", "--input", "lognormal:600,1"),
    *("--output", "lognormal:250,0.8", "--seed", "1"),
)
"""24 tenants, each with a system prompt of 3,000 tokens and 40 documents of 6,000, some asked far more often than others."""
FIGURES = (
    *("reuse", "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_mean_ms", "itl_p99_ms"),
    *("e2e_mean_ms", "balance", "regret", "queue_mean_ms"),
)


class Setting(NamedTuple):
    """One fleet and one trace, at every load: a league of its own."""

    trace: str
    workers: int
    timing: str
    host_blocks: int
    jitter: str

    @property
    def name(self) -> str:
        """To choose it by."""
        tier, ticks = "host" if self.host_blocks else "device", "spread" if self.jitter != "0" else "recorded"
        return f"{self.trace}-{self.workers}-{self.timing.partition(':')[0]}-{tier}-{ticks}"

    @property
    def for_all(self) -> bool:
        """Whether every policy plays, and not only the few that were best where all did."""
        return self.workers == 8 and not self.host_blocks and (self.jitter == "0" or self.trace == "conversation")


TIMINGS = ("polynomial", "profile:h200-llama3-8b")
TICKS = ("conversation", "synthetic")
"""Traces whose arrivals were recorded in ticks."""
SETTINGS = [
    Setting(trace, workers, timing, host, jitter)
    for workers, host in ((8, 0), (4, 0), (8, HOST_BLOCKS), (32, 0), (4, HOST_BLOCKS), (32, HOST_BLOCKS))
    for jitter in ("0", JITTER)
    for timing in TIMINGS
    for trace in ("tenants", "synthetic", "conversation", "weka")
    if jitter == "0" or trace in TICKS
]
SETTINGS.sort(key=lambda one: not one.for_all)


def trace_file(name: str) -> Path | None:
    """Where a trace is, made first if need be; ``None``, said in a line, where its source isn't there."""
    if name == "conversation":
        return conversation_trace()
    path = KEPT / "traces" / f"{name}.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    kvyard = [sys.executable, "-m", "kvyard", "trace"]
    if name == "tenants":
        subprocess.run([*kvyard, "generate", str(path), *MADE], check=True)
        return path
    source = SHARED / {"synthetic": "mooncake/synthetic_trace.jsonl", "weka": "weka/claude_code_710.jsonl.xz"}[name]
    if not source.exists():
        print(f"{name}: left out, since there is no {source}", flush=True)
        return None
    if name == "synthetic":
        return source
    with lzma.open(source, "rt") as packed:
        sessions = packed.read().splitlines()
    kept = sorted(random.Random(0).sample(range(len(sessions)), len(sessions) // 10))
    tenth = path.with_suffix(".weka.jsonl")
    tenth.write_text("".join(f"{sessions[at]}\n" for at in kept))
    subprocess.run([*kvyard, "scale", str(tenth), str(path), "--arrivals", "poisson:0.1", "--seed", "0"], check=True)
    return path


def play(setting: Setting, policies: list[str] | None) -> Iterator[dict[str, Any]]:
    """Rows of one setting's league; what was played before is taken as it is."""
    from kvyard.lab.league import league, standings
    from kvyard.lab.study import columns

    path = trace_file(setting.trace)
    if path is None:
        return
    config: dict[str, object] = {"workers": setting.workers, "timing": setting.timing}
    if setting.host_blocks:
        config["host_blocks"] = setting.host_blocks
    done = league(
        path,
        folder=KEPT,
        policies=policies,
        loads=(1, 2),
        jitters=(setting.jitter,),
        config=config,
        trace_block_size=64 if setting.trace == "weka" else None,
    )
    if done.interrupted:
        raise KeyboardInterrupt
    for point, why in done.failed:
        print(f"{setting.name}, {point.label}: {why}", flush=True)
    for cell, places in standings(done).items():
        for place in places:
            values = columns(place.values)
            figures = {name: values[name] for name in FIGURES}
            yield {
                **setting._asdict(),
                "cell": cell,
                "overloaded": "0",
                "policy": place.policy,
                **{name: "" if value is None else f"{value:.5g}" for name, value in figures.items()},
            }


def forget(policy: str) -> None:
    """Remove what a policy did before."""
    for report in (KEPT / "points").glob("*.json"):
        if json.loads(report.read_bytes())["label"].startswith(f"router={policy},"):
            report.unlink()


Key = tuple[str, int, str, int, str, str, str]
"""A setting, a cell, a policy."""


def row_key(row: dict[str, Any]) -> Key:
    """What a row is of."""
    setting = (row["trace"], int(row["workers"]), row["timing"], int(row["host_blocks"]), row["jitter"])
    return (*setting, row["cell"], row["policy"])


def read_rows(table: Path) -> list[dict[str, Any]]:
    """What earlier runs left; nothing at first."""
    if not table.exists():
        return []
    with table.open() as lines:
        return list(csv.DictReader(lines))


def cells(rows: list[dict[str, Any]]) -> dict[tuple[str, int, str, int, str, str], dict[str, dict[str, Any]]]:
    """By cell and policy."""
    found: dict[tuple[str, int, str, int, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row_key(row)[:-1], {})[row["policy"]] = row
    return found


def best_rivals(rows: list[dict[str, Any]]) -> list[str]:
    """The policies besides ``ALWAYS`` that have the least mean TTFT with 8 workers, against the first of each cell."""
    behind: dict[str, list[float]] = {}
    for key, by_policy in cells(rows).items():
        if key[1] != 8 or len(by_policy) < 12 or any(int(row["overloaded"]) for row in by_policy.values()):
            continue
        first = min(float(row["ttft_mean_ms"]) for row in by_policy.values())
        for policy, row in by_policy.items():
            behind.setdefault(policy, []).append(float(row["ttft_mean_ms"]) / first)
    ranked = sorted(behind, key=lambda policy: geometric_mean(behind[policy]))
    return [policy for policy in ranked if policy not in ALWAYS][:BEST]


def mark_overloaded(rows: list[dict[str, Any]]) -> None:
    """Say of each row whether queues decide in its cell: by all policies that played there, whenever they did."""
    for by_policy in cells(rows).values():
        first = min(by_policy.values(), key=lambda row: float(row["ttft_mean_ms"]))
        over = float(first["queue_mean_ms"]) > OVERLOADED * float(first["ttft_mean_ms"])
        for row in by_policy.values():
            row["overloaded"] = str(int(over))


class Verdict(NamedTuple):
    """Where ours is in a cell."""

    overloaded: bool
    missed: dict[str, str]
    """By what was to be kept, by how much it wasn't."""


def verdict(by_policy: dict[str, dict[str, Any]]) -> Verdict:
    """Whether ours is where it should be in a cell."""
    ours, kv = by_policy["least-time"], by_policy["kv"]
    first = min(by_policy.values(), key=lambda row: float(row["ttft_mean_ms"]))
    soonest = min(by_policy.values(), key=lambda row: float(row["ttft_p99_ms"]))
    ratios = (
        ("TTFT", "ttft_mean_ms", first, 1.02, f"TTFT of the first ({first['policy']})"),
        ("p99", "ttft_p99_ms", soonest, 1.05, f"p99 of the least ({soonest['policy']})"),
        ("TTFT", "ttft_mean_ms", kv, 1.0, "TTFT of kv"),
        ("ITL", "itl_p99_ms", kv, 1.1, "ITL p99 of kv"),
    )
    missed: dict[str, list[str]] = {}
    for short, figure, other, limit, words in ratios:
        ratio = float(ours[figure]) / float(other[figure])
        if ratio > limit:
            missed.setdefault(short, []).append(f"{ratio:.3f} x {words}")
    return Verdict(bool(int(ours["overloaded"])), {short: "; ".join(found) for short, found in missed.items()})


def played(
    rows: list[dict[str, Any]],
) -> Iterator[tuple[tuple[str, int, str, int, str, str], dict[str, dict[str, Any]]]]:
    """Cells in which both ours and ``kv`` are."""
    for key, by_policy in sorted(cells(rows).items()):
        if "least-time" in by_policy and "kv" in by_policy:
            yield key, by_policy


def judge(rows: list[dict[str, Any]]) -> None:
    """Say for each cell whether ours is where it should be."""
    passed, lost, apart = 0, 0, 0
    for key, by_policy in played(rows):
        judged = verdict(by_policy)
        apart += judged.overloaded
        passed += not judged.overloaded and not judged.missed
        lost += not judged.overloaded and bool(judged.missed)
        name = "overloaded" if judged.overloaded else "LOST" if judged.missed else "ok"
        mean, kv = (float(by_policy[policy]["ttft_mean_ms"]) for policy in ("least-time", "kv"))
        print(
            f"{name:<11}{key[0]:<13}{key[1]:>3} {key[2].partition(':')[0]:<11}{'host' if key[3] else 'device':<7}{key[5]:<33}"
            f"{mean:>8.1f} ms, kv {kv:>8.1f}  {'; '.join(judged.missed.values())}"
        )
    print(f"{passed} cells as they should be, {lost} lost; {apart} overloaded apart")


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The two tables of benchmarks/RESULTS-league.md, line by line: all policies with 8 workers, and every cell."""
    yield from _policies(rows)
    yield ""
    yield (
        "| trace | workers | timing | tier | load | `least-time` | first of the others | `kv` | p99 / least of the others' "
        "| ITL p99, `kv`'s | |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for (trace, workers, timing, host, _, cell), by_policy in played(rows):
        ours, kv = by_policy["least-time"], by_policy["kv"]
        others = [row for policy, row in by_policy.items() if policy != "least-time"]
        first = min(others, key=lambda row: float(row["ttft_mean_ms"]))
        p99 = float(ours["ttft_p99_ms"]) / min(float(row["ttft_p99_ms"]) for row in others)
        judged = verdict(by_policy)
        note = "overloaded" if judged.overloaded else f"**{', '.join(judged.missed)}**" if judged.missed else ""
        load = cell.replace(" load", "").replace(", as recorded", "").replace("ticks spread over 3s", "spread")
        yield (
            f"| {trace} | {workers} | {_timing(timing)} | {'host' if host else '–'} | {load} | {_ms(ours)} | {first['policy']} "
            f"{_ms(first)} | {_ms(kv)} | {p99:.2f} | {float(ours['itl_p99_ms']):.1f}, {float(kv['itl_p99_ms']):.1f} | {note} |"
        )


def _policies(rows: list[dict[str, Any]]) -> Iterator[str]:
    whole = {key: found for key, found in cells(rows).items() if key[1] == 8 and not key[3] and len(found) >= 12}
    behind: dict[str, list[float]] = {}
    for by_policy in whole.values():
        if any(int(row["overloaded"]) for row in by_policy.values()):
            continue
        first = min(float(row["ttft_mean_ms"]) for row in by_policy.values())
        for policy, row in by_policy.items():
            behind.setdefault(policy, []).append(float(row["ttft_mean_ms"]) / first)
    shown = [(trace, "polynomial") for trace in ("conversation", "synthetic", "tenants", "weka")]
    shown.append(("conversation", "profile:h200-llama3-8b"))
    yield (
        f"| policy | behind the first, {max(map(len, behind.values()), default=0)} cells | "
        + " | ".join(trace if timing == "polynomial" else f"measured timing: {trace}" for trace, timing in shown)
        + " |"
    )
    yield "|---" * (2 + len(shown)) + "|"
    for name in sorted(behind, key=lambda one: geometric_mean(behind[one])):
        line = [f"`{name}`", f"+{geometric_mean(behind[name]) - 1:.1%}".replace("%", " %")]
        for trace, timing in shown:
            of = whole.get((trace, 8, timing, 0, "0", "1x load, as recorded"), {}).get(name)
            reuse = "" if of is None else f"{float(of['reuse']):.1%}".replace("%", " %")
            line.append("–" if of is None else f"{_ms(of)} / {reuse} / {float(of['itl_p99_ms']):.1f}")
        yield f"| {' | '.join(line)} |"


def _timing(name: str) -> str:
    return "polynomial" if name == "polynomial" else "measured"


def _ms(row: dict[str, Any]) -> str:
    return f"{float(row['ttft_mean_ms']):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--only", default="", help="settings with one of these in their names, such as tenants-8,weka-4"
    )
    parser.add_argument("--few", action="store_true", help="not all policies, wherever it is")
    parser.add_argument(
        "--table", type=Path, default=KEPT / "league.csv", help="where rows go, besides those that are there"
    )
    parser.add_argument("--policies", default="", help="play these alone; rows of the others stay as they are")
    parser.add_argument("--again", default="", help="a policy whose runs are made again")
    parser.add_argument("--judge", action="store_true", help="say what the rows of an earlier run say")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of benchmarks/RESULTS-league.md from such rows"
    )
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        judge(read_rows(args.table))
        return
    if args.markdown:
        print("\n".join(markdown(read_rows(args.table))))
        return
    if not args.plain:
        environment = plain_environment()
        raise SystemExit(
            subprocess.run([sys.executable, *sys.argv, "--plain"], env=environment, check=False).returncode
        )
    if args.again:
        forget(args.again)
    rows = read_rows(args.table)
    for setting in SETTINGS:
        if not any(one in setting.name for one in args.only.split(",")):
            continue
        few = None if setting.for_all and not args.few else [*ALWAYS, *best_rivals(rows)]
        made = list(play(setting, args.policies.split(",") if args.policies else few))
        again = {(*setting, row["cell"], row["policy"]) for row in made}
        rows = [row for row in rows if row_key(row) not in again] + made
        mark_overloaded(rows)
        rows.sort(key=row_key)
        print(f"{setting.name}: {len(made)} rows", flush=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(args.table, text.getvalue())
    judge(rows)


if __name__ == "__main__":
    main()
