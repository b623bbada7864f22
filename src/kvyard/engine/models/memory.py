"""Memory that vLLM takes on a card beside weights and cache: activations, libraries and CUDA graphs, by release.

vLLM measures these by a trial pass; here they are computed. The constants were chosen on the odd rows of published start logs
and are checked on the even ones (``benchmarks/start_logs.py``). Activations are at their peak either inside a layer of the
largest pass or in the sampler, which holds several copies of the logits of all sequences.
"""

from typing import NamedTuple

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import mixers
from kvyard.engine.models.weights import WEIGHT_BITS, MlpShape, mlp_shape, weight_bits
from kvyard.errors import KvyardError

GIB = 2**30
NEWEST = "0.32"
LAYER_HIDDEN = 4.25
"""Buffers of the residual stream's size that live inside a layer, attention's included."""
SMALL_CARD = 70 * GIB
"""vLLM's own limit between large cards and others."""
SMALL_CARD_CONTEXT = int(0.65 * GIB)
GRAPHS = int(0.45 * GIB)
GRAPHS_PER_LAYER = int(0.0155 * GIB)
GRAPHS_OF_EXPERTS = int(0.4 * GIB)


class Release(NamedTuple):
    """Memory use and defaults of vLLM from release ``since`` up to that of the next row."""

    since: tuple[int, ...]
    logit_bytes: float
    """Bytes of the sampler for each sequence and entry of the vocabulary."""
    context: int
    """Bytes of CUDA and its libraries on a card that works alone."""
    communication: int
    """Bytes of CUDA, its libraries and the buffers of collectives on a tensor-parallel rank."""
    counts_graphs: bool
    """True if the cache shrinks by CUDA graphs; else they use memory that utilization leaves free."""
    utilization: float
    """Default of ``gpu_memory_utilization``."""
    decides_ahead: bool = True
    """Default of ``async_scheduling``."""
    windows_beside_connectors: bool = False
    """True if window layers keep blocks of their own beside a KV connector; else the connector makes them keep all tokens."""
    keeps_batches: bool = False
    """True if windows keep blocks of all batches in flight, not of one."""


RELEASES = (
    Release((0, 0), 38.4, int(0.13 * GIB), int(0.55 * GIB), False, 0.9, False),
    Release((0, 14), 38.4, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 17), 14.9, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 18), 14.9, int(0.25 * GIB), int(2.1 * GIB), False, 0.9),
    Release((0, 20), 14.9, int(0.25 * GIB), int(2.1 * GIB), True, 0.92),
    Release((0, 23), 14.9, int(0.25 * GIB), int(2.1 * GIB), True, 0.92, windows_beside_connectors=True),
    Release(
        *((0, 26), 14.9, int(0.25 * GIB), int(2.1 * GIB), True, 0.92),
        windows_beside_connectors=True,
        keeps_batches=True,
    ),
)
"""vLLM's pull request 38284, in 0.20, counts graphs and raises the default share; 41847, in 0.23, leaves the hybrid cache
manager on beside connectors that know it; 47728, in 0.26, keeps batches in flight.
"""


def find_release(version: str) -> Release:
    """Return the row of ``RELEASES`` that a version such as ``0.19`` falls under. Raises ``KvyardError`` for other texts."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        raise KvyardError(f"vllm_version is a release such as {NEWEST}, not {version!r}")
    number = tuple(map(int, parts))
    return max(release for release in RELEASES if release.since <= number)


def tokens_in_flight(batched: int, stages: int = 1, version: str = NEWEST, ahead: bool = True) -> int:
    """Return the tokens, of passes of ``batched``, that are scheduled and not settled, for which windows keep blocks: each of
    the pipeline's ``stages`` computes a pass, and with ``ahead`` (async scheduling) one more is decided on.
    """
    return batched * (stages + ahead) if find_release(version).keeps_batches else batched


def reserve(
    fields: Fields,
    *,
    memory: int,
    version: str,
    ranks: int,
    batched: int,
    sequences: int,
    weight_dtype: str | None = None,
    samples: bool = True,
) -> int:
    """Return the bytes of a card that neither weights nor cache may take.

    ``ranks`` share each layer; ``batched`` and ``sequences`` are the limits of a pass; ``samples`` is False on pipeline stages
    before the last.
    """
    release = find_release(version)
    context = release.communication if ranks > 1 else release.context if memory >= SMALL_CARD else SMALL_CARD_CONTEXT
    graphs = (
        GRAPHS + GRAPHS_PER_LAYER * len(mixers(fields)) + GRAPHS_OF_EXPERTS * bool(fields.integer("num_experts", 0))
    )
    hidden = fields.integer("hidden_size")
    candidates = (mlp_shape(fields, index, kind) for index, kind in enumerate(mixers(fields)))
    shapes = [shape for shape in candidates if shape is not None]
    experts = 0
    if weight_bits(fields, weight_dtype)[1] != WEIGHT_BITS["mxfp4"]:  # those kernels work in place
        experts = max((_expert_buffers(shape, hidden, ranks, batched) for shape in shapes), default=0)
    peak = 2 * batched * (3 * _width(shapes, ranks) + int(LAYER_HIDDEN * hidden)) + experts
    if samples:
        logits = int(release.logit_bytes * sequences * fields.integer("vocab_size"))
        peak = max(peak, 2 * batched * hidden + logits + experts)
    return context + peak + graphs * release.counts_graphs


def _width(shapes: list[MlpShape], ranks: int) -> int:
    """Return the widest dense MLP of a rank."""
    return max((shape.dense for shape in shapes), default=0) // ranks


def _expert_buffers(shape: MlpShape, hidden: int, ranks: int, batched: int) -> int:
    """Return the bytes of the fused experts' workspace, kept between layers: both products of each pair and its result."""
    return (
        2 * batched * shape.chosen * (3 * shape.expert_width // ranks + (shape.latent or hidden))
        if shape.experts
        else 0
    )
