"""Closed loops against measured silicon: our engine over tables of ``aiconfigurator-core``, beside that package's own estimate.

``systems/silicon_sample.csv`` of aiconfigurator-core 0.12 has 5,221 measured runs: a model on a card under an engine, prompts
and answers of one length, so many requests under way at any time, and the mean TTFT and TPOT. Every aggregated one that says
its concurrency is replayed as such a loop. Its own static estimate is asked on exactly the rows that we cover.

    python benchmarks/silicon.py                         # every 40th row, some minutes
    python benchmarks/silicon.py --every 1 --write       # all, and the table in docs/fidelity.md; --results keeps what is done
    python benchmarks/silicon.py --only 'vllm Qwen/Qwen3-32B h100' --every 1
    python benchmarks/silicon.py --fit                   # where the host's constants come from

It needs ``pip install 'kvyard[aic]'``. What is assumed of these runs is said in docs/fidelity.md; the constants below come
from rows of Llama-3.1-8B and of TensorRT-LLM alone, and everything else is a test.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from tempfile import gettempdir
from typing import Any, NamedTuple

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.engine.models import plan
from kvyard.engine.models.fields import Fields
from kvyard.engine.timing.aic import SYSTEMS, aic_version, known_models
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.registry import TimingConfig
from kvyard.engine.timing.roofline_timing import RooflineTiming
from kvyard.engine.timing.table_model import TableModel
from kvyard.engine.timing.tables import TablesTiming
from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.record import Record
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

HERE = Path(__file__).resolve().parent.parent
PAGE = HERE / "docs" / "fidelity.md"
BEGIN, END = "<!-- benchmarks/silicon.py: begin -->", "<!-- end -->"

HOST: dict[str, tuple[float, float]] = {
    "vllm, synchronous": (1000.0, 22.0),
    "vllm": (500.0, 0.0),
    "trtllm": (300.0, 12.0),
    "sglang": (500.0, 0.0),
}
"""Host time in microseconds, of a pass and of each sequence in it. ``--fit`` shows the rows that the first comes from. The
second is the default of ``tables``, the third comes from TensorRT-LLM's rows, and nothing is known of the last."""
BURST = 1 / 6
"""The share of requests that belong to the burst with which a loop starts; the others count for the rest."""
SPREAD = 0.1
"""Answers' lengths are drawn within this share of the row's, so that requests don't all end together for ever."""
ROUNDS = 3
"""Requests per slot of a loop: the first of each is the burst, and the last ones, as the loop runs dry, don't count."""
ASYNCHRONOUS_SINCE = (0, 14)
"""The vLLM that first decides on a pass while the one before it runs, without being told to."""

CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "nvidia/DeepSeek-R1-NVFP4": "nvidia/DeepSeek-V3.1-NVFP4",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Models of rows by the name of a config that comes with the package; others have their own."""
QUANTISED = {"fp8": "FP8", "fp4": "NVFP4"}
CARDS = {theirs: ours for ours, theirs in SYSTEMS.items()}


class Row(NamedTuple):
    """One measured run."""

    id: str
    backend: str
    version: str
    model: str
    card: str
    precision: str
    isl: int
    osl: int
    concurrency: int
    tensor: int
    pipeline: int
    data: int
    experts: int
    ttft_ms: float
    tpot_ms: float

    @property
    def group(self) -> str:
        return f"{self.backend} {self.model} {self.card}"


class Result(NamedTuple):
    """What became of a row: milliseconds of ours, of its own estimate, or why not."""

    id: str
    burst_ttft: float = 0.0
    burst_tpot: float = 0.0
    steady_ttft: float = 0.0
    steady_tpot: float = 0.0
    own_ttft: float = 0.0
    own_tpot: float = 0.0
    why: str = ""
    """Why there is no replay."""
    own_why: str = ""
    """Why there is no estimate of its own."""

    @property
    def ttft(self) -> float:
        return BURST * self.burst_ttft + (1 - BURST) * self.steady_ttft

    @property
    def tpot(self) -> float:
        return BURST * self.burst_tpot + (1 - BURST) * self.steady_tpot


# -- rows ---------------------------------------------------------------------------------------------------------------


def read_rows() -> tuple[list[Row], Counter[str]]:
    """The aggregated runs that say their concurrency, and how many others there are, by reason."""
    found, others = [], Counter[str]()
    path = files("aiconfigurator_core").joinpath("systems", "silicon_sample.csv")
    for line in csv.DictReader(path.read_text().splitlines()):
        said = re.search(r"silicon_concurrency=(\d+)", line["silicon_data_source"])
        if line["mode"] != "agg":
            others["disaggregated"] += 1
        elif said is None:
            others["no closed loop: no concurrency is said"] += 1
        elif line["system"] not in CARDS:
            others[f"a card that kvyard doesn't know ({line['system']})"] += 1
        else:
            found.append(
                Row(
                    id=line["id"],
                    backend=line["backend"],
                    version=line["backend_version"],
                    model=line["model_path"],
                    card=CARDS[line["system"]],
                    precision=line["precision"],
                    isl=int(line["isl"]),
                    osl=int(line["osl"]),
                    concurrency=int(said[1]),
                    tensor=split_size(line["tp_size"]),
                    pipeline=split_size(line["pp_size"]),
                    data=split_size(line["attention_dp_size"]),
                    experts=split_size(line["moe_ep_size"]),
                    ttft_ms=float(line["silicon_ttft_ms"]),
                    tpot_ms=float(line["silicon_tpot_ms"]),
                )
            )
    return found, others


def split_size(text: str) -> int:
    return max(1, int(float(text or 1)))


def config_of(row: Row) -> dict[str, Any]:
    """The model's config, quantised as the row says. Raises ``KvyardError`` for a model that the package has none of."""
    known = known_models()
    name = CONFIGS.get(row.model, row.model)
    if name not in known:
        raise KvyardError("a model whose config isn't in the package")
    config, dense = known[name], not Fields(known[name]).integer("num_experts", 0)
    if dense and row.precision in QUANTISED and "quantization_config" not in config:
        # NVIDIA's checkpoints: scales measured beforehand, and an FP8 cache.
        quantised = {"quant_algo": QUANTISED[row.precision], "kv_cache_quant_algo": "FP8"}
        return config | {"hf_quant_config": {"quantization": quantised}}
    return config


# -- ours ---------------------------------------------------------------------------------------------------------------


def deployment_of(row: Row) -> Deployment:
    """The row's model, card and split. Its config becomes a file, since that is what a deployment names."""
    config = config_of(row)
    folder = Path(gettempdir()) / "kvyard-silicon"
    folder.mkdir(exist_ok=True)
    path = folder / f"{row.model.replace('/', '--')}-{row.precision or 'plain'}.json"
    text = json.dumps(config)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return Deployment(
        model=str(path),
        gpu=row.card,
        tensor_parallel_size=row.tensor,
        pipeline_parallel_size=row.pipeline,
        data_parallel_size=row.data,
        enable_expert_parallel=row.experts > 1,
    )


def synchronous(row: Row) -> bool:
    """Whether the engine decided on a pass when it started. Where no version is said, vLLM was told to decide ahead."""
    found = re.match(r"(\d+)\.(\d+)", row.version)
    return row.backend == "vllm" and found is not None and (int(found[1]), int(found[2])) < ASYNCHRONOUS_SINCE


