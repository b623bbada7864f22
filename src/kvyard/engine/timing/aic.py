"""Measured operators of ``aiconfigurator-core`` (extra ``kvyard[aic]``), asked on a grid and compiled into a pass table.

That package has tables of single operators for many cards and engines, and an estimator over them. Here it is asked for the
parts of a pass: attention of prompts and of decode steps, the output layer, and all the rest by tokens. What it answers for a
shape that no card can compute so fast is raised to the card's peak.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec

from kvyard.engine.cards import Card
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.split import Parallelism
from kvyard.engine.timing.operators import Operators
from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.errors import KvyardError

SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l4": "l4",
    "l40s": "l40s",
    "rtxpro6000": "rtx_pro_6000_server",
}
"""Our name of a card to theirs."""
QUANTISED = "_hf_quant_config.json"
QUANT_MODES = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8_wo", "int4": "int4_wo", "fp4": "nvfp4"}
"""Our name of a weight dtype to theirs."""
STORED = {
    "": ("bfloat16", "bfloat16"),
    "fp8": ("fp8", "fp8"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "modelopt_fp8": ("fp8_static", "fp8"),
    "modelopt_nvfp4": ("nvfp4", "nvfp4"),
}
"""Quantisations of checkpoints to their names there, for matrices and for experts."""
SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
)
"""Fields by which a model is found among theirs."""
TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288, 16384),
)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NEW = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PAST = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def aic_version() -> str | None:
    """Return the version of ``aiconfigurator-core``; ``None`` if it isn't installed."""
    try:
        return version("aiconfigurator-core")
    except Exception:  # PackageNotFoundError, or metadata that can't be read
        return None


