"""Settings: a replay described in flat names, the same on the command line, in a file, in Python and in a sweep.

``make_config`` is the one way from there to a ``ReplayConfig``. What makes no sense together is refused in one sentence that
says what to do; nothing is ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from kvyard.engine.timing import timing_choices
from kvyard.errors import KvyardError
from kvyard.replay.config import LEFT_OUT, ReplayConfig, WorkerConfig
from kvyard.replay.settings_engine import engine_config
from kvyard.replay.values import Parser, bandwidth, count, duration, flag, number, size, text
from kvyard.router import POLICIES, RouterConfig


class Setting(NamedTuple):
    """How one is read, and what it is, in a line."""

    parse: Parser
    summary: str


def _as_is(name: str, value: object) -> object:
    return value


FLEET: dict[str, Setting] = {
    "workers": Setting(_as_is, "how many workers, or a table for each kind of them"),
    "router": Setting(text, f"the policy: {', '.join(POLICIES.names())}"),
    "event_lag": Setting(duration, "until the router sees what a worker announced"),
    "speedup": Setting(number, "divides gaps between arrivals and think times"),
    "concurrency": Setting(count, "closed loop: so many sessions or requests under way"),
    "limit": Setting(count, "requests at most"),
    "seed": Setting(count, "of whatever is drawn"),
    "plans": Setting(flag, "off: one pass at a time, for checking"),
    "samples": Setting(count, "about how many points the timeline has"),
}
ROUTER: dict[str, Setting] = {
    "overlap_credit": Setting(number, "what a cached device block is worth"),
    "overlap_decay": Setting(number, "how fast that shrinks with a worker's backlog"),
    "host_credit": Setting(number, "what a block in host memory is worth"),
    "storage_credit": Setting(number, "what a block in storage is worth"),
    "remote_credit": Setting(number, "what a block in remote storage is worth"),
    "prefill_scale": Setting(number, "what a block to compute costs"),
    "request_weight": Setting(number, "what an active request costs by itself, in blocks"),
    "temperature": Setting(number, "0: the least cost; above: by chance"),
    "router_load": Setting(text, "what least-loaded and the guard go by: requests, tokens or blocks"),
    "guard": Setting(number, "the difference in load beyond which the least loaded is taken"),
    "guard_ratio": Setting(number, "and the ratio it takes"),
    "predicted_ttl_s": Setting(number, "how long kv credits what it sent and no event told of"),
    "approx_ttl_s": Setting(number, "how long approx remembers"),
    "remembered_blocks": Setting(count, "how many blocks either remembers"),
    "fallback": Setting(text, "the policy of affinity for new sessions"),
    "session_ttl_s": Setting(number, "how long a session keeps its worker"),
    "sessions": Setting(count, "how many are remembered"),
    "track_output": Setting(flag, "whether generated blocks count as held"),
    "reserve_output": Setting(number, "share of an expected output held from the start"),
    "forget_after_s": Setting(number, "when a request nobody reported finished is given up"),
}
ENGINE: dict[str, Setting] = {
    "backend": Setting(text, "vllm, sglang or trtllm"),
    "sglang": Setting(_as_is, "a table of what only that backend has"),
    "trtllm": Setting(_as_is, "likewise"),
    "block_size": Setting(count, "tokens per block"),
    "num_gpu_blocks": Setting(count, "blocks on the device"),
    "model": Setting(text, "a preset or config.json: gives groups and bytes per block"),
    "gpu_memory": Setting(size, "memory of a card, from which the model's blocks are counted"),
    "gpu_memory_utilization": Setting(number, "the share of it that may be used"),
    "tensor_parallel_size": Setting(count, "cards that share the model"),
    "kv_cache_dtype": Setting(text, "auto, bfloat16, fp8, ..."),
    "groups": Setting(_as_is, "attention groups of a hybrid model, a table each"),
    "bytes_per_token": Setting(size, "what a token takes in the cache, without a model"),
    "bytes_per_block": Setting(size, "what a block takes, likewise"),
    "max_model_len": Setting(count, "tokens of the longest request"),
    "max_num_seqs": Setting(count, "requests per pass"),
    "max_num_batched_tokens": Setting(count, "tokens per pass"),
    "long_prefill_token_threshold": Setting(count, "tokens of a prompt per pass; 0 is off"),
    "enable_prefix_caching": Setting(flag, "whether prefixes are cached"),
    "enable_chunked_prefill": Setting(flag, "whether prompts are cut into chunks"),
    "scheduling_policy": Setting(text, "fcfs or priority"),
    "preemption_mode": Setting(text, "newest or oldest"),
    "watermark": Setting(number, "share of blocks kept free"),
    "eviction": Setting(text, "the order of eviction on the device"),
    "timing": Setting(text, timing_choices()),
    "timing_speedup": Setting(number, "divides what passes take"),
    "num_speculative_tokens": Setting(count, "draft tokens per step"),
}
TIERS: dict[str, Setting] = {
    "host_blocks": Setting(count, "blocks of host memory per worker; 0 for none"),
    "host_bytes": Setting(size, "the same in bytes"),
    "host_bandwidth": Setting(bandwidth, "GB/s out/back of a worker"),
    "host_latency": Setting(duration, "until the first byte"),
    "host_scope": Setting(text, "private or shared by all workers"),
    "host_eviction": Setting(text, "the order of eviction in host memory"),
    "link": Setting(text, "a measured link instead: h200, h200-queued"),
    "link_discipline": Setting(text, "fair or fifo"),
    "storage_blocks": Setting(count, "blocks of storage behind the host"),
    "storage_bytes": Setting(size, "the same in bytes"),
    "storage_bandwidth": Setting(bandwidth, "GB/s write/read of a worker"),
    "storage_latency": Setting(duration, "until the first byte"),
    "storage_scope": Setting(text, "private or shared by all workers"),
    "shared_bandwidth": Setting(bandwidth, "GB/s of all workers together, to a shared tier"),
    "offload_policy": Setting(text, "write_through, write_through_generated, after_hits, on_eviction"),
    "min_uses": Setting(count, "for after_hits"),
    "offload_ahead": Setting(count, "for on_eviction: blocks kept clean"),
    "on_unclean": Setting(text, "for on_eviction: wait or drop"),
    "blocks_per_chunk": Setting(count, "blocks stored together"),
    "offload_batch_size": Setting(count, "blocks per transfer"),
    "last_block": Setting(text, "of a prompt that ends with it: skip, recompute-token or recompute-block"),
}
KIND: dict[str, Setting] = {
    "name": Setting(text, "what names of these workers begin with"),
    "count": Setting(count, "how many of them"),
    "start": Setting(duration, "when they begin to take requests"),
    "drain": Setting(duration, "when they stop taking new ones"),
    "fail": Setting(duration, "when they fail"),
}
"""Only in a table of workers."""
PER_WORKER: dict[str, Setting] = {"dp_size": Setting(count, "data-parallel ranks of each worker"), **ENGINE, **TIERS}
SETTINGS: dict[str, Setting] = {**FLEET, **ROUTER, **PER_WORKER}
"""Everything that can be set, by name."""

DEFAULTS: dict[str, Any] = {"workers": 8, "router": "kv"}


def make_config(settings: Mapping[str, object]) -> ReplayConfig:
    """The replay that flat ``settings`` describe. Names that are left out have their defaults, and so has ``None``.

    Raises ``KvyardError`` for an unknown name, with the nearest one; for what this replay leaves out, by name; and for values
    that make no sense alone or together.
    """
    given = DEFAULTS | parse_settings(settings)
    shared = {name: value for name, value in given.items() if name in PER_WORKER}
    config = ReplayConfig(
        workers=tuple(_kinds(given["workers"], shared, given.get("seed", 0))),
        router=RouterConfig(
            policy=given["router"],
            **{("load" if name == "router_load" else name): given[name] for name in ROUTER if name in given},
        ),
        **{name: given[name] for name in FLEET if name in given and name not in ("workers", "router")},
    )
    config.check()
    for name in ("limit", "samples", "concurrency"):
        if given.get(name, 1) < 1:
            raise KvyardError(f"{name} must be at least 1, got {given[name]}")
    if not 0 < config.speedup < float("inf"):
        raise KvyardError(f"speedup must be above 0, got {config.speedup}")
    return config


def parse_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """The same settings with text made into values, and without those that are ``None``. Raises as ``make_config`` does."""
    refuse_unknown(settings, SETTINGS)
    return {name: SETTINGS[name].parse(name, value) for name, value in settings.items() if value is not None}


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file: flat names, and a table ``[[workers]]`` for each kind of worker.

    Raises ``KvyardError`` where it can't be read, naming the file.
    """
    try:
        with Path(path).open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KvyardError(f"{path} is not TOML: {error}") from None
    try:
        refuse_unknown(found, SETTINGS)
    except KvyardError as error:
        raise KvyardError(f"{path}: {error}") from None
    return found


