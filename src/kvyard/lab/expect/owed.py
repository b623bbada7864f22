"""Hits that an engine owes by its own rules: a replay of the traffic, and the levels above it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.lab.expect.traffic import Tokens, shared_tokens
from kvyard.replay.record import Record
from kvyard.replay.report.plain_cache import PlainCache
from kvyard.replay.run import Progress, SimulatedRun, replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest

ENDLESS = 1 << 32
"""Blocks of a pool that never evicts."""
PROBED = 64
"""Multiples of the hit granularity that are tried for the shortest prefix that can hit."""


class Replayed(msgspec.Struct, kw_only=True):
    """One replay of a traffic: prompt tokens that each request found."""

    hits: Tokens
    """By request, on the device and in lower tiers; -1 for a request that wasn't admitted."""
    device: int
    loaded: int
    evicted: int
    """Blocks."""
    run: SimulatedRun

    @property
    def admitted(self) -> npt.NDArray[np.bool_]:
        """True for requests that were admitted."""
        return self.hits >= 0

    @property
    def total(self) -> int:
        """Prompt tokens found by all requests."""
        return int(self.hits[self.admitted].sum())


def settle_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return ``settings`` with an expectation's defaults: one worker, vLLM's retention of states, and for a model without a
    card the polynomial timing model."""
    settled = {"workers": 1, **{name: value for name, value in settings.items() if value is not None}}
    if settled.keys() & {"prefill", "decode", "split"}:
        settled.pop("workers")
    if settled.get("backend", "vllm") == "vllm":
        settled.setdefault("retention_interval", 0)  # vLLM's own default; a replay keeps every window and state
    if "model" in settled and not settled.keys() & {"gpu", "timing"}:
        settled["timing"] = "polynomial"
    return settled


def replay_traffic(
    requests: Sequence[TraceRequest], settings: Mapping[str, object], progress: Progress | None = None
) -> Replayed:
    """Replay ``requests``. Raises ``KvyardError`` as ``kvyard.replay`` does."""
    config = make_config(settings)
    if config.warm_up is not None or config.autoscale is not None:
        name = "warm_up" if config.warm_up is not None else "autoscale"
        raise KvyardError(f"{name} leaves open which requests count: leave it out here")
    run = replay(list(requests), config=config, progress=progress)
    by_id: dict[str, Record] = {record.id: record for record in run.records}
    hits = [_hits(by_id.get(request.id)) for request in requests]
    cores = [core for worker in run.fleet.used for core in worker.cores]
    return Replayed(
        hits=np.array(hits, dtype=np.int64),
        device=sum(record.cached for record in by_id.values() if record.admitted >= 0),
        loaded=sum(sum(record.loaded) for record in by_id.values() if record.admitted >= 0),
        evicted=sum(core.scheduler.manager.pool.evicted for core in cores),
        run=run,
    )


def _hits(record: Record | None) -> int:
    return -1 if record is None or record.admitted < 0 else record.cached + sum(record.loaded)


def endless_hits(
    requests: Sequence[TraceRequest], engine: EngineConfig, records: Sequence[Record] | None = None
) -> Tokens:
    """Return, per request, the tokens found by the engine's own rules in pools that never evict: in one pool, or with
    ``records`` in one for each worker, as they were routed.
    """
    by_id = {record.id: record for record in records or ()}
    order = sorted(
        range(len(requests)),
        key=lambda index: (by_id[requests[index].id].admitted if requests[index].id in by_id else -1, index),
    )
    places: dict[str, list[int]] = {}
    for index in order:
        record = by_id.get(requests[index].id)
        places.setdefault("" if record is None else record.prefilled_by, []).append(index)
    hits = np.zeros(len(requests), dtype=np.int64)
    for numbers in places.values():
        hits[numbers] = _endless([requests[index] for index in numbers], replace(engine, enable_prefix_caching=True))
    return hits


def _endless(requests: Sequence[TraceRequest], engine: EngineConfig) -> Tokens:
    if engine.backend == "sglang" or _every_block_counts(engine):
        # A pool that evicts nothing has every block. The last token of an answer is computed with the next turn.
        requests = [
            replace(request, output_tokens=request.output_tokens[:-1]) if request.output_tokens else request
            for request in requests
        ]
        lengths = np.array([request.input_length for request in requests], dtype=np.int64)
        block = engine.specs[0].block_size
        return np.minimum(shared_tokens(requests), lengths - 1) // block * block
    cache = PlainCache(engine, ENDLESS)
    hits: list[int] = []
    for request in requests:
        before = cache.found
        cache.add(request, request.arrival)
        hits.append(cache.found - before)
        answered = _with_answer(request)
        if answered is not None:
            cache.add(answered, request.arrival)
    return np.array(hits, dtype=np.int64)


def _every_block_counts(engine: EngineConfig) -> bool:
    """True if a hit is any number of blocks: full attention alone, without a draft head."""
    return all(spec.is_full for spec in engine.specs) and len(engine.specs) == 1 and engine.speculative is None


def _with_answer(request: TraceRequest) -> TraceRequest | None:
    """Return the prompt with its answer behind it, less the last token, which no pass computes; ``None`` if it isn't known."""
    if request.tokens is None or not request.output_tokens or len(request.output_tokens) < 2:
        return None
    tokens = [*request.tokens, *request.output_tokens[:-1]]
    return replace(request, id=f"{request.id}#answer", tokens=tokens, input_length=len(tokens))


class Granularity(msgspec.Struct, frozen=True, kw_only=True):
    """Positions at which hits of an engine can end."""

    block_size: int
    """Tokens that hits are multiples of."""
    smallest: int | None
    """Tokens that a prefix must have to be found at all; ``None`` if none was found up to a large bound."""
    groups: list[str]
    drafts: bool
    """True if a draft head needs the last block of a hit computed again."""


def granularity(engine: EngineConfig) -> Granularity:
    """Work out where hits end, by asking a block manager of that engine."""
    sizes = [spec.block_size for spec in engine.specs]
    unit = math.lcm(*sizes)
    groups = [f"{spec.kind} ({spec.block_size} tokens)" for spec in engine.specs]
    drafts = engine.speculative is not None and engine.speculative.eagle
    smallest = next((unit * at for at in range(1, PROBED) if _hits_at(engine, unit * at)), None)
    return Granularity(block_size=unit, smallest=smallest, groups=groups, drafts=drafts)


def _hits_at(engine: EngineConfig, tokens: int) -> bool:
    """True if a prompt finds something of an earlier prompt with which it has its first ``tokens`` tokens in common."""
    rest = max(spec.block_size for spec in engine.specs) + 1
    prompts = []
    for number in range(3):  # states are kept where prompts were seen to part: the third finds what the second left
        text = [*range(tokens), *(1_000_000 * (number + 1) + at for at in range(rest))]
        prompts.append(TraceRequest(f"probe{number}", number, len(text), 1, tokens=text))
    return bool(_endless(prompts, replace(engine, enable_prefix_caching=True)).any())