@cache
def known_engines(system: str) -> dict[str, list[str]]:
    """Return the engines whose kernels were measured on a card, by its name there, each with versions; empty if none were."""
    gemm = files("aiconfigurator_core").joinpath("systems", "data", system, "gemm")
    if not gemm.is_dir():
        return {}
    folders = sorted((folder for folder in gemm.iterdir() if folder.is_dir()), key=lambda folder: folder.name)
    return {folder.name: sorted(version.name for version in folder.iterdir() if version.is_dir()) for folder in folders}


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the models that come with the package, by name, each with its config. Raises ``KvyardError`` if it is missing.

    Where a checkpoint says in a file of its own how it is quantised, that is under ``hf_quant_config``.
    """
    if aic_version() is None:
        raise KvyardError("measured tables need aiconfigurator-core: pip install 'kvyard[aic]'")
    folder = files("aiconfigurator_core").joinpath("model_configs")
    configs = {}
    for entry in sorted(folder.iterdir(), key=lambda file: file.name):
        if entry.name.endswith("_config.json") and not entry.name.endswith(QUANTISED):
            stem = entry.name.removesuffix("_config.json")
            config = json.loads(entry.read_bytes())  # some have Infinity in them, which msgspec refuses
            quantised = folder.joinpath(stem + QUANTISED)
            if quantised.is_file():
                config["hf_quant_config"] = json.loads(quantised.read_bytes())
            configs[stem.replace("--", "/", 1)] = config
    return configs


def find_model(config: Mapping[str, Any], weight_dtype: str | None = None) -> str | None:
    """Return the name under which the package knows a model of this shape and quantisation; ``None`` if it doesn't.

    With a ``weight_dtype`` a model that isn't quantised is preferred: the type is passed beside it.
    """
    asked = _shape(config)
    stored = "" if weight_dtype is not None else _stored(config)
    alike = [name for name, other in known_models().items() if _shape(other) == asked]
    return min(alike, key=lambda name: (_stored(known_models()[name]) != stored, len(name)), default=None)


def _shape(config: Mapping[str, Any]) -> tuple[Any, ...]:
    fields = Fields(config)
    return (fields.model_type, *(fields.get(name) for name in SHAPE))


def _stored(config: Mapping[str, Any]) -> str:
    """Return the quantisation of a checkpoint, a word of ``STORED``; empty for one without."""
    own = config.get("quantization_config")
    if isinstance(own, Mapping):
        method = str(own.get("quant_method", "")).lower()
        if not method.startswith("modelopt"):
            return "fp8_block" if method == "fp8" and own.get("weight_block_size") else method
        return f"modelopt_{own.get('quant_algo', '')}".lower()
    beside = config.get("hf_quant_config")
    inner = beside.get("quantization") if isinstance(beside, Mapping) else None
    return f"modelopt_{inner.get('quant_algo', '')}".lower() if isinstance(inner, Mapping) else ""


def _stored_cache(config: Mapping[str, Any]) -> str:
    """Return the cache type that the checkpoint was calibrated for; empty if it has none."""
    beside = config.get("hf_quant_config")
    inner = beside.get("quantization") if isinstance(beside, Mapping) else None
    return str(inner.get("kv_cache_quant_algo") or "").lower() if isinstance(inner, Mapping) else ""


def compile_aic(
    model: str,
    config: Mapping[str, Any],
    card: Card,
    of: Operators,
    split: Parallelism,
    *,
    backend: str = "vllm",
    weight_dtype: str | None = None,
    kv_cache_dtype: str = "auto",
) -> PassTable:
    """Return the pass table of ``model`` (one of ``known_models``, of the shape of ``config``) on ``card``. Takes a second or
    two.

    Raises ``KvyardError`` where the package is missing, or has no tables for that card, engine, model or split.
    """
    system = SYSTEMS.get(card.name)
    if system is None or backend not in known_engines(system):
        cards = [name for name, theirs in SYSTEMS.items() if backend in known_engines(theirs)]
        there = f"; for this card it has {', '.join(known_engines(system))}" if system and known_engines(system) else ""
        raise KvyardError(
            f"aiconfigurator-core has no tables of {backend} for {card.title}; it has {', '.join(cards) or 'none of it'}{there}"
        )
    if not of.experts:
        split = msgspec.structs.replace(split, data_parallel_size=1)  # such ranks have nothing to do with one another
    handle = _Handle(model, system, backend, split, _modes(model, config, weight_dtype, kv_cache_dtype))
    sources = split.data_parallel_size
    peak = card.rate("bf16") / 1e6
    raised = 0

    def possible(us: float, pairs: float) -> float:
        nonlocal raised
        least = (
            sum(pairs * attention.prompt_flops * attention.count for attention in of.attention if not attention.window)
            / peak
        )
        raised += us < least
        return max(us, least)

    prompt = tuple(
        tuple(possible(handle.prompt(new, past), new * past + 0.5 * new * new) for past in PAST) for new in NEW
    )
    return PassTable(
        source=f"tables of aiconfigurator-core {aic_version()}, {handle.described}",
        coverage=handle.coverage + (f"; {raised} impossible values raised to the card's peak" if raised else ""),
        tokens=Curve(TOKENS, tuple(handle.rest(tokens) for tokens in TOKENS)),
        sequences=Curve(SEQUENCES, tuple(handle.head(sequences) for sequences in SEQUENCES)),
        prompt=Plane(NEW, PAST, prompt),
        decode=Plane(
            BATCHES, CONTEXTS, tuple(tuple(handle.decode(batch, context) for context in CONTEXTS) for batch in BATCHES)
        ),
        experts=Curve(tuple(point * sources for point in TOKENS), tuple(handle.experts(point) for point in TOKENS))
        if sources > 1
        else None,
    )


def _modes(model: str, config: Mapping[str, Any], weight_dtype: str | None, kv_cache_dtype: str) -> dict[str, str]:
    """Their names of the types that must be passed: what was asked for, and what ``config`` has and ``model`` doesn't."""
    modes: dict[str, str | None] = {}
    if weight_dtype is not None:
        mode = QUANT_MODES.get(weight_dtype)
        modes |= {"gemm_quant_mode": mode, "moe_quant_mode": mode or "w4a16_mxfp4"}  # mxfp4 is for experts alone
    elif _stored(config) != _stored(known_models()[model]):
        linear, routed = STORED.get(_stored(config), ("", ""))
        if not linear:
            raise KvyardError(f"aiconfigurator-core has no {model} quantised as {_stored(config)}: say weight_dtype")
        modes |= {"gemm_quant_mode": linear, "moe_quant_mode": routed}
    cache = kv_cache_dtype if kv_cache_dtype != "auto" else _stored_cache(config)
    if cache:
        modes["kvcache_quant_mode"] = "fp8" if "fp8" in cache else cache
    return {name: mode for name, mode in modes.items() if mode}


