"""Pull or compute: llm-d's measured table predicted from two of its rows, and what choosing is worth where forced pulls hurt.

First, llm-d's single requests (gpt-oss-120b, one H200 per pod, vLLM with blocks of 64 tokens): a prefix that another pod has,
computed or pulled. Four figures are fitted to the shortest and the longest prefix: a pass's constant, a token, a pair of
tokens, and the network's bandwidth; the rows in between are predicted. All times are those of a replay, with its passes of
8,192 tokens, the pull, and the load from host.

Second, a scenario in the shape of llm-d-router #2833: prompts of 8,192 tokens, up to 64 at a time, that only the other worker
has.

Third, a fleet: llm-d's 16 pods with 128 shared prefixes of 48K tokens, offered more and more.

Virtual time: the figures are the same on any machine.

    python benchmarks/peer_pull.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

MS = 1_000_000
SECOND = 10**9
BLOCK = 64
PREFIXES = (2048, 8192, 16384, 32768, 49152)


class Measured(NamedTuple):
    """Milliseconds of llm-d's requests, by prefix."""

    where: str
    computed: tuple[float, ...]
    pulled: tuple[float, ...]


TABLES = (
    Measured("llm-d's blog, 2026-08-15", (78, 250, 510, 1173, 1988), (35, 57, 86, 165, 235)),
    Measured("an earlier run, in its guide", (70.6, 205.4, 426.3, 983.0, 1695), (49.0, 120.1, 196.2, 376.3, 550.5)),
)


class Fit(NamedTuple):
    """What is fitted. Milliseconds, and GB/s."""

    a_pass: float = 20.0
    token: float = 0.03
    pair: float = 5e-7
    gb_s: float = 10.0


def profile(fit: Fit, path: Path) -> None:
    """A timing profile in which a pass takes its constant, its tokens and its pairs of tokens."""
    nothing = dict.fromkeys(("sequence", "past_read", "past_copy", "launch", "past_launch", "context"), 0.0)
    form = {"weights": fit.a_pass, "token": fit.token, "blend": 1.0, "attention": fit.pair, "past_attention": fit.pair}
    path.write_text(
        json.dumps(
            {
                "format": "kvyard-profile/1",
                "name": "llm-d",
                "device": "NVIDIA H200",
                "source": "two rows of llm-d's table",
                "errors": {},
                "coefficients": {**nothing, **form},
            }
        )
    )


