"""Shapes: cards and parallelism of one worker, and its best possible performance alone."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvyard.clock import MS, SECOND
from kvyard.engine.config import EngineConfig
from kvyard.engine.models.memory import NEWEST, tokens_in_flight
from kvyard.engine.models.planning import longest_request
from kvyard.engine.timing import make_timing
from kvyard.errors import KvyardError
from kvyard.events.tier import LOWER_TIERS
from kvyard.lab.plan.traffic import Traffic
from kvyard.replay.report.report import REJECTED
from kvyard.replay.report.slo import Limit
from kvyard.replay.settings import make_config

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Cards that share a model inside one node."""
HOST = LOWER_TIERS[0]
KV_DTYPES = ("auto", "fp8")
HOST_GIB = (0, 8, 16, 32, 64, 128, 256)
"""Host memory per card to try; nodes of eight cards have 1 to 2 TiB."""
SAMPLED = 2_000
"""Requests whose times alone are computed; more are sampled evenly."""


class Shape(msgspec.Struct, frozen=True):
    """Shape of one worker."""

    gpu: str
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    host_gib: int = 0
    """Host memory per card."""
    stages: int = 1
    """Pipeline stages; not searched."""
    ranks: int = 1
    """Data-parallel ranks; not searched."""

    @property
    def cards(self) -> int:
        """Number of cards."""
        return self.tensor_parallel_size * self.stages * self.ranks

    @property
    def host_gib_per_rank(self) -> int:
        """Host memory of each data-parallel rank; of a worker without these."""
        return self.host_gib * self.tensor_parallel_size * self.stages

    def settings(self) -> dict[str, object]:
        """Return the settings of a worker of this shape."""
        found: dict[str, object] = {"gpu": self.gpu, "tensor_parallel_size": self.tensor_parallel_size}
        if self.kv_cache_dtype != "auto":
            found["kv_cache_dtype"] = self.kv_cache_dtype
        if self.host_gib:
            found["host_bytes"] = f"{self.host_gib_per_rank}GiB"
        return found

    @property
    def split(self) -> str:
        """Return how the model is split over the cards: ``TP2``, ``TP2 PP2``."""
        parts = [f"TP{self.tensor_parallel_size}"]
        parts += [f"PP{self.stages}"] if self.stages > 1 else []
        return " ".join(parts + ([f"DP{self.ranks}"] if self.ranks > 1 else []))

    def __str__(self) -> str:
        parts = [self.split]
        if self.kv_cache_dtype != "auto":
            parts.append(f"{self.kv_cache_dtype} KV cache")
        if self.host_gib:
            parts.append(f"{self.host_gib_per_rank} GiB of host memory{' a rank' if self.ranks > 1 else ''}")
        return f"{self.gpu.upper()} {', '.join(parts)}"


class Alone(msgspec.Struct, frozen=True):
    """Lower bounds of a worker of a shape: no other request delays it, and its cache has every prefix ever seen."""

    engine: EngineConfig
    ttft_ms: Sequence[float]
    """TTFT of each request that was examined, in order."""
    itl_ms: float
    """Between two tokens of one short request."""
    prefill_s: float
    """Seconds of one worker that all prompts take."""
    decode_s: float
    """Seconds of one worker that all answers take, at the largest batch that its cache and ``itl`` limit allow."""
    max_model_len: int | None = None
    """Longest request that vLLM can be started with; ``None`` if that is the model's own length, or the one that was set."""

    @property
    def busy_s(self) -> float:
        """Seconds of one worker for the whole trace, at best."""
        return self.prefill_s + self.decode_s

    def floor(self, limit: Limit) -> float | None:
        """Return what the metric of ``limit`` can't go below; ``None`` if that isn't known."""
        kind, _, part = limit.name.partition("_")
        if kind == "ttft" and part.startswith("p"):
            return float(np.percentile(self.ttft_ms, float(part[1:])))
        if kind == "ttft" and part in ("mean", "max"):
            return float(np.mean(self.ttft_ms) if part == "mean" else np.max(self.ttft_ms))
        if kind in ("itl", "tpot") and part in ("mean", "p50", "p90", "p95", "p99", "max"):
            return self.itl_ms
        return None