class _Handle:
    """One compiled model of the package, asked for parts of a pass in microseconds."""

    def __init__(
        self,
        model: str,
        system: str,
        backend: str,
        split: Parallelism,
        modes: Mapping[str, str],
    ) -> None:
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it logs every table that it opens
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.perf_database import get_latest_database_version

        experts = split.expert_ranks
        options: dict[str, Any] = {
            "tp_size": split.tensor_parallel_size,
            "pp_size": split.pipeline_parallel_size,
            "attention_dp_size": split.data_parallel_size,
            "moe_tp_size": 1 if split.enable_expert_parallel else experts,
            "moe_ep_size": experts if split.enable_expert_parallel else 1,
        }
        options |= modes
        try:
            self._engine = EngineHandle.compile(model, system, backend, **options)
            self._measured: set[str] = set()
            self._derived: set[str] = set()
            self.prompt(512, 0)
            self.decode(8, 512)
        except Exception as problem:  # it raises what it likes: missing tables, unknown modes, panics of its core
            there = ", ".join(f"{name} {' '.join(versions)}" for name, versions in known_engines(system).items())
            raise KvyardError(
                f"aiconfigurator-core has no tables for {model} on {system} with {backend}, "
                f"tensor_parallel_size {split.tensor_parallel_size}{''.join(f', {mode}' for mode in modes.values())}: "
                f"{str(problem).splitlines()[0][:120]}; for that card it has {there}"
            ) from None
        self.described = f"{backend} {get_latest_database_version(system, backend)}, {system}, {model}"

    @property
    def coverage(self) -> str:
        """Describe which operators were measured and which follow from others."""
        return f"measured: {_names(self._measured)}; estimated by it: {_names(self._derived - self._measured)}"

    def prompt(self, new: int, past: int) -> float:
        return self._attention(self._context(new, past))

    def decode(self, batch: int, context: int) -> float:
        return self._attention(self._noted(self._engine.decode_step_per_op(batch, context, 2)))

    def head(self, sequences: int) -> float:
        step = self._engine.decode_step_per_op(sequences, 64, 2)
        return _micros(row for row in step if "logits" in row[0])

    def rest(self, tokens: int) -> float:
        rows = self._context(tokens, 0)
        return _micros(row for row in rows if "attention" not in row[0] and "logits" not in row[0])

    def experts(self, tokens: int) -> float:
        """Return the time of experts, and the exchanges before and after them, for ``tokens`` tokens of each data rank."""
        return _micros(row for row in self._context(tokens, 0) if "moe" in row[0])

    def _context(self, new: int, past: int) -> list[Any]:
        rows, _ = self._engine.run_static_per_op(batch_size=1, isl=new + past, osl=1, prefix=past, mode="static_ctx")
        return self._noted(rows)

    def _noted(self, rows: list[Any]) -> list[Any]:
        for name, _, _, source in rows:
            plain = str(name).partition("_")[2]
            (self._measured if source == "silicon" else self._derived).add(plain)
        return rows

    @staticmethod
    def _attention(rows: Iterable[Any]) -> float:
        return _micros(row for row in rows if "attention" in row[0])


def _micros(rows: Iterable[Any]) -> float:
    return sum(1e3 * float(row[1]) for row in rows)


def _names(of: set[str]) -> str:
    return ", ".join(sorted(of)) or "none"