def refuse_unknown(names: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise ``KvyardError`` at the first of ``names`` that is not ``known``."""
    known = list(known)
    for name in names:
        if name in known:
            continue
        if name in LEFT_OUT:
            raise KvyardError(f"{name}: {LEFT_OUT[name]}")
        near = get_close_matches(name.replace("-", "_"), known, 1, 0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        raise KvyardError(f"unknown setting {name!r}{where}: {hint}There are {', '.join(known)}")


def _kinds(workers: object, shared: Mapping[str, Any], seed: int) -> Iterable[WorkerConfig]:
    if not isinstance(workers, list | tuple):
        number = count("workers", workers)
        if number < 1:
            raise KvyardError(f"workers is {number}: a fleet needs at least one worker")
        yield _kind({"count": number}, shared, "", seed)
        return
    if not workers:
        raise KvyardError("workers is an empty list: a fleet needs at least one worker")
    known = {**KIND, **PER_WORKER}
    for at, own in enumerate(workers):
        if not isinstance(own, Mapping):
            raise KvyardError(f"workers[{at}] is {own!r}: it must be a table of settings, such as {{count = 4}}")
        where = f" of workers[{at}]"
        refuse_unknown(own, known, where)
        values = {name: known[name].parse(f"{name}{where}", value) for name, value in own.items() if value is not None}
        yield _kind(values, {**shared, **values}, where, seed)


def _kind(own: Mapping[str, Any], settings: Mapping[str, Any], where: str, seed: int) -> WorkerConfig:
    engine = engine_config({name: settings[name] for name in settings if name not in KIND and name != "dp_size"}, seed)
    kind = WorkerConfig(
        engine=engine, dp_size=settings.get("dp_size", 1), **{name: own[name] for name in KIND if name in own}
    )
    if kind.count < 1:
        raise KvyardError(f"count{where} is {kind.count}: it must be at least 1")
    return kind
