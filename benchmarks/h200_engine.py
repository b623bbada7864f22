"""How far off replays of two real runs on an H200 are: with a profile fitted to a sweep and to the first run's log, and with
nothing measured. The second run is never seen by the fit. Writes the table of benchmarks/RESULTS-accuracy.md.

    .venv/bin/python benchmarks/h200_engine.py
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from kvyard.engine.timing.fitting import errors_by_kind, row_errors
from kvyard.lab.calibrate.calibration import FittedProfile, fit_profile
from kvyard.lab.calibrate.passes import read_passes
from kvyard.lab.validate.compare import COLUMNS, Validation, validate
from kvyard.lab.validate.reading import read_run
from kvyard.replay.traces import open_trace

DATA = Path(__file__).parent / "data" / "h200-engine"
RUNS = {"A": "10 requests/s", "B": "30 requests/s"}
ENGINE = {"block_size": 16, "async_scheduling": False}
ROOFLINE = {"gpu": "h200", "model": "llama-3.1-8b", "timing": "roofline", "host_us": 500.0}


def fitted() -> FittedProfile:
    """A profile of the sweep and of run A's passes."""
    return fit_profile([read_passes(DATA / "sweep.jsonl"), read_passes(DATA / "runA.json.xz")], "h200-engine")


def compared(name: str, settings: Mapping[str, object]) -> Validation:
    """Run ``name`` beside its replay."""
    run = read_run(DATA / f"run{name}.json.xz", open_trace(DATA / "workload.jsonl.xz"))
    return validate(run, {**ENGINE, **settings})


def main() -> None:
    fit = fitted()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "h200-engine.json"
        path.write_bytes(msgspec.json.encode(fit.profile))
        kinds: dict[str, dict[str, object]] = {
            "`profile`, sweep + A's log": {"timing": f"profile:{path}"},
            "`roofline`, the card's shares": dict(ROOFLINE),
        }
        print("| timing | run | TTFT | TPOT | E2E | output tokens/s |\n|---|---|---|---|---|---|")
        for label, settings in kinds.items():
            for name, rate in RUNS.items():
                comparison = compared(name, settings)
                cells = [
                    " / ".join(f"{100 * comparison.latency[kind].error[column]:+.1f}" for column in COLUMNS)
                    for kind in ("ttft", "tpot", "e2e")
                ]
                tokens = f"{100 * comparison.throughput['output_tokens_per_s'].error:+.1f}"
                print(f"| {label} | {name}, {rate} | {' | '.join(cells)} | {tokens} |")
    unseen = errors_by_kind(fit.rows, fit.fit.unseen_errors)
    passes = read_passes(DATA / "runB.json.xz").rows
    of_b = errors_by_kind(passes, row_errors(fit.profile.form, passes))
    print(f"\nPasses, mean error: left out of the fit {unseen['all'].mean:.1%}, of run B {of_b['all'].mean:.1%}")
    print({kind: f"{of.points}: {of.mean:.1%}, median {of.median:.1%}" for kind, of in of_b.items()}, file=sys.stderr)


if __name__ == "__main__":
    main()
