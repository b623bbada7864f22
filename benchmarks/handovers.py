"""Prefill and decode apart, against NVIDIA Dynamo's replay: what both find on the whole conversation trace.

Dynamo breaks ties of its kv router with a generator without a seed, so its kv rows are means of five runs, beside means of five
of our seeds. Its runs are kept in ``data/dynamo-handovers.csv``.

    python benchmarks/handovers.py               # ours against what is kept
    python benchmarks/handovers.py --record      # run Dynamo again and keep that (make peers)

How fast both are is in ``replay.py``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvyard.replay.run import replay

HERE = Path(__file__).resolve().parent
KEPT = HERE / "data" / "dynamo-handovers.csv"
RUNS = 5

SENT = {"kv_transfer_bytes_per_token": 131_072, "kv_transfer_bandwidth": 50.0}
NO_TIME: dict[str, Any] = {"nic": "none"}
ALONE: dict[str, Any] = {
    **{"nic_bandwidth": 50, "nic_latency": 0, "contention": False, "bytes_per_token": 131_072},
    "reserves": "one",
}
"""Each hand-over has the network to itself, and a decode worker makes room for one a pass, as Dynamo has it."""
SLOW = {"nic_bandwidth": 12, "sends": "prompt"}
SENT_SLOWLY = SENT | {"kv_transfer_bandwidth": 12.0}


class Case(NamedTuple):
    """A fleet, as either side says it."""

    prefill: int
    decode: int
    ours: dict[str, Any]
    sends: dict[str, Any]
    """What Dynamo's prefill engine is told of the network."""
    one_prompt: bool = False
    """Whether a prefill worker computes one prompt at a time."""

    def settings(self, router: str, seed: int) -> dict[str, Any]:
        """Ours, in parity: no credit for what was routed and isn't announced yet."""
        kinds = [
            {"role": "prefill", "name": "p", "count": self.prefill, **({"max_num_seqs": 1} if self.one_prompt else {})},
            {"role": "decode", "name": "d", "count": self.decode},
        ]
        return {"workers": kinds, "router": router, "seed": seed, "predicted_ttl_s": 0, **self.ours}

    def asked(self, router: str) -> dict[str, Any]:
        """Dynamo's, as ``peers/dynamo_replay.py`` takes it."""
        split = {
            "prefill": self.prefill,
            "decode": self.decode,
            "sends": self.sends,
            "prefill_engine": {"max_num_seqs": 1} if self.one_prompt else {},
        }
        mode = "kv_router" if router == "kv" else "round_robin"
        return {"trace": "conversation", "workers": 0, "router": mode, "split": split}


CASES = {
    "4 + 4": Case(4, 4, NO_TIME, {}),
    "6 + 2": Case(6, 2, NO_TIME, {}),
    "4 + 4, 50 GB/s, whole prompts": Case(4, 4, ALONE | {"sends": "prompt"}, SENT),
    "4 + 4, 50 GB/s, what is missing": Case(4, 4, ALONE, SENT | {"kv_transfer_timing_mode": "destination_missing"}),
    "6 + 2, 12 GB/s, whole prompts": Case(6, 2, ALONE | SLOW, SENT_SLOWLY),
    "7 + 1, 12 GB/s, whole prompts": Case(7, 1, ALONE | SLOW, SENT_SLOWLY),
    "4 + 4, one prompt a pass": Case(4, 4, NO_TIME, {}, one_prompt=True),
}
FIGURES = {
    "reuse": "first_admission_prefix_cache_reused_ratio",
    "ttft_mean": "mean_ttft_ms",
    "ttft_p50": "median_ttft_ms",
    "ttft_p90": "p90_ttft_ms",
    "ttft_p99": "p99_ttft_ms",
    "itl_mean": "mean_itl_ms",
    "itl_p99": "p99_itl_ms",
    "e2e_mean": "mean_e2e_latency_ms",
    "e2e_p99": "p99_e2e_latency_ms",
}
"""Columns, and what Dynamo calls them. Milliseconds."""


def ours(case: str, router: str, seed: int) -> dict[str, float]:
    """One replay of the whole trace."""
    trace = HERE.parent / "examples" / "data" / "mooncake_conversation.jsonl.xz"
    report = replay(trace, **CASES[case].settings(router, seed)).report
    figures = {"reuse": report.reuse["all"].value}
    for name in FIGURES:
        kind, _, which = name.partition("_")
        if which:
            figures[name] = getattr(report.latency[kind], which)
    return figures


def kept() -> dict[tuple[str, str], list[dict[str, float]]]:
    """Dynamo's runs by case and router."""
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with KEPT.open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault((row["case"], row["router"]), []).append({name: float(row[name]) for name in FIGURES})
    return rows


def means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(run[name] for run in runs) for name in FIGURES}


def _dynamo(python: str, case: str, router: str) -> dict[str, str]:
    from _peers import DYNAMO_REPLAY, conversation_trace

    command = [python, str(DYNAMO_REPLAY), "--conversation", str(conversation_trace()), "--one"]
    done = subprocess.run(
        [*command, json.dumps(CASES[case].asked(router))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "DYN_LOG": "error"},
    )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    figures = {name: str(result["report"][theirs]) for name, theirs in FIGURES.items()}
    return {"version": result["versions"]["ai-dynamo"], **figures}


def record(python: str) -> Iterator[dict[str, str]]:
    """Dynamo's runs, one after the other."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for router, runs in (("round-robin", 1), ("kv", RUNS)):
        for case in CASES:
            for run in range(runs):
                result = _dynamo(python, case, router)
                print(case, router, run, result, flush=True)
                yield {"case": case, "router": router, "run": str(run), "date": today, **result}


def compare() -> None:
    """Print ours beside what is kept."""
    print("| | side | reuse | TTFT mean | p50 | p90 | p99 | ITL mean | p99 | E2E mean | p99 |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (case, router), runs in kept().items():
        mine = means([ours(case, router, seed) for seed in range(len(runs))])
        theirs = means(runs)
        print(_line(f"{case}, {router}", "kvyard", mine))
        print(_line("", "Dynamo", theirs))
        apart = " | ".join(f"{(mine[name] / theirs[name] - 1) * 100:+.2f}%" for name in FIGURES)
        print(f"| | apart | {apart} |", flush=True)


def _line(case: str, side: str, figures: dict[str, float]) -> str:
    digits = {"reuse": 5, "itl_mean": 4, "itl_p99": 3}
    cells = " | ".join(f"{value:,.{digits.get(name, 1)}f}" for name, value in figures.items())
    return f"| {case} | {side} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--record", action="store_true", help="run Dynamo, and keep what it finds")
    if parser.parse_args().record:
        from _peers import peer_python

        python = peer_python("dynamo")
        if python is None:
            return
        rows = list(record(python))
        with KEPT.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    compare()


if __name__ == "__main__":
    main()
