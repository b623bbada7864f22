"""Load or compute: prompts that the host has, over a link that is too slow for all of them at once and over one that isn't.

The setting is that of llm-d-router #2833: prompts of 8,192 tokens, 64 at a time, all of which a lower tier holds and the device
doesn't. One worker, polynomial timing, 128 KiB of KV a token. Virtual time: the figures are the same on any machine.

    python benchmarks/load_or_compute.py
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

SECOND = 10**9
FAMILIES = 64
POLICIES: dict[str, dict[str, object]] = {
    "always": {},
    "threshold": {"load_policy": "threshold"},
    "least-time": {"load_policy": "least-time"},
    "never": {"load_policy": "threshold", "load_options": {"tokens": 10**9}},
}


def prompts(length: int, at_a_time: int, seconds: float) -> list[TraceRequest]:
    """``FAMILIES`` prompts far apart, so that all are stored, others that push them off the device, then all again in waves of
    ``at_a_time``, so many ``seconds`` apart.
    """
    ids = -(-length // 512)
    rows: list[TraceRequest] = []

    def add(name: str, family: int, at: float) -> None:
        names = [family * 1000 + part for part in range(ids)]
        rows.append(TraceRequest(name, round(at * SECOND), length, 8, ids=names, id_block_size=512))

    for family in range(2 * FAMILIES):
        add(f"0.{family}", family, family * 20.0)
    start = 2 * FAMILIES * 20.0 + 100
    for family in range(FAMILIES):
        add(f"1.{family}", family, start + family // at_a_time * seconds)
    return rows


def measure(rows: Sequence[TraceRequest], gb_s: float, **settings: object) -> dict[str, float]:
    """Of the second round: TTFT, and what was loaded and left."""
    run = replay(
        rows,
        workers=1,
        router="round-robin",
        num_gpu_blocks=FAMILIES * rows[0].input_length // 64 + 64,
        host_blocks=4 * FAMILIES * rows[0].input_length // 64,
        host_bandwidth=gb_s,
        **settings,
    )
    again = [record for record in run.records if record.id.startswith("1.")]
    return {
        "ttft": geometric_mean([record.ttft / 1e6 for record in again]),
        "mean": sum(record.ttft for record in again) / len(again) / 1e6,
        "loaded": sum(sum(record.loaded) for record in again),
        "left": sum(run.report.left_tokens.values()),
    }


def main() -> None:
    print(
        f"{'tokens':8}{'at a time':>10}{'link':>10}  {'policy':12}{'TTFT geomean':>14}{'mean':>12}{'loaded':>10}{'left':>10}"
    )
    for length, at_a_time in ((8192, 64), (8192, 8), (8192, 1), (512, 64)):
        rows = prompts(length, at_a_time, 100.0)
        for gb_s in (1, 4, 8, 32):
            for name, settings in POLICIES.items():
                found = measure(rows, gb_s, **settings)
                print(
                    f"{length:<8}{at_a_time:10}{f'{gb_s:g} GB/s':>10}  {name:12}{found['ttft']:11.0f} ms{found['mean']:9.0f} ms"
                    f"{found['loaded']:10,.0f}{found['left']:10,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