def alone(shape: Shape, base: Mapping[str, object], traffic: Traffic, itl_limit_ms: float | None) -> Alone:
    """Return the best that a worker of ``shape`` can do. Raises ``KvyardError`` if that worker is impossible."""
    config = make_config({**base, **shape.settings(), "workers": 1})
    engine = config.workers[0].engine
    timing = make_timing(engine.timing, engine.capacity_tokens)
    budget = engine.tokens_per_pass
    step = max(1, traffic.requests // SAMPLED)
    lengths = zip(traffic.inputs[::step].tolist(), traffic.new[::step].tolist(), strict=True)
    times = []
    for length, new in lengths:
        done, ns = length - new, 0
        while done < length:
            chunk = min(budget, length - done)
            ns += timing.pass_ns([(chunk, done)], 0, 0, 0)
            done += chunk
        times.append(ns / MS)
    context = int(traffic.inputs.mean() + traffic.outputs.mean() / 2)
    batch = max(1, min(engine.max_num_seqs, engine.capacity_tokens // max(1, context)))
    while batch > 1 and itl_limit_ms is not None:
        if timing.pass_ns((), batch, batch * context, context) / MS <= itl_limit_ms:
            break
        batch = max(1, batch * 3 // 4)
    decode_ns = timing.pass_ns((), batch, batch * context, context) / batch * float(traffic.outputs.sum())
    shortest = int(traffic.inputs.min()) + 1
    return Alone(
        engine=engine,
        ttft_ms=[ms + engine.timing.request_ms() for ms in times],
        itl_ms=timing.pass_ns((), 1, shortest, shortest) / MS,
        prefill_s=sum(times) * step * MS / SECOND / shape.ranks,
        decode_s=decode_ns / SECOND / shape.ranks,
        max_model_len=_fitted_length(engine, shape, base, traffic),
    )


def in_flight(engine: EngineConfig, shape: Shape, base: Mapping[str, object]) -> int:
    """Return the unsettled tokens for which an engine of ``shape`` keeps blocks in windows."""
    version = str(base.get("vllm_version") or NEWEST)
    return tokens_in_flight(engine.max_num_batched_tokens, shape.stages, version, engine.async_scheduling is not False)


def _fitted_length(engine: EngineConfig, shape: Shape, base: Mapping[str, object], traffic: Traffic) -> int | None:
    """Return the length of request that vLLM has to be started with because its cache doesn't hold a longer one; ``None`` if
    it holds one of the model's length. Raises ``KvyardError`` if vLLM wouldn't start, or too many prompts wouldn't fit.
    """
    if engine.backend != "vllm" or engine.max_model_len is None:
        return None
    most = longest_request(engine.specs, engine.max_model_len, in_flight(engine, shape, base), engine.num_gpu_blocks)
    if most >= engine.max_model_len:
        return None
    if base.get("max_model_len") is not None:
        raise KvyardError(
            f"its cache holds a request of {most:,} tokens at most, and vLLM doesn't start with --max-model-len "
            f"{engine.max_model_len}"
        )
    share = traffic.too_long(most) / traffic.requests
    if share > REJECTED:
        raise KvyardError(
            f"its cache holds a request of {most:,} tokens at most, and {share:.1%} of the prompts are longer"
        )
    return most


def shapes(
    gpus: Sequence[str], degree: int | None = None, stages: int | None = None, ranks: int | None = None
) -> list[Shape]:
    """Return the plain shapes to look at first: each card at ``degree`` of tensor parallelism, or at each if it is open."""
    degrees = TENSOR_PARALLEL if degree is None else (degree,)
    return [Shape(gpu, degree, stages=stages or 1, ranks=ranks or 1) for gpu in gpus for degree in degrees]


def roomier(shape: Shape, base: Mapping[str, object]) -> list[list[Shape]]:
    """Return ``shape`` with more and more host memory, for each KV cache type, as far as ``base`` leaves them open."""
    dtypes = KV_DTYPES if base.get("kv_cache_dtype") is None else ("auto",)
    hosts = HOST_GIB if base.get("host_bytes") is None and base.get("host_blocks") is None else (0,)
    replace = msgspec.structs.replace
    return [[replace(shape, kv_cache_dtype=dtype, host_gib=host) for host in hosts] for dtype in dtypes]


def check_gpus(text: str) -> list[str]:
    """Return the cards of a list with commas, by their usual names. Raises ``KvyardError``."""
    from kvyard.engine.cards import find_card

    names = [find_card(part.strip()).name for part in text.split(",") if part.strip()]
    if not names:
        raise KvyardError("which cards may the fleet have? Say --gpu h100, or several as in --gpu h100,h200")
    return list(dict.fromkeys(names))
