"""Closed loops against measured silicon: runs of ``aiconfigurator-core``, replayed, beside that package's own estimate.

``systems/silicon_sample.csv`` of aiconfigurator-core 0.12 has 5,221 measured runs: a model on a card under an engine, prompts
and answers of one length, so many requests under way at any time, and the mean TTFT and TPOT. Every aggregated one that says
its concurrency can be replayed as such a loop, with the flags that a stranger would give: the model, the card, the split.
Runs of InferenceMAX have its client and the flags of its scripts; others send ten rounds of exact lengths. Its own static
estimate is asked on the same rows. Rows that say too little are left out, by rules that don't look at our times (``left_out``).

    python benchmarks/silicon.py --processes 2           # at most 8 rows of a model on a card under a version of an engine
    python benchmarks/silicon.py --own --write           # with its own estimate; writes RESULTS-accuracy.md
    python benchmarks/silicon.py --only 'vllm Qwen/Qwen3-32B h100' --each 0

It needs ``pip install 'kvyard[aic]'``. benchmarks/RESULTS-accuracy.md states the assumptions. Constants are fitted to rows of
Qwen3-32B alone; everything else is a test.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from tempfile import gettempdir
from typing import Any, NamedTuple

from kvyard.engine.cards import find_card
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.weights import count_weights
from kvyard.engine.timing.aic import SYSTEMS, aic_version, known_models
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.error_range import KNEE, class_of
from kvyard.errors import KvyardError
from kvyard.replay.record import Record
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

HERE = Path(__file__).resolve().parent.parent
PAGE = HERE / "benchmarks" / "RESULTS-accuracy.md"
PUBLISHED = HERE / "benchmarks" / "data" / "published" / "silicon.jsonl"
BEGIN, END = "<!-- benchmarks/silicon.py: begin -->", "<!-- end -->"

ROUNDS = 10
"""Requests for each slot of a loop, as the clients of these runs send them. The first of each are the burst it starts with."""
DRAWN = 0.9
"""Mean length of InferenceMAX's prompts and answers, as a share of the longest."""
MOST = 3000
"""Requests of a replay at most, but for three rounds: rounds that are left out are taken to be like those after the burst."""
TRTLLM_TOKENS = 8192
"""Tokens of a pass that trtllm-serve has by default."""
MOST_OF_PEAK = 0.5
"""Share of the cards' arithmetic beyond which a run can't have computed all its prompts: all but nine of the sample's 2,775
stay below 0.47. Six are of Llama 3.1 8B in FP8 on an H200, up to 0.87; three would need 2.6 times the peak."""
NODE = 8
CONTRADICTS = 1.3
DRAFTED = {("trtllm", "1.1.0rc2.post2", "2026-01"), ("trtllm", "1.2.0rc6.post3", "2026-02")}
"""Engine, version and month of DeepSeek's runs with drafts."""

CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "nvidia/DeepSeek-R1-NVFP4": "nvidia/DeepSeek-V3.1-NVFP4",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Models of rows by the name of a config that comes with the package; others have their own."""
CHECKPOINTS = {
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("zhipuai/GLM-5", "fp4"): "nvidia/GLM-5-NVFP4",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
}
"""The config of rows whose precision is another checkpoint's than the model's own."""
QUANTISED = {"fp8": "FP8", "fp4": "NVFP4"}
FITTED = "Qwen/Qwen3-32B"
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
    ranged: bool = False
    """True for a run of InferenceMAX, whose lengths are drawn."""
    measured: str = ""
    """Day of the run, where it is said."""

    @property
    def group(self) -> str:
        return f"{self.backend} {self.model} {self.card}"

    @property
    def setting(self) -> tuple[Any, ...]:
        """What a row says but for when it was measured, and by which release."""
        model = self.model.replace("DeepSeek-V3", "DeepSeek-R1") if self.model.endswith("V3") else self.model
        split = (self.tensor, self.pipeline, self.data, self.experts)
        return self.backend, model, self.card, self.precision, self.isl, self.osl, self.concurrency, split


class Result(NamedTuple):
    """What became of a row: milliseconds of ours, of its own estimate, or why not."""

    id: str
    burst_ttft: float = 0.0
    burst_tpot: float = 0.0
    steady_ttft: float = 0.0
    steady_tpot: float = 0.0
    own_ttft: float = 0.0
    own_tpot: float = 0.0
    waiting: float = 0.0
    """Share of TTFT that requests wait before they are admitted."""
    why: str = ""
    """Why there is no replay."""
    own_why: str = ""
    """Why there is no estimate of its own."""

    @property
    def ttft(self) -> float:
        return self.burst_ttft / ROUNDS + (1 - 1 / ROUNDS) * self.steady_ttft

    @property
    def tpot(self) -> float:
        return self.burst_tpot / ROUNDS + (1 - 1 / ROUNDS) * self.steady_tpot


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
            tensor, data = ranks_of(line)
            day = re.search(r"measured=(\d{4}-\d\d-\d\d)", line["silicon_data_source"])
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
                    tensor=tensor,
                    pipeline=split_size(line["pp_size"]),
                    data=data,
                    experts=split_size(line["moe_ep_size"]),
                    ttft_ms=float(line["silicon_ttft_ms"]),
                    tpot_ms=float(line["silicon_tpot_ms"]),
                    ranged="measured=" in line["silicon_data_source"],
                    measured=day[1] if day else "",
                )
            )
    return left_out(found, others)


def ranks_of(line: Mapping[str, str]) -> tuple[int, int]:
    """Tensor and data ranks of a row.

    Rows of InferenceMAX with TP8 and EP8 say 64 tensor ranks, with experts split 8 by 8: many of them are in the sample a
    second time, to the last digit, with 8 ranks and EP8. The same goes for data ranks, and for 4 by 4.
    """
    tensor, data = split_size(line["tp_size"]), split_size(line["attention_dp_size"])
    slices, experts = split_size(line["moe_tp_size"]), split_size(line["moe_ep_size"])
    if 1 < slices == experts and tensor * data == slices * experts:
        return (1, experts) if data > 1 else (experts, 1)
    return tensor, data


def left_out(rows: Sequence[Row], others: Counter[str]) -> tuple[list[Row], Counter[str]]:
    """The rows that say what was measured, and how many others there are, by reason. It looks at rows alone, not at our times.

    - InferenceMAX measures single nodes: a row of more than eight cards counts those of prefill and decode workers together.
    - The sample has runs twice, from two dumps and under two names of a model.
    - DeepSeek under TensorRT-LLM has runs with drafts (InferenceX's pull request 392) and without, and no column tells them
      apart. Those of a day on which the same flags took a token 1.3 to 2.5 times as quickly as on others have them.
    - Where two runs of the same flags still differ by as much, what differs isn't said: the quicker one is left out.
    """
    seen: set[tuple[Any, ...]] = set()
    known: list[Row] = []
    slowest: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in rows:
        what = (row.backend, row.card, row.precision, row.isl, row.osl, row.concurrency, row.ttft_ms, row.tpot_ms)
        if row.ranged and row.tensor * row.pipeline * row.data > NODE:
            others["cards of prefill and decode workers, counted together"] += 1
        elif what in seen:
            others["a run that is in the sample twice"] += 1
        elif "DeepSeek" in row.model and (row.backend, row.version, row.measured[:7]) in DRAFTED:
            others["drafts that the row doesn't tell of"] += 1
        else:
            known.append(row)
            slowest[row.setting] = max(slowest[row.setting], row.tpot_ms)
        seen.add(what)
    clear = [row for row in known if row.tpot_ms * CONTRADICTS >= slowest[row.setting]]
    others["another run with the same flags took 1.3 times as long"] += len(known) - len(clear)
    return clear, others


def split_size(text: str) -> int:
    return max(1, int(float(text or 1)))


def name_of(row: Row) -> str:
    """The name of the config that comes with the package."""
    return CHECKPOINTS.get((row.model, row.precision)) or CONFIGS.get(row.model, row.model)


def config_of(row: Row) -> dict[str, Any]:
    """The model's config, quantised as the row says. Raises ``KvyardError`` for a model that the package has none of."""
    known, name = known_models(), name_of(row)
    if name not in known:
        raise KvyardError("a model whose config isn't in the package")
    config, dense = known[name], not Fields(known[name]).integer("num_experts", 0)
    beside = config.get("hf_quant_config", {}).get("quantization")
    if beside is not None and "quantization_config" not in config:
        # As a checkpoint says it that has no file of its own for it.
        stored = {"quant_method": "modelopt", "quant_algo": beside["quant_algo"], "ignore": beside["exclude_modules"]}
        if beside.get("kv_cache_quant_algo") == "FP8":
            stored["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {**config, "quantization_config": stored, "hf_quant_config": None}
    if not dense and row.precision == "fp8" and "quantization_config" not in config:
        return config | {"quantization_config": {"quant_method": "fp8"}}
    if dense and row.precision in QUANTISED and "quantization_config" not in config:
        # NVIDIA's checkpoints: scales measured beforehand, and an FP8 cache.
        quantised = {"quant_algo": QUANTISED[row.precision], "kv_cache_quant_algo": "FP8"}
        return config | {"hf_quant_config": {"quantization": quantised}}
    return config


# -- ours ---------------------------------------------------------------------------------------------------------------


def config_file(row: Row, config: Mapping[str, Any]) -> str:
    """The config as a file, since that is what a setting names."""
    folder = Path(gettempdir()) / "kvyard-silicon"
    folder.mkdir(exist_ok=True)
    path = folder / f"{row.model.replace('/', '--')}-{row.precision or 'plain'}.json"
    text = json.dumps(config)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def settings_of(row: Row, kind: str) -> dict[str, Any]:
    """Settings of a worker as the row says, all else at its default. Raises ``KvyardError`` for a model without a config."""
    config = config_of(row)
    settings: dict[str, Any] = {
        "model": config_file(row, config),
        "gpu": row.card,
        "backend": row.backend,
        "timing": kind,
        "tensor_parallel_size": row.tensor,
        "pipeline_parallel_size": row.pipeline,
        "dp_size": row.data,
        "enable_expert_parallel": row.experts > 1,
        "max_model_len": row.isl + row.osl + 256,
    }
    if config.get("hf_quant_config"):
        settings |= {"weight_dtype": row.precision, "kv_cache_dtype": "fp8"}
    if row.backend == "vllm" and row.concurrency // row.data > find_card(row.card).limits["max_num_seqs"]:
        settings["max_num_seqs"] = row.concurrency
    if row.backend == "vllm" and row.version[:1].isdecimal():
        settings["vllm_version"] = row.version
    if row.backend == "trtllm":
        settings["max_num_batched_tokens"] = max(TRTLLM_TOKENS, row.isl + 256)
    if row.ranged:
        settings |= script(row)
    elif row.backend != "sglang":
        # Tried on rows of Qwen3-32B under vLLM: 8,192 tokens give 139 % of TTFT error, 2,048 28 %, this 9 %.
        settings |= {"max_num_batched_tokens": row.isl + row.concurrency, "max_num_seqs": row.concurrency}
    return settings


def script(row: Row) -> dict[str, Any]:
    """Settings that InferenceMAX's scripts give engines (SemiAnalysisAI/InferenceX, benchmarks/single_node, at the rows'
    dates), as far as a replay has them.
    """
    deepseek, blackwell = "DeepSeek" in row.model, row.card.startswith("b")
    quantised_cache = {"kv_cache_dtype": "fp8"}
    if row.backend == "sglang":
        chunk, share = 0, 0.82
        if deepseek and row.precision == "fp4":
            chunk, share = 16384, 0.85
        elif deepseek:
            chunk, share = (8192, 0.95) if blackwell and row.tensor == 4 else (32768, 0.82)
        elif "GLM-5" in row.model and blackwell:
            chunk, share = 32768, 0.9 if row.precision == "fp4" else 0.85
        polls = {"scheduler_recv_interval": recv_interval(row)}
        if not chunk:
            return {"sglang": polls}
        chunks = {"chunked_prefill_size": chunk, "max_prefill_tokens": max(chunk, 16384)}
        return {"sglang": chunks | polls, "gpu_memory_utilization": share, **(quantised_cache if blackwell else {})}
    if row.backend == "trtllm":
        if "gpt-oss" in row.model:
            return {"max_num_batched_tokens": 20000} | (quantised_cache if blackwell else {})
        if not deepseek:
            return {}
        tokens, least = (row.concurrency + row.isl + 127) // 64 * 64, 8192 if row.measured >= "2026-01-21" else 0
        tokens = max(tokens, least)
        return {"max_num_batched_tokens": tokens, "max_num_seqs": min(tokens, 2048), **quantised_cache}
    if "gpt-oss" in row.model:
        return {"max_num_batched_tokens": 8192, **(quantised_cache if blackwell else {"max_num_seqs": row.concurrency})}
    if "MiniMax" in row.model and blackwell:
        return {"max_num_batched_tokens": 2 * row.isl, **quantised_cache}
    return {"max_num_seqs": row.concurrency} if "Kimi" in row.model else {}


def recv_interval(row: Row) -> int:
    """Decode passes between two looks for requests, in the scripts of SGLang on Blackwell; those of Hopper don't say."""
    if not row.card.startswith("b") or row.data > 1:
        return 1
    if "GLM-5" in row.model:
        return 10 if row.precision == "fp4" else 1
    if "DeepSeek" in row.model:
        return 30 if row.concurrency >= 16 and (row.precision == "fp4" or row.tensor == 8) else 10
    if row.precision == "fp8" and row.card == "b300":
        return 10
    most = 4 if row.card == "b200" and row.precision in QUANTISED else 15
    return 30 if row.concurrency > most else 10


def share_of_peak(row: Row) -> float:
    """The arithmetic that the row's requests need in a second, as a share of its cards' peak."""
    fields, card = Fields(config_of(row)), find_card(row.card)
    weights, experts = count_weights(fields), fields.integer("num_experts", 0)
    called = fields.integer("num_experts_per_tok", 0) / experts if experts else 0.0
    tokens = (row.isl + row.osl) * (DRAWN if row.ranged else 1.0)
    seconds = (row.ttft_ms + row.tpot_ms * (row.osl - 1)) / 1e3
    flops = 2.0 * (weights.linear + weights.experts * called) * tokens * row.concurrency / seconds
    return flops / (card.rate(row.precision or "bf16") * row.tensor * row.pipeline * row.data)


def closed_loop(row: Row, kind: str) -> Result:
    """The row's loop through our engine. Raises ``KvyardError`` for a row that no engine on its cards can have measured."""
    if share_of_peak(row) > MOST_OF_PEAK:
        raise KvyardError("more arithmetic than engines reach: prompts cached, or not one engine's concurrency")
    rounds = max(3, min(ROUNDS, MOST // row.concurrency))
    requests = [TraceRequest(str(at), 0, row.isl, row.osl) for at in range(rounds * row.concurrency)]
    config = settings_of(row, kind) | {"workers": 1, "concurrency": row.concurrency, "seed": 1}
    if row.ranged:
        config |= {"client": "inferencemax"}
    records = [one for one in replay(requests, config=config).records if one.status == "finished" and one.output > 1]
    records = [one for one in records if not one.id.startswith("warm-up")]
    first, rest = records[: row.concurrency], records[row.concurrency :]
    if not rest:
        raise KvyardError("no request fits")
    waits = sum(max(0, one.admitted - one.arrival - one.loading) for one in records)
    share = waits / max(1, sum(one.ttft for one in records))
    return Result(row.id, *loop_means(first), *loop_means(rest), waiting=round(share, 3))


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
    config, name = config_of(row), name_of(row)
    if config.get("hf_quant_config"):
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


def work(row: Row, kind: str, own: bool) -> Result:
    """Ours and, if asked for, its own, or why not. Runs in a process of its own."""
    logging.disable(logging.WARNING)  # the package tells of every table that it opens
    try:
        found = closed_loop(row, kind)
    except KvyardError as problem:
        found = Result(row.id, why=short_reason(str(problem)))
    if not own:
        return found._replace(own_why="not asked")
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
        ("SGLang caches states", "SGLang's pages for models with states aren't modelled"),
        ("can't be split over", "a split over ranks that attention can't be split over"),
    ):
        if says in text:
            return reason
    return text.splitlines()[0][:90] if text else "refused"


# -- figures ------------------------------------------------------------------------------------------------------------


def off(pairs: Iterable[tuple[float, float]]) -> str:
    """Mean and median of the errors of (ours, measured) without sign, and the median with it."""
    errors = [ours / measured - 1 for ours, measured in pairs if measured]
    if not errors:
        return ""
    sizes = [abs(error) for error in errors]
    return f"{fmean(sizes):.1%} / {median(sizes):.1%} ({median(errors):+.0%})"


def line(name: str, rows: Sequence[Row], results: dict[str, Result]) -> str:
    """A line of the table."""
    asked = [(row, results[row.id]) for row in rows if row.id in results]
    ours = [(row, one) for row, one in asked if not one.why]
    both = [(row, one) for row, one in ours if not one.own_why]
    cells = [
        name,
        f"{len(asked):,}",
        f"{len(ours):,}",
        off((one.tpot, row.tpot_ms) for row, one in ours),
        off((one.own_tpot, row.tpot_ms) for row, one in both),
        off((one.ttft, row.ttft_ms) for row, one in ours),
        off((one.own_ttft, row.ttft_ms) for row, one in both),
    ]
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[Row], results: dict[str, Result], others: Counter[str]) -> str:
    """The section of benchmarks/RESULTS-accuracy.md: errors by engine, model and card, by class, and what is left out."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        fitted = "fit: " if row.model == FITTED else ""
        groups[f"{fitted}{row.backend}, {row.model.partition('/')[2]}, {row.card}"].append(row)
        groups[f"**all {row.backend}, {'dense' if _is_dense(row) else 'mixtures'}**"].append(row)
    lines = [
        "| rows | closed loops | ours | TPOT, ours | TPOT, its own | TTFT, ours | TTFT, its own |",
        "|---|---|---|---|---|---|---|",
        *(line(name, found, results) for name, found in sorted(groups.items())),
        line("all", rows, results),
    ]
    why = Counter(one.why for one in results.values() if one.why)
    left = "; ".join(f"{reason} ({count:,})" for reason, count in (others + why).most_common())
    asked = Counter(row.model for row in rows)
    ours = Counter(row.model for row in rows if not results[row.id].why)
    models = ", ".join(f"{model.partition('/')[2]} {ours[model]} of {count}" for model, count in sorted(asked.items()))
    return "\n".join([*lines, "", f"Replayed, by model: {models}.", "", f"Not replayed: {left}."])


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
    parser.add_argument("--each", type=int, default=8, help="rows of a model on a card under an engine; 0 for all")
    parser.add_argument("--every", type=int, default=1, help="every so manieth of those")
    parser.add_argument("--longest", type=int, default=1024, help="leave out rows with more requests in flight")
    parser.add_argument("--own", action="store_true", help="ask for the package's own estimate, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="a file to keep results in, line by line, and to go on from")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the table into benchmarks/RESULTS-accuracy.md, and rows beside results.jsonl",
    )
    parser.add_argument(
        "--timing",
        choices=("tables", "roofline"),
        default="roofline",
        help="roofline: the default of a model and a card",
    )
    parser.add_argument("--done", action="store_true", help="only rows that are in the file of results already")
    parser.add_argument("--show", action="store_true", help="print every row too")
    asked = parser.parse_args()
    if aic_version() is None:
        print("measured silicon needs aiconfigurator-core: pip install 'kvyard[aic]'")
        return 0
    rows, others = read_rows()
    rows = [row for row in rows if asked.only in row.group and (not asked.dense or _is_dense(row))]
    rows = [row for row in rows if row.concurrency <= asked.longest]
    rows = sampled(rows, asked.each)[:: asked.every]
    results = _kept(asked.results)
    if asked.done:
        rows = [row for row in rows if row.id in results]
    todo = [row for row in rows if row.id not in results]
    with ProcessPoolExecutor(asked.processes) as pool:
        asks = [pool.submit(work, row, asked.timing, asked.own) for row in todo]
        for at, done in enumerate(as_completed(asks), 1):
            found = done.result()
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
    made = table(rows, results, Counter() if asked.only or asked.dense else others)
    print(made)
    if asked.write:
        lines = (json.dumps(row, separators=(",", ":")) for row in published_rows(rows, results))
        PUBLISHED.write_text("".join(f"{line}\n" for line in lines))
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    return 0


def published_rows(rows: Iterable[Row], results: Mapping[str, Result]) -> Iterable[dict[str, Any]]:
    """Rows as ``published.py`` has them, for ``published_errors.py``: who measured which model is a source."""
    for row in rows:
        one = results[row.id]
        if one.why:
            continue
        who, model = "inferencemax" if row.ranged else "aiconfigurator", row.model.partition("/")[2]
        model = model.replace("DeepSeek-V3", "DeepSeek-R1")  # the rows of both are one set of runs
        config = config_of(row)
        weights = row.precision if config.get("hf_quant_config") else None
        of = class_of(Deployment(model=config_file(row, config), gpu=row.card, weight_dtype=weights), row.backend)
        yield {
            "source": f"silicon {who} {model}",
            "cell": row.id,
            "arm": row.backend,
            "load": f"{row.isl}/{row.osl} x{row.concurrency}",
            "half": "fit" if row.model == FITTED else "test",
            "engine": row.backend,
            "version": row.version,
            "card": row.card,
            "dtype": of.dtype,
            "class": of.model_class,
            "knee": "above" if one.waiting >= KNEE else "below",
            "waiting": one.waiting,
            "metrics": {
                "ttft_mean_ms": [round(row.ttft_ms, 2), round(one.ttft, 2), 0],
                "tpot_mean_ms": [round(row.tpot_ms, 3), round(one.tpot, 3), 0],
            },
        }


def sampled(rows: Iterable[Row], each: int) -> list[Row]:
    """At most ``each`` rows of a model on a card under an engine, evenly spread over splits, lengths and loads."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row.group} {row.version} {row.precision}"].append(row)
    picked = []
    for _, group in sorted(groups.items()):
        group.sort(key=lambda row: (row.tensor, row.data, row.isl, row.osl, row.concurrency))
        count = min(each or len(group), len(group))
        picked += [group[(2 * at + 1) * len(group) // (2 * count)] for at in range(count)]
    return picked


def _kept(path: Path | None) -> dict[str, Result]:
    if path is None or not path.is_file():
        return {}
    return {one[0]: Result(*one) for one in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    sys.exit(main())
