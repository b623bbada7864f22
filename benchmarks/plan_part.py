"""``kvyard plan`` by the busiest part of a trace against a plan by all of it: cost, and whether the part's answer holds.

    python benchmarks/plan_part.py [--only NAME ...] [--no-whole]

A large trace is planned for by its busiest requests in a row. Here the traces are small enough for both plans, and the part is
a smaller one. The part's answer is replayed on the whole trace, and so is the same fleet with fewer workers until it misses the
SLO, with the router and memory of the answer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from kvyard.engine.price_list import default_prices
from kvyard.lab.jobs import TracePart
from kvyard.lab.plan import plan
from kvyard.lab.plan.plan import Planned
from kvyard.lab.plan.search import FleetOption
from kvyard.lab.study import Study
from kvyard.lab.study.cost import parted
from kvyard.lab.study.goals import judged
from kvyard.replay.report.slo import parse_limits
from kvyard.replay.settings import make_config

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
CASES: dict[str, dict[str, Any]] = {
    "conversation": {
        "trace": TRACES / "mooncake" / "conversation_trace.jsonl",
        "part": 2000,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p99<2s,itl_p99<50ms",
    },
    "synthetic": {
        "trace": TRACES / "mooncake" / "synthetic_trace.jsonl",
        "part": 1000,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p99<2s,itl_p99<50ms",
    },
    "azure": {
        "trace": TRACES / "azure" / "AzureLLMInferenceTrace_conv.csv",
        "part": 3000,
        "model": "llama-3.1-8b",
        "speedup": 10,
        "slo": "ttft_p99<500ms,itl_p99<30ms",
    },
}
GPU = "h100"


def plan_for(case: dict[str, Any], folder: Path, part: int | None) -> Planned:
    """Return the plan of a case by its busiest ``part``, or by all requests."""
    given = {name: value for name, value in case.items() if name not in ("trace", "part", "slo")}
    base, prices = parted({**given, "gpu": GPU}, default_prices())
    base.pop("gpu")
    most = 1 << 40 if part is None else 0
    with (
        mock.patch("kvyard.lab.plan.plan.MOST_REQUESTS", most),
        mock.patch("kvyard.lab.plan.plan.PART_REQUESTS", part or 1),
        mock.patch("kvyard.lab.plan.plan.LOADS", ()),
    ):
        return plan(
            case["trace"],
            [GPU],
            parse_limits(case["slo"]),
            folder=folder,
            prices={GPU: prices},
            price_list=default_prices(),
            config=base,
        )


def on_all(case: dict[str, Any], folder: Path, planned: Planned, fleet: FleetOption) -> str:
    """Replay ``fleet`` on the whole trace, and return its values with a verdict."""
    study = Study(case["trace"], folder)
    config = make_config(planned.settings(fleet))
    point = study.point({}, config, TracePart(max_tokens=case.get("max_tokens")))
    report = study.replay([point])[point.key]
    limits = parse_limits(case["slo"])
    values, violation = judged(report, fleet.cost, limits)
    shown = ", ".join(f"{limit.name} {values[limit.name]:,.1f}" for limit in limits)
    return f"{'keeps' if violation <= 0 else 'MISSES'} it: {shown}"


def fewer(planned: Planned, fleet: FleetOption) -> FleetOption | None:
    """Return the fleet with a worker less, of the kind that it has more of."""
    workers, prefill = fleet.workers - 1, fleet.prefill
    if prefill > workers - prefill:
        prefill -= 1
    if workers < 1 or (fleet.prefill and not 0 < prefill < workers):
        return None
    smaller = planned.search.fleet(fleet.shape, workers, prefill, fleet.router)
    return msgspec.structs.replace(smaller, max_model_len=fleet.max_model_len)


def main() -> None:
    """Run the cases, and print what each plan takes and how its answer does on the whole trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument(
        "--no-whole", action="store_true", help="no plan by all requests, only replays of the part's answer"
    )
    arguments = parser.parse_args()
    for name in arguments.only:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            for part in (case["part"], *(() if arguments.no_whole else (None,))):
                began = time.process_time()
                planned = plan_for(case, Path(folder) / str(part), part)
                answer = planned.answer
                took = time.process_time() - began
                print(f"{name}: {planned.about_traffic}", flush=True)
                if answer is None:
                    print("  no fleet keeps the SLO")
                    continue
                print(
                    f"  {answer.cost:.2f} an hour: {answer.name}; {len(planned.search.fleets)} fleets, {took:.0f} s of CPU"
                )
                fleet: FleetOption | None = answer
                while part is not None and fleet is not None:
                    said = on_all(case, Path(folder) / "all", planned, fleet)
                    print(f"  on all requests, {fleet.cost:.2f}, {fleet.name}: {said}", flush=True)
                    fleet = None if "MISSES" in said else fewer(planned, fleet)


if __name__ == "__main__":
    main()