def request(fit: Fit, prefix: int, pull: bool, folder: Path) -> float:
    """Milliseconds to the first token of a prompt, all of which another worker has; its last block is always computed."""
    path = folder / "profile.json"
    profile(fit, path)
    ids = tuple(range(prefix // BLOCK))
    rows = [
        TraceRequest(name, at * SECOND, prefix, 1, ids=ids, id_block_size=BLOCK) for name, at in (("a", 0), ("b", 99))
    ]
    done = replay(
        rows,
        model="gpt-oss-120b",
        timing=f"profile:{path}",
        num_gpu_blocks=4096,
        block_size=BLOCK,
        max_model_len=65536,
        max_num_batched_tokens=8192,
        workers=2,
        router="round-robin",
        host_bytes="88GiB",
        link="h200",
        peer_pull=f"host:min_lead={BLOCK}" if pull else "off",
        **({"nic_bandwidth": fit.gb_s} if pull else {}),
    )
    record = done.fleet.records["b"]
    assert (record.pulled == prefix - BLOCK) == pull, record
    return record.ttft / MS


def fitted(table: Measured, folder: Path) -> Fit:
    """Four figures from four measurements: each is moved by what it is off, until none is."""
    fit = Fit()
    short, long = PREFIXES[0], PREFIXES[-1]
    for _ in range(40):
        pulled = [request(fit, prefix, True, folder) for prefix in (short, long)]
        slope = (table.pulled[-1] - table.pulled[0]) / (pulled[1] - pulled[0])
        fit = fit._replace(gb_s=fit.gb_s / slope, a_pass=fit.a_pass + table.pulled[0] - pulled[0])
        computed = [request(fit, prefix, False, folder) for prefix in (short, long)]
        token = fit.token * (1 + (table.computed[0] - computed[0]) / table.computed[0])
        fit = fit._replace(token=token, pair=fit.pair + (table.computed[-1] - computed[1]) / (0.5 * long * long) / 2)
        off = [
            abs(here / there - 1)
            for here, there in zip(
                [*pulled, *computed],
                [table.pulled[0], table.pulled[-1], table.computed[0], table.computed[-1]],
                strict=False,
            )
        ]
        if max(off) < 1e-4:
            return fit
    raise AssertionError(f"the fit is still {max(off):.2%} off")


def predict() -> None:
    """Print both tables, measured and predicted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table in TABLES:
            fit = fitted(table, folder)
            print(
                f"\n{table.where}: a pass {fit.a_pass:.1f} ms, a token {1e3 * fit.token:.2f} us, "
                f"a pair {1e6 * fit.pair:.3f} ns, network {fit.gb_s:.1f} GB/s"
            )
            print(f"{'prefix':>8}{'computed':>12}{'predicted':>12}{'off':>8}{'pulled':>12}{'predicted':>12}{'off':>8}")
            for prefix, computed, pulled in zip(PREFIXES, table.computed, table.pulled, strict=True):
                cells = ""
                for pull, there in ((False, computed), (True, pulled)):
                    here = request(fit, prefix, pull, folder)
                    cells += f"{there:9.1f} ms{here:9.1f} ms{here / there - 1:+8.1%}"
                print(f"{prefix:8,}{cells}{'' if prefix not in (PREFIXES[0], PREFIXES[-1]) else '  (fitted)'}")


# -- choosing ---------------------------------------------------------------------------------------------------------

FAMILIES = 64
POLICIES: dict[str, dict[str, Any]] = {
    "always": {},
    "threshold": {"load_policy": "threshold"},
    "least-time": {"load_policy": "least-time"},
    "never": {"peer_pull": "off"},
}


def prompts(length: int, at_a_time: int) -> list[TraceRequest]:
    """``FAMILIES`` prompts far apart, then all again in waves of ``at_a_time``, each at the other of two workers."""
    ids = -(-length // 512)
    rows: list[TraceRequest] = []

    def add(name: str, family: int, at: float) -> None:
        names = [family * 1000 + part for part in range(ids)]
        rows.append(TraceRequest(name, round(at * SECOND), length, 8, ids=names, id_block_size=512))

    for family in range(FAMILIES):
        add(f"0.{family}", family, family * 20.0)
    add("x", FAMILIES, FAMILIES * 20.0)  # so that those that follow take the other turn
    start = FAMILIES * 20.0 + 100
    for family in range(FAMILIES):
        add(f"1.{family}", family, start + family // at_a_time * 100.0)
    return rows


def ttft(rows: Sequence[TraceRequest], gb_s: float, **settings: Any) -> float:
    """The geometric mean of the second round, in milliseconds."""
    given: dict[str, Any] = {"peer_pull": "host:in_flight=1000", **settings}
    if given["peer_pull"] != "off":
        given["nic_bandwidth"] = gb_s
    done = replay(
        rows,
        workers=2,
        router="round-robin",
        num_gpu_blocks=2 * FAMILIES * rows[0].input_length // 64 + 64,
        host_blocks=4 * FAMILIES * rows[0].input_length // 64,
        **given,
    )
    return geometric_mean([record.ttft / MS for record in done.records if record.id.startswith("1.")])


def choose() -> None:
    """Print what each policy makes of it."""
    print(f"\n{'tokens':8}{'at a time':>10}{'network':>10}" + "".join(f"{name:>14}" for name in POLICIES))
    gains: dict[str, list[float]] = {name: [] for name in POLICIES}
    for length, at_a_time in ((8192, 64), (8192, 8), (8192, 1)):
        rows = prompts(length, at_a_time)
        for gb_s in (1, 4, 12.5, 50):
            found = {name: ttft(rows, gb_s, **settings) for name, settings in POLICIES.items()}
            for name, one in found.items():
                gains[name].append(one / found["always"])
            cells = "".join(f"{one:11.0f} ms" for one in found.values())
            print(f"{length:<8,}{at_a_time:10}{f'{gb_s:g} GB/s':>10}{cells}", flush=True)
    print(
        "of forced pulls, geometric mean of the cells: "
        + ", ".join(f"{name} {geometric_mean(ratios):.2f}" for name, ratios in gains.items())
    )


# -- a fleet ----------------------------------------------------------------------------------------------------------

POOL = {
    6: (5.97, 5.59, 5.96),
    12: (11.92, 9.02, 11.49),
    18: (17.87, 8.58, 17.46),
    24: (23.82, 9.01, 21.93),
    30: (29.76, 9.21, 29.19),
}
"""By requests offered per second, those that llm-d's 16 pods answered: sent to where their prefix is, or to the least loaded
without and with pulls (its guide, the same page as the earlier run)."""
ARMS: dict[str, dict[str, Any]] = {
    "affinity": {"router": "longest-match"},
    "load": {"router": "least-loaded"},
    "load, pulls": {"router": "least-loaded", "peer_pull": "host:min_lead=2048,in_flight=64"},
}


def shared_prefixes(rate: int, seconds: int = 60) -> list[TraceRequest]:
    """128 prefixes of 48K tokens, each asked for once; then questions of 256 tokens about any of them, at a constant rate."""
    random = Random(1)
    blocks = PREFIXES[-1] // BLOCK
    rows: list[TraceRequest] = []

    def ask(name: str, prefix: int, at: float) -> None:
        own = [10**6 + 4 * len(rows) + part for part in range(4)]
        ids = [*range(prefix * 1000, prefix * 1000 + blocks), *own]
        rows.append(TraceRequest(name, round(at * SECOND), PREFIXES[-1] + 256, 64, ids=ids, id_block_size=BLOCK))

    for prefix in range(128):
        ask(f"first {prefix}", prefix, prefix * 0.5)
    for number in range(rate * seconds):
        ask(str(number), random.randrange(128), 94 + number / rate)
    return rows


def answered(rate: int, gb_s: float, arm: dict[str, Any]) -> tuple[float, float]:
    """Requests answered per second, and the median time of one in seconds."""
    done = replay(
        shared_prefixes(rate),
        workers=16,
        model="gpt-oss-120b",
        gpu="h200",
        timing="roofline",
        timing_speedup=1 / 1.023,  # so that 48K tokens take as much longer than 2K as llm-d measured
        block_size=BLOCK,
        gpu_memory_utilization=0.85,
        max_num_batched_tokens=8192,
        host_bytes="88GiB",
        link="h200",
        offload_policy="write_through_generated",
        **arm,
        **({"nic_bandwidth": gb_s} if "peer_pull" in arm else {}),
    )
    records = [record for record in done.records if not record.id.startswith("first")]
    spent = max(record.ended for record in records) - min(record.arrival for record in records)
    return len(records) / spent * SECOND, median([record.ended - record.arrival for record in records]) / SECOND


def fleet() -> None:
    """Print what a fleet of 16 answers, measured and predicted."""
    print(f"\n{'offered':>8}{'arm':>14}{'network':>12}{'measured':>12}{'predicted':>12}{'off':>8}{'median':>10}")
    for rate, measured in POOL.items():
        for (name, arm), there in zip(ARMS.items(), measured, strict=True):
            for gb_s in (10.5, 3.7) if "peer_pull" in arm else (0.0,):
                here, took = answered(rate, gb_s, arm)
                network = f"{gb_s:g} GB/s" if gb_s else ""
                print(
                    f"{rate:6}/s{name:>14}{network:>12}{there:10.2f}/s{here:10.2f}/s{here / there - 1:+8.1%}{took:8.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    predict()
    choose()
    fleet()