def engine_of(row: Row, kind: str) -> EngineConfig:
    """An engine as the row says. Raises ``KvyardError`` where there are no tables for it, or it doesn't fit."""
    of = deployment_of(row)
    config = of.config()
    quantised = "hf_quant_config" in config
    timing: TimingConfig
    if kind == "roofline":
        if quantised:
            of = msgspec.structs.replace(of, weight_dtype=row.precision, kv_cache_dtype="fp8")
        timing = RooflineTiming(deployment=of)
    else:
        host, per_sequence = HOST["vllm, synchronous" if synchronous(row) else row.backend]
        timing = TablesTiming(deployment=of, engine=row.backend, host_us=host, host_sequence_us=per_sequence)
        timing.table()
    made = plan(
        config,
        of.card.memory,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=row.tensor,
        pipeline_parallel_size=row.pipeline,
        data_parallel_size=row.data,
        enable_expert_parallel=row.experts > 1,
        weight_dtype=row.precision if quantised else None,
        kv_cache_dtype="fp8" if quantised else "auto",
        max_model_len=row.isl + 2 * row.osl,
        max_num_seqs=max(256, row.concurrency),
    )
    options = made.engine_options()
    if row.backend != "vllm":
        options |= {"groups": (), "block_size": made.groups[0].block_size}
        if len(made.groups) > 1:
            raise KvyardError(f"hybrid models aren't modelled with {row.backend}")
    else:
        options["groups"] = made.groups
    if row.backend == "vllm":
        options["async_scheduling"] = not synchronous(row)
    made_config = EngineConfig(backend=row.backend, timing=timing, **options)
    made_config.check()
    return made_config


def closed_loop(row: Row, kind: str) -> Result:
    """The row's loop through our engine."""
    engine = engine_of(row, kind)
    draw = random.Random(row.id)
    requests = [
        TraceRequest(str(at), 0, row.isl, max(2, round(row.osl * draw.uniform(1 - SPREAD, 1 + SPREAD))))
        for at in range(ROUNDS * row.concurrency)
    ]
    config = ReplayConfig(workers=(WorkerConfig(engine=engine, dp_size=row.data),), concurrency=row.concurrency)
    records = [one for one in replay(requests, config=config).records if one.status == "finished" and one.output > 1]
    first, rest = records[: row.concurrency], records[row.concurrency : (ROUNDS - 1) * row.concurrency]
    if not rest:
        raise KvyardError("no request fits")
    return Result(row.id, *loop_means(first), *loop_means(rest))


def loop_means(of: Sequence[Record]) -> tuple[float, float]:
    """TTFT and TPOT in milliseconds."""
    gaps = ((one.ended - one.first_token) / (one.output - 1) for one in of)
    return fmean(one.ttft for one in of) / 1e6, fmean(gaps) / 1e6


# -- its own estimate ----------------------------------------------------------------------------------------------------


@cache
def _database(system: str, backend: str) -> Any:
    from aiconfigurator_core.sdk import perf_database

    return perf_database.get_database(system, backend, perf_database.get_latest_database_version(system, backend))


