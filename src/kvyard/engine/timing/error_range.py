"""Error of predicted times, by published runs of comparable fleets.

``published_errors.json`` is made by ``benchmarks/published_errors.py`` from every published measurement that no constant
was fitted to. It has ranges of measured / predicted by class of run. A class is named from coarse to fine: load, kind of
model, engine, type of weights, card. Where a class has too few runs, the next coarser one answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import mixers
from kvyard.engine.models.weights import WEIGHT_BITS, weight_bits
from kvyard.engine.timing.deployment import Deployment

Load = Literal["below", "above"]
"""Side of the knee: above if requests wait for ``KNEE`` of their TTFT or longer before they are admitted."""
KNEE = 1 / 3
LEVEL = 0.8
"""Share of comparable runs that a range holds."""
FAMILIES = {
    "ttft": "ttft",
    "tpot": "tpot",
    "itl": "tpot",
    "e2e": "e2e",
    "requests_per_s": "throughput",
    "output_tokens_per_s": "throughput",
    "input_tokens_per_s": "throughput",
}
"""Family of published figures that each metric or latency is judged by."""
TAILS = ("p90", "p95", "p99", "max")
"""Statistics that are judged by published tails; all others by means and medians."""
STATES = ("mamba", "mamba1", "both", "delta")
MODEL_WORDS = {
    "dense": "dense models",
    "mixture": "mixtures of experts",
    "mla": "models with latent attention",
    "state": "models with states",
}
ENGINE_WORDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


class RunClass(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that runs are compared by."""

    card: str
    dtype: str
    """Type of weights; of the experts' if they differ."""
    model_class: str
    """``dense``, ``mixture``, ``mla`` or ``state``."""
    engine: str
    """A backend."""


class ErrorRange(msgspec.Struct, frozen=True, kw_only=True):
    """Measured / predicted of comparable runs: the range that holds ``LEVEL`` of them."""

    low: float
    high: float
    median: float
    runs: int
    sources: int
    of: tuple[str, ...]
    """Class of those runs: load, kind of model, engine, type of weights, card, as far as the class is that fine."""

    def around(self, value: float) -> tuple[float, float]:
        """Return the range of a predicted ``value``."""
        return value * self.low, value * self.high

    @property
    def words(self) -> str:
        """The class in words."""
        return class_words(self.of)


class PublishedRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range as ``published_errors.json`` has it."""

    metric: str
    statistic: str
    of: tuple[str, ...]
    low: float
    median: float
    high: float
    runs: int
    sources: tuple[str, ...]


class PublishedOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Distance between the published ratio of two arms of one table and ours: errors that both arms share cancel in it."""

    metric: str
    load: str
    factor: float
    """``LEVEL`` of the pairs lie within this factor."""
    safe: float
    """Beyond this factor between ours, nine pairs in ten were in the right order."""
    pairs: int
    sources: tuple[str, ...]


class PublishedErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``published_errors.json``."""

    ranges: tuple[PublishedRange, ...]
    order: tuple[PublishedOrder, ...] = ()


def error_range(metric: str, *, card: str, dtype: str, model_class: str, engine: str, load: Load) -> ErrorRange | None:
    """Return the range of ``metric`` (``ttft_mean``, ``tpot_p99``, ``output_tokens_per_s``) in published runs of this class,
    or of the finest class around it that has enough runs. ``None`` without evidence.
    """
    family, statistic = _judged_by(metric)
    ranges = _ranges()
    of = (load, model_class, engine, dtype, card)
    for length in range(len(of), 0, -1):
        published = ranges.get((family, statistic, of[:length]))
        if published is not None:
            return ErrorRange(
                low=published.low,
                high=published.high,
                median=published.median,
                runs=published.runs,
                sources=len(published.sources),
                of=published.of,
            )
    return None


def order_error(metric: str, load: Load) -> PublishedOrder | None:
    """Return how far ratios of two arms were off that differ in routing or caching alone; ``None`` without evidence."""
    family, _ = _judged_by(metric)
    return next((order for order in published_errors().order if (order.metric, order.load) == (family, load)), None)


def class_of(deployment: Deployment, backend: str) -> RunClass:
    """Return the class of a deployment on an engine."""
    fields = Fields(deployment.config())
    _, bits = weight_bits(fields, deployment.weight_dtype)
    dtype = next((name for name, known in WEIGHT_BITS.items() if known == bits), f"{bits:g} bits")
    return RunClass(card=deployment.gpu, dtype=dtype, model_class=model_class(deployment.config()), engine=backend)


def model_class(config: Mapping[str, Any]) -> str:
    """Return ``state``, ``mla``, ``mixture`` or ``dense``: the first of them that holds of a model's config."""
    fields = Fields(config)
    kinds = set(mixers(fields))
    if kinds.intersection(STATES):
        return "state"
    return "mla" if "mla" in kinds else "mixture" if fields.integer("num_experts", 0) else "dense"


def class_words(of: tuple[str, ...]) -> str:
    """Return a class in words: ``dense models in bf16 on vLLM, h100, below the knee``."""
    load, *rest = of
    named = dict(zip(("model", "engine", "dtype", "card"), rest, strict=False))
    words = MODEL_WORDS.get(named.get("model", ""), "all models")
    if "dtype" in named:
        words += f" in {named['dtype']}"
    if "engine" in named:
        words += f" on {ENGINE_WORDS.get(named['engine'], named['engine'])}"
    if "card" in named:
        words += f", {named['card']}"
    return f"{words}, {load} the knee"


def _judged_by(metric: str) -> tuple[str, str]:
    kind, _, statistic = metric.partition("_")
    family = FAMILIES.get(metric) or FAMILIES.get(kind, metric)
    return family, "tail" if statistic in TAILS else "central"


@cache
def published_errors() -> PublishedErrors:
    """Return the errors that the package ships."""
    data = (files("kvyard.engine.timing") / "published_errors.json").read_bytes()
    return msgspec.json.decode(data, type=PublishedErrors)


@cache
def _ranges() -> dict[tuple[str, str, tuple[str, ...]], PublishedRange]:
    return {(entry.metric, entry.statistic, entry.of): entry for entry in published_errors().ranges}