def own_estimate(row: Row) -> tuple[float, float]:
    """TTFT and TPOT by the package's static model, one prompt in a mixed step."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import RuntimeConfig
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model

    modes: dict[str, str] = {}
    config, name = config_of(row), CONFIGS.get(row.model, row.model)
    if "hf_quant_config" in config and "hf_quant_config" not in known_models()[name]:
        modes = {"gemm_quant_mode": {"fp8": "fp8_static", "fp4": "nvfp4"}[row.precision], "kvcache_quant_mode": "fp8"}
    ranks = row.tensor * row.data
    spread = min(row.experts, ranks)
    built = build_model_config(
        tp_size=row.tensor,
        pp_size=row.pipeline,
        attention_dp_size=row.data,
        moe_tp_size=ranks // spread,
        moe_ep_size=spread,
        **modes,
    )
    asked = RuntimeConfig(batch_size=max(1, row.concurrency // row.data), isl=row.isl, osl=row.osl)
    found = get_backend(row.backend).run_agg(
        get_model(name, built, row.backend), _database(SYSTEMS[row.card], row.backend), asked, ctx_tokens=row.isl
    )
    result = found.get_result_dict()
    return float(result["ttft"]), float(result["tpot"])


def work(row: Row, kind: str = "tables") -> Result:
    """Both, or why not. Runs in a process of its own."""
    logging.disable(logging.WARNING)  # the package tells of every table that it opens
    try:
        found = closed_loop(row, kind)
    except KvyardError as problem:
        found = Result(row.id, why=short_reason(str(problem)))
    try:
        ttft, tpot = own_estimate(row)
        return found._replace(own_ttft=ttft, own_tpot=tpot)
    except Exception as problem:  # it raises what it likes
        return found._replace(own_why=short_reason(str(problem)))


def short_reason(text: str) -> str:
    """Reasons without what is special about one row."""
    for says, reason in (
        ("has no tables", "no tables"),
        ("doesn't fit", "doesn't fit into memory by our estimate"),
        ("no request fits", "doesn't fit into memory by our estimate"),
        ("config isn't in the package", "a model whose config isn't in the package"),
        ("no model like", "a model whose config isn't in the package"),
        ("quantised as", "a quantisation without tables"),
        ("one group of full attention", "hybrid models aren't modelled with this backend"),
        ("hybrid models", "hybrid models aren't modelled with this backend"),
    ):
        if says in text:
            return reason
    return text.splitlines()[0][:90] if text else "refused"


# -- where the host's constants come from -------------------------------------------------------------------------------


def fit() -> None:
    """Rows of Llama-3.1-8B under vLLM 0.12, the only ones of an engine without asynchronous scheduling that we may look at.

    Their prompts must mostly have been cached: computed, those of most rows would take longer than the run did. So the time of
    a pass beyond the tables' is the host's part, plus that of ``misses`` prompts a round; least absolute deviations, by brute
    force.
    """
    rows = [row for row in read_rows()[0] if row.backend == "vllm" and "Llama-3.1-8B" in row.model]
    points = []
    for row in rows:
        model = TableModel(TablesTiming(deployment=deployment_of(row), engine="vllm").table())
        batch, context = row.concurrency, row.isl + row.osl // 2
        step = model.pass_ns((), batch, batch * context, context) / 1e6
        prompt = (model.pass_ns([(row.isl, 0)], 0, 0, 0) - model.pass_ns((), 1, 100, 100)) / 1e6
        points.append((row.tpot_ms, row.tpot_ms - step, batch, prompt / row.osl))
        busy = batch * prompt / (row.ttft_ms + row.osl * row.tpot_ms)
        print(
            f"{row.isl:>5} x {row.osl:<5} TP{row.tensor} {batch:>4} under way: TPOT {row.tpot_ms:6.2f} ms, a step {step:6.2f}, "
            f"computing every prompt would take {busy:.2f} of the time"
        )
    for misses in (0, 2, 3, 4, 5, 6, 7, 8):
        error, host, sequence = min(
            (_deviation(points, host, sequence, misses), host, sequence)
            for host in [at / 10 for at in range(46)]
            for sequence in [at / 1000 for at in range(46)]
        )
        print(f"{misses} misses a round: {host:.1f} ms a pass, {1000 * sequence:.0f} µs a sequence, {error:.1%} off")


def _deviation(points: Sequence[tuple[float, float, int, float]], host: float, sequence: float, misses: int) -> float:
    return fmean(
        abs(host + sequence * batch + min(misses, batch) * prompt - gap) / tpot for tpot, gap, batch, prompt in points
    )


# -- figures ------------------------------------------------------------------------------------------------------------


def off(found: Iterable[tuple[float, float]]) -> str:
    """Mean and median of the errors of (found, measured), without sign."""
    errors = [abs(one / measured - 1) for one, measured in found if measured]
    return f"{fmean(errors):.1%} / {median(errors):.1%}" if errors else ""


def line(name: str, rows: Sequence[Row], results: dict[str, Result]) -> str:
    """A line of the table."""
    asked = [(row, results[row.id]) for row in rows if row.id in results]
    ours = [(row, one) for row, one in asked if not one.why]
    both = [(row, one) for row, one in ours if not one.own_why]
    cells = [
        name,
        f"{len(asked):,}",
        f"{len(ours):,}",
        f"{sum(not one.own_why for _, one in asked):,}",
        off((one.tpot, row.tpot_ms) for row, one in ours),
        off((one.own_tpot, row.tpot_ms) for row, one in both),
        off((one.ttft, row.ttft_ms) for row, one in ours),
        off((one.own_ttft, row.ttft_ms) for row, one in both),
    ]
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[Row], results: dict[str, Result], others: Counter[str]) -> str:
    """The section of docs/fidelity.md: errors by backend and card, of the tests, and what is left out."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row.backend}, {row.card}"].append(row)
    dense = [row for row in rows if _is_dense(row)]
    tests = {
        "**test:** Qwen3-32B, vLLM 0.12, H100": [
            row for row in rows if row.model == "Qwen/Qwen3-32B" and row.group.startswith("vllm") and row.card == "h100"
        ],
        "**test:** Llama-3.1-70B, vLLM": [row for row in rows if row.group.startswith("vllm meta-llama/Llama-3.1-70B")],
        "**test:** dense, vLLM, all cards": [
            row for row in dense if row.backend == "vllm" and "Llama-3.1-8B" not in row.model
        ],
        "fitted to: Llama-3.1-8B, vLLM 0.12, H200 (prompts mostly cached there)": [
            row for row in dense if row.backend == "vllm" and "Llama-3.1-8B" in row.model
        ],
        "fitted to: dense, TensorRT-LLM": [row for row in dense if row.backend == "trtllm"],
        "dense, SGLang": [row for row in dense if row.backend == "sglang"],
        "mixtures of experts, vLLM": [row for row in rows if row.backend == "vllm" and row not in dense],
    }
    head = [
        "| rows | closed loops | ours | its own | TPOT, ours | TPOT, its own | TTFT, ours | TTFT, its own |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = [*head, *(line(name, found, results) for name, found in tests.items() if found)]
    lines += [line(name, found, results) for name, found in sorted(groups.items())]
    lines.append(line("all", rows, results))
    why = Counter(one.why for one in results.values() if one.why)
    left = "; ".join(f"{reason} ({count:,})" for reason, count in (others + why).most_common())
    return "\n".join([*lines, "", f"Not replayed: {left}."])


@cache
def _dense_model(model: str) -> bool:
    config = known_models().get(CONFIGS.get(model, model))
    return config is not None and not Fields(config).integer("num_experts", 0)


def _is_dense(row: Row) -> bool:
    return _dense_model(row.model)


def main() -> int:
    """Run rows, print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose 'backend model card' has this in it")
    parser.add_argument("--dense", action="store_true", help="dense models alone")
    parser.add_argument("--every", type=int, default=40, help="every so manieth row; 1 for all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="a file to keep results in, line by line, and to go on from")
    parser.add_argument("--write", action="store_true", help="put the table into docs/fidelity.md")
    parser.add_argument("--fit", action="store_true", help="show the rows that the host's constants come from")
    parser.add_argument("--timing", choices=("tables", "roofline"), default="tables", help="roofline: nothing measured")
    parser.add_argument("--done", action="store_true", help="only rows that are in the file of results already")
    parser.add_argument("--show", action="store_true", help="print every row too")
    asked = parser.parse_args()
    if aic_version() is None:
        print("measured silicon needs aiconfigurator-core: pip install 'kvyard[aic]'")
        return 0
    if asked.fit:
        fit()
        return 0
    rows, others = read_rows()
    rows = [row for row in rows if asked.only in row.group and (not asked.dense or _is_dense(row))]
    rows = sorted(rows, key=lambda row: (row.group, row.precision, row.tensor, row.data))[:: asked.every]
    results = _kept(asked.results)
    if asked.done:
        rows = [row for row in rows if row.id in results]
    todo = [row for row in rows if row.id not in results]
    with ProcessPoolExecutor(asked.processes) as pool:
        for at, found in enumerate(pool.map(partial(work, kind=asked.timing), todo, chunksize=4), 1):
            results[found.id] = found
            if asked.results is not None:
                with asked.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            if sys.stderr.isatty():
                print(f"\r{at:,} of {len(todo):,}", end="", file=sys.stderr)
    results = {row.id: results[row.id] for row in rows}
    if asked.show:
        for row in rows:
            print(row, results[row.id])
    made = table(rows, results, others if asked.every == 1 and not asked.only and not asked.dense else Counter())
    print(made)
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    return 0


def _kept(path: Path | None) -> dict[str, Result]:
    if path is None or not path.is_file():
        return {}
    return {one[0]: Result(*one) for one in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    sys.exit(main())
