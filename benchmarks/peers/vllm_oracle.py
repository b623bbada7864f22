#!/usr/bin/env python3
"""Drive the KV cache manager of an installed vLLM as a behaviour oracle.

Reads JSON lines (one operation each) on stdin, writes one JSON line of result
per operation on stdout.  CPU only, no model, no weights: the real
``KVCacheManager`` is built from a neutral group description and exercised
directly, the way vLLM's scheduler would.

    python vllm_oracle.py < ops.jsonl > results.jsonl
    python vllm_oracle.py --fuzz SEED --steps 400 --preset full+swa > golden.jsonl
    python vllm_oracle.py --replay golden.jsonl        # re-run, report differences
    python vllm_oracle.py --bench

Protocol
--------
First operation must be ``config``::

    {"op":"config","num_blocks":64,"block_size":16,
     "groups":[{"type":"full"},{"type":"sliding_window","window":64}],
     "events":true}

Group ``type``: full, mla, sliding_window (``window``), sliding_window_mla
(``window``), chunked_local (``chunk``), mamba (``mode`` none|all|align,
``spec_blocks``), rswa (``window``), cross.  Each group may set its own
``block_size`` and ``eagle``.  Config options and defaults are in ``Config``.

Then, per request (``tokens`` is a list of ints, or ``{"seq":[first,count]}``):

    new            create a request: req, tokens [, salt, lora, mm, report]
    get_computed   prefix lookup; creates the request if ``tokens`` is given
    allocate       num_new_tokens [, num_external, num_lookahead, delay_cache,
                   must_fit, reserved, has_running, advance]
    append         tokens: sampled tokens joined to the request
    settle         n: tokens of in-flight steps whose output was processed
    rollback       n: rejected draft tokens, lowers num_computed_tokens
    cache          num_tokens: register blocks after an asynchronous load
    preempt        give the blocks back, keep the request
    free           give the blocks back, forget the request
    remove_skipped num_tokens
    evict          blocks: drop these block ids from the prefix cache
    new_step       a scheduler step begins
    take_copies    drain copy-on-write pairs and release what they retain
    reset          reset the prefix cache
    take_events    drain KV events; ``"wire":true`` adds the msgpack bytes (hex)
    state          full snapshot

Every result has ``num_free``.  With ``"trace":true`` in the config, each result
also carries ``refs`` (block id -> reference count, zero left out) and ``queue``
(free block ids, next to be handed out first).  An operation that makes vLLM
raise yields ``{"error": ...}``; the manager's state is undefined after that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


def _import_vllm():
    """Import vLLM with its log chatter kept away from our stdout."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        import torch  # noqa: F401
        from vllm.v1.core import kv_cache_manager  # noqa: F401
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


@dataclass
class Config:
    num_blocks: int = 64
    block_size: int = 16
    groups: list[dict[str, Any]] = field(default_factory=lambda: [{"type": "full"}])
    events: bool = False
    caching: bool = True
    # None: greatest common divisor / least common multiple of group block sizes.
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    hash_algo: str = "sha256_cbor"
    hash_seed: str | None = None  # None: vLLM's fixed default seed
    event_hash: str = "int"  # "int": low 64 bits on the wire, "bytes": all of it
    max_model_len: int = 1 << 20
    max_in_flight_tokens: int | None = None
    watermark: float = 0.0
    # None keeps every reachable block; 0 keeps only replay points; n > 0 also
    # keeps one checkpoint per n tokens.  Engines default to 0, unit tests None.
    retention_interval: int | None = None
    use_eagle: bool = False
    num_prefill_lookahead: int = 0
    trace: bool = False

    @classmethod
    def parse(cls, op: dict[str, Any]) -> Config:
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in op.items() if k not in ("op", "tag")}
        unknown = set(given) - known
        if unknown:
            raise ValueError(f"unknown config keys: {sorted(unknown)}")
        return cls(**given)


def _build_spec(group: dict[str, Any], default_block_size: int):
    import torch
    from vllm.v1 import kv_cache_interface as kvi

    block_size = group.get("block_size", default_block_size)
    dense = dict(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kind = group["type"]
    if kind == "full":
        return kvi.FullAttentionSpec(**dense)
    if kind == "mla":
        return kvi.MLAAttentionSpec(**dense)
    if kind == "sliding_window":
        return kvi.SlidingWindowSpec(**dense, sliding_window=group["window"])
    if kind == "sliding_window_mla":
        return kvi.SlidingWindowMLASpec(**dense, sliding_window=group["window"])
    if kind == "chunked_local":
        return kvi.ChunkedLocalAttentionSpec(**dense, attention_chunk_size=group["chunk"])
    if kind == "rswa":
        return kvi.RSWASpec(**dense, rswa_window=group["window"])
    if kind == "cross":
        return kvi.CrossAttentionSpec(**dense)
    if kind == "mamba":
        return kvi.MambaSpec(
            block_size=block_size,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode=group.get("mode", "align"),
            num_speculative_blocks=group.get("spec_blocks", 0),
        )
    raise ValueError(f"unknown group type {kind!r}")


def _expand_tokens(tokens: Any) -> list[int]:
    if isinstance(tokens, dict):
        first, count = tokens["seq"]
        return list(range(first, first + count))
    return list(tokens)


def _plain(value: Any) -> Any:
    """JSON-friendly copy; byte strings become hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


class Oracle:
    def __init__(self, config: Config):
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        if config.hash_seed is None:
            os.environ.pop("PYTHONHASHSEED", None)
        else:
            os.environ["PYTHONHASHSEED"] = config.hash_seed
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "1" if config.event_hash == "int" else "0"
        self.config = config
        hash_fn = get_hash_fn_by_name(config.hash_algo)
        kv_cache_utils.init_none_hash(hash_fn)
        self._utils = kv_cache_utils

        specs = [_build_spec(g, config.block_size) for g in config.groups]
        sizes = [s.block_size for s in specs]
        self.hash_block_size = config.hash_block_size or math.gcd(*sizes)
        self.scheduler_block_size = config.scheduler_block_size or math.lcm(*sizes)
        self.hasher = kv_cache_utils.get_request_block_hasher(self.hash_block_size, hash_fn)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer{i}"], spec, bool(g.get("eagle", False)))
                    for i, (spec, g) in enumerate(zip(specs, config.groups, strict=False))
                ],
                prefix_cache_retention_interval=config.retention_interval,
            ),
            max_model_len=config.max_model_len,
            scheduler_block_size=self.scheduler_block_size,
            hash_block_size=self.hash_block_size,
            max_in_flight_tokens=config.max_in_flight_tokens,
            enable_caching=config.caching,
            use_eagle=config.use_eagle,
            num_prefill_lookahead=config.num_prefill_lookahead,
            enable_kv_cache_events=config.events,
            watermark=config.watermark,
        )
        self.pool = self.manager.block_pool
        self.requests: dict[str, Any] = {}
        # Lookup result waiting for the allocation that adopts it.
        self.pending_hit: dict[str, tuple[Any, int]] = {}

    # -- requests ---------------------------------------------------------

    def make_request(self, op: dict[str, Any]):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_cache_report_mode": op["report"]} if "report" in op else None
        lora = None
        if op.get("lora"):
            from vllm.lora.request import LoRARequest

            spec = op["lora"]
            lora = LoRARequest(
                lora_name=spec["name"],
                lora_int_id=spec.get("id", 1),
                lora_path=spec.get("path", "/adapter"),
            )
        features = None
        if op.get("mm"):
            from vllm.multimodal.inputs import (
                MultiModalFeatureSpec,
                MultiModalKwargsItem,
                PlaceholderRange,
            )

            features = [
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem.dummy(),
                    modality="image",
                    identifier=item["hash"],
                    mm_position=PlaceholderRange(offset=item["offset"], length=item["length"]),
                )
                for item in op["mm"]
            ]
        request = Request(
            request_id=op["req"],
            prompt_token_ids=_expand_tokens(op["tokens"]),
            sampling_params=SamplingParams(max_tokens=1 << 20, extra_args=extra),
            pooling_params=None,
            mm_features=features,
            lora_request=lora,
            cache_salt=op.get("salt"),
            arrival_time=0.0,
            block_hasher=self.hasher,
        )
        self.requests[request.request_id] = request
        return request

    def _request(self, op: dict[str, Any]):
        request = self.requests.get(op["req"])
        if request is None:
            if "tokens" not in op:
                raise KeyError(f"no such request: {op['req']}")
            request = self.make_request(op)
        return request

    # -- operations ---------------------------------------------------------

    def op_new(self, op):
        request = self.make_request(op)
        return {"num_tokens": request.num_tokens, "hashes": _plain(request.block_hashes)}

    def op_get_computed(self, op):
        request = self._request(op)
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        self.pending_hit[request.request_id] = (blocks, hit)
        return {
            "hit_tokens": hit,
            "hit_blocks": [list(ids) for ids in blocks.get_block_ids()],
            "shared_prefix_boundary": boundary,
        }

    def op_allocate(self, op):
        from vllm.v1.request import RequestStatus

        request = self._request(op)
        rid = request.request_id
        n_new = op["num_new_tokens"]
        n_ext = op.get("num_external", 0)
        blocks, hit = None, 0
        if request.status != RequestStatus.RUNNING and request.num_computed_tokens == 0:
            blocks, hit = self.pending_hit.get(rid, (None, 0))
        new_blocks = self.manager.allocate_slots(
            request,
            n_new,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=op.get("num_lookahead", 0),
            num_external_computed_tokens=n_ext,
            delay_cache_blocks=op.get("delay_cache", False),
            num_encoder_tokens=op.get("num_encoder", 0),
            full_sequence_must_fit=op.get("must_fit", False),
            reserved_blocks=op.get("reserved", 0),
            has_scheduled_reqs=op.get("has_running", True),
        )
        if new_blocks is None:
            return {"allocated": False}
        self.pending_hit.pop(rid, None)
        if op.get("advance", True):
            # What the scheduler does once the allocation stands.
            request.num_computed_tokens += hit + n_ext + n_new
            request.num_in_flight_tokens += op.get("in_flight", 0)
            request.status = RequestStatus.RUNNING
        return {
            "allocated": True,
            "new_blocks": [list(ids) for ids in new_blocks.get_block_ids()],
            "blocks": self._tables(rid),
            "num_computed": request.num_computed_tokens,
        }

    def op_append(self, op):
        request = self._request(op)
        request.append_output_token_ids(_expand_tokens(op["tokens"]))
        return {"num_tokens": request.num_tokens}

    def op_settle(self, op):
        request = self._request(op)
        request.num_in_flight_tokens -= op["n"]
        return {"num_in_flight": request.num_in_flight_tokens}

    def op_rollback(self, op):
        request = self._request(op)
        request.num_computed_tokens -= op["n"]
        return {"num_computed": request.num_computed_tokens}

    def op_cache(self, op):
        self.manager.cache_blocks(self._request(op), op["num_tokens"])
        return {}

    def op_preempt(self, op):
        from vllm.v1.request import RequestStatus

        request = self._request(op)
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        return {}

    def op_free(self, op):
        request = self.requests.pop(op["req"])
        self.pending_hit.pop(op["req"], None)
        self.manager.free(request)
        return {}

    def op_remove_skipped(self, op):
        request = self._request(op)
        self.manager.remove_skipped_blocks(request.request_id, op["num_tokens"], request.num_prompt_tokens)
        return {"blocks": self._tables(request.request_id)}

    def op_evict(self, op):
        self.manager.evict_blocks(set(op["blocks"]))
        return {}

    def op_new_step(self, op):
        self.manager.new_step_starts()
        return {}

    def op_take_copies(self, op):
        copies, retained = self.manager.take_kv_cache_block_copies()
        self.pool.free_blocks(retained)
        return {"copies": [[c.src_block_id, c.dst_block_id] for c in copies]}

    def op_reset(self, op):
        done = self.manager.reset_prefix_cache()
        if done:
            self.pending_hit.clear()
        return {"reset": done}

    def op_take_events(self, op):
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        events = self.manager.take_events()
        # to_builtins applies the struct options of the wire: tag, omitted defaults.
        result = {"events": [_plain(msgspec.to_builtins(e, builtin_types=(bytes,))) for e in events]}
        if op.get("wire"):
            batch = KVEventBatch(
                ts=op.get("ts", 0.0),
                events=events,
                data_parallel_rank=op.get("dp_rank"),
            )
            result["wire"] = msgspec.msgpack.encode(batch).hex()
        return result

    def op_state(self, op):
        cached: dict[str, list[int]] = {}
        for key, entry in self.pool.cached_block_hash_to_block._cache.items():
            ids = sorted(entry) if isinstance(entry, dict) else [entry.block_id]
            group = self._utils.get_group_id(key)
            cached[f"{group}:{self._utils.get_block_hash(key).hex()}"] = ids
        managers = self.manager.coordinator.single_type_managers
        return {
            "usage": self.manager.usage,
            "requests": {
                rid: {
                    "blocks": self._tables(rid),
                    "num_cached": [m.num_cached_block.get(rid) for m in managers],
                    "num_computed": request.num_computed_tokens,
                    "num_tokens": request.num_tokens,
                    "hashes": _plain(request.block_hashes),
                }
                for rid, request in self.requests.items()
            },
            "cached": cached,
            **self.trace(),
        }

    # -- plumbing -----------------------------------------------------------

    def _tables(self, rid: str) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(rid)]

    def trace(self) -> dict[str, Any]:
        return {
            "refs": {str(b.block_id): b.ref_cnt for b in self.pool.blocks if b.ref_cnt and not b.is_null},
            "queue": [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()],
        }

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, f"op_{op['op']}", None)
        if handler is None:
            return {"error": f"unknown op {op['op']!r}"}
        try:
            result = handler(op)
        except Exception as exc:  # reported, never hidden
            return {"error": f"{type(exc).__name__}: {exc}"}
        result["num_free"] = self.pool.get_num_free_blocks()
        if self.config.trace and op["op"] != "state":
            result.update(self.trace())
        return result


def start(op: dict[str, Any]) -> tuple[Oracle | None, dict[str, Any]]:
    try:
        oracle = Oracle(Config.parse(op))
    except Exception as exc:
        return None, {"error": f"{type(exc).__name__}: {exc}"}
    import vllm

    return oracle, {
        "vllm": getattr(vllm, "__version__", "unknown"),
        "coordinator": type(oracle.manager.coordinator).__name__,
        "managers": [type(m).__name__ for m in oracle.manager.coordinator.single_type_managers],
        "hash_block_size": oracle.hash_block_size,
        "scheduler_block_size": oracle.scheduler_block_size,
        "none_hash": oracle._utils.NONE_HASH.hex(),
        "num_free": oracle.pool.get_num_free_blocks(),
    }


def serve(lines: Iterator[str]) -> None:
    oracle: Oracle | None = None
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        op = json.loads(line)
        if op["op"] == "config":
            oracle, result = start(op)
        elif oracle is None:
            result = {"error": "the first operation must be config"}
        else:
            result = oracle.apply(op)
        if "tag" in op:
            result["tag"] = op["tag"]
        print(json.dumps(result, separators=(",", ":")), flush=True)


# -- random traces ---------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "full": {"groups": [{"type": "full"}]},
    "swa": {"groups": [{"type": "sliding_window", "window": 24}]},
    "chunked": {"groups": [{"type": "full"}, {"type": "chunked_local", "chunk": 16}]},
    "full+swa": {"groups": [{"type": "full"}, {"type": "sliding_window", "window": 20}]},
    "full+2swa": {
        "groups": [
            {"type": "full"},
            {"type": "sliding_window", "window": 16},
            {"type": "sliding_window", "window": 40},
        ]
    },
    "mixed-size": {
        "groups": [
            {"type": "full", "block_size": 16},
            {"type": "sliding_window", "window": 12, "block_size": 4},
        ],
        "block_size": 8,
    },
    "sparse": {
        "groups": [
            {"type": "full", "block_size": 16},
            {"type": "sliding_window", "window": 12, "block_size": 4},
        ],
        "retention_interval": 0,
    },
    "full+mamba": {"groups": [{"type": "full"}, {"type": "mamba", "mode": "align"}]},
    "full+mamba-all": {"groups": [{"type": "full"}, {"type": "mamba", "mode": "all"}]},
    # Hash unit finer than the blocks: hits inside a block, copy-on-write.
    "mamba-fine": {
        "groups": [
            {"type": "full", "block_size": 16},
            {"type": "mamba", "mode": "align", "block_size": 16},
        ],
        "hash_block_size": 4,
    },
    "eagle": {"groups": [{"type": "full"}], "use_eagle": True},
    "eagle+swa": {
        "groups": [{"type": "full"}, {"type": "sliding_window", "window": 20}],
        "use_eagle": True,
    },
}


def fuzz(seed: int, steps: int, preset: str, overrides: dict[str, Any]) -> int:
    """Random but legal operations, scheduler-shaped; prints op/result pairs."""
    rng = random.Random(seed)
    base = {
        "op": "config",
        "num_blocks": 48,
        "block_size": 8,
        "events": True,
        "trace": True,
        **PRESETS[preset],
        **overrides,
    }
    errors = 0

    def emit(op, result):
        nonlocal errors
        errors += "error" in result
        print(json.dumps({"op": op, "result": result}, separators=(",", ":")))
        return result

    oracle, result = start(base)
    emit(base, result)
    if oracle is None:
        return 1
    align_mamba = any(g["type"] == "mamba" and g.get("mode", "align") == "align" for g in base["groups"])
    unit = oracle.scheduler_block_size
    families = [[1000 * f + i for i in range(20 * unit)] for f in range(3)]
    running: list[str] = []
    waiting: list[str] = []
    serial = 0

    def run(op):
        return emit(op, oracle.apply(op))

    def clip(request, start: int, n: int) -> int:
        """End a chunk where recurrent state may be saved, as the scheduler does."""
        if not align_mamba:
            return n
        end = start + n
        if end < request.num_tokens:
            end = max(end // unit * unit, min((start // unit + 1) * unit, end))
        fine = oracle.hash_block_size
        tail = (request.num_prompt_tokens - 1) // fine * fine
        if fine < unit and start < tail < end and rng.random() < 0.8:
            end = tail if tail // unit == start // unit else tail // unit * unit
        return max(end - start, 1)

    def admit(rid: str) -> None:
        hit = run({"op": "get_computed", "req": rid})
        if "error" in hit:
            return
        request = oracle.requests[rid]
        left = request.num_tokens - hit["hit_tokens"]
        ext = 0
        if not align_mamba and left > unit and rng.random() < 0.3:
            # A connector offers whole scheduler blocks past the local hit.
            ext = unit * rng.randint(1, (left - 1) // unit)
        n = min(left - ext, rng.choice([unit, 3 * unit, 8 * unit, 64 * unit]))
        n = clip(request, hit["hit_tokens"] + ext, n)
        delay = ext > 0 and rng.random() < 0.5
        op = {
            "op": "allocate",
            "req": rid,
            "num_new_tokens": 0 if delay else n,
            "num_external": ext,
            "must_fit": rng.random() < 0.5,
            "has_running": bool(running),
        }
        if delay:
            op["delay_cache"] = True
        result = run(op)
        if result.get("allocated"):
            waiting.remove(rid)
            running.append(rid)
            if delay:
                run({"op": "cache", "req": rid, "num_tokens": result["num_computed"]})

    def advance(rid: str) -> None:
        request = oracle.requests[rid]
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            run({"op": "append", "req": rid, "tokens": [rng.randint(1, 5)]})
            left = 1
        n = min(left, rng.choice([1, unit, 2 * unit, 64 * unit]))
        n = clip(request, request.num_computed_tokens, n)
        result = run({"op": "allocate", "req": rid, "num_new_tokens": n})
        while result.get("allocated") is False and len(running) > 1:
            victim = running[-1]
            run({"op": "preempt", "req": victim})
            running.remove(victim)
            waiting.insert(0, victim)
            if victim == rid:
                return
            result = run({"op": "allocate", "req": rid, "num_new_tokens": n})

    for _ in range(steps):
        run({"op": "new_step"})
        roll = rng.random()
        if roll < 0.30 or not (running or waiting):
            rid, serial = f"r{serial}", serial + 1
            family = rng.choice(families)
            shared = rng.randint(0, 6 * unit)
            tail = [rng.randint(1, 9) for _ in range(rng.randint(1, 2 * unit))]
            run({"op": "new", "req": rid, "tokens": family[:shared] + tail})
            waiting.append(rid)
        elif roll < 0.55 and waiting:
            admit(waiting[0])
        elif roll < 0.80 and running:
            advance(rng.choice(running))
        elif roll < 0.93 and running:
            rid = rng.choice(running)
            running.remove(rid)
            run({"op": "free", "req": rid})
        elif roll < 0.95 and running:
            rid = running.pop()
            run({"op": "preempt", "req": rid})
            waiting.insert(0, rid)
        elif roll < 0.965:
            blocks = rng.sample(range(1, oracle.config.num_blocks), 2)
            run({"op": "evict", "blocks": blocks})
        elif roll < 0.975:
            run({"op": "reset"})
        else:
            run({"op": "take_events"})
        run({"op": "take_copies"})
    run({"op": "take_events", "wire": True})
    run({"op": "state"})
    return 1 if errors else 0


def replay(path: str) -> int:
    """Re-run a recorded trace and show where the results differ."""
    oracle: Oracle | None = None
    total = different = 0
    with open(path, encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            record = json.loads(line)
            op, expected = record["op"], record["result"]
            if op["op"] == "config":
                oracle, result = start(op)
                result.pop("vllm", None)
                expected.pop("vllm", None)
            else:
                assert oracle is not None
                result = oracle.apply(op)
            total += 1
            if json.loads(json.dumps(result)) != expected:
                different += 1
                if different <= 5:
                    keys = [k for k in sorted(set(result) | set(expected)) if result.get(k) != expected.get(k)]
                    print(f"line {number}: {op['op']} differs in {keys}")
                    for key in keys[:3]:
                        print(f"   recorded {key}: {str(expected.get(key))[:200]}")
                        print(f"   now      {key}: {str(result.get(key))[:200]}")
    print(f"{total} operations, {different} different")
    return 1 if different else 0


# -- throughput ------------------------------------------------------------


def bench(args: argparse.Namespace) -> None:
    """Admit, decode and release requests with shared prefixes; time each part."""
    presets = {
        "full": [{"type": "full"}],
        "full+swa": [{"type": "full"}, {"type": "sliding_window", "window": 512}],
        "full+3swa": [{"type": "full"}] + [{"type": "sliding_window", "window": 512 + 256 * i} for i in range(3)],
    }
    groups = presets[args.groups]
    config = Config(
        num_blocks=args.blocks,
        block_size=args.block_size,
        groups=groups,
        events=args.events,
        hash_algo=args.hash_algo,
        max_in_flight_tokens=8192,
    )
    oracle = Oracle(config)
    manager = oracle.manager
    rng = random.Random(1)
    prefixes = [[rng.randrange(32000) for _ in range(args.prefix)] for _ in range(args.families)]

    # CPU seconds by default: steadier than wall time on a shared machine.
    clock = time.perf_counter if args.wall else time.process_time
    spent = dict.fromkeys(("hash", "lookup", "allocate", "decode", "free", "events"), 0.0)
    count = dict.fromkeys(("lookup", "allocate", "decode", "free", "hit", "new", "freed", "events"), 0)
    from vllm.v1.request import RequestStatus

    live: list[Any] = []

    def release() -> None:
        request = live.pop(0)
        held = sum(len(t) for t in manager.get_block_ids(request.request_id))
        t0 = clock()
        manager.free(request)
        spent["free"] += clock() - t0
        count["free"] += 1
        count["freed"] += held

    began = time.perf_counter()
    for number in range(args.requests):
        tail = args.prompt - args.prefix
        tokens = rng.choice(prefixes) + [rng.randrange(32000) for _ in range(tail)]
        t0 = clock()
        request = oracle.make_request({"req": f"r{number}", "tokens": tokens})
        t1 = clock()
        spent["hash"] += t1 - t0
        del oracle.requests[request.request_id]
        while True:
            t0 = clock()
            blocks, hit, _ = manager.get_computed_blocks(request)
            t1 = clock()
            got = manager.allocate_slots(
                request,
                request.num_tokens - hit,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                full_sequence_must_fit=True,
            )
            t2 = clock()
            spent["lookup"] += t1 - t0
            spent["allocate"] += t2 - t1
            count["lookup"] += 1
            count["allocate"] += 1
            if got is not None:
                break
            release()
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        count["hit"] += sum(1 for table in blocks.blocks for b in table if not b.is_null)
        count["new"] += sum(len(ids) for ids in got.get_block_ids())
        live.append(request)
        for _ in range(args.decode):
            t0 = clock()
            request.append_output_token_ids(7)
            grown = manager.allocate_slots(request, 1)
            spent["decode"] += clock() - t0
            if grown is None:
                break
            request.num_computed_tokens += 1
            count["decode"] += 1
            count["new"] += sum(len(ids) for ids in grown.get_block_ids())
        if len(live) >= args.concurrency:
            release()
        if args.events and number % 8 == 7:
            t0 = clock()
            count["events"] += len(manager.take_events())
            spent["events"] += clock() - t0
    while live:
        release()
    wall = time.perf_counter() - began

    managed = sum(spent[k] for k in ("lookup", "allocate", "decode", "free", "events"))
    block_ops = count["hit"] + count["new"] + count["freed"]
    calls = count["lookup"] + count["allocate"] + count["decode"] + count["free"]
    import vllm

    print(
        json.dumps(
            {
                "vllm": vllm.__version__,
                "workload": {
                    "groups": args.groups,
                    "requests": args.requests,
                    "prompt": args.prompt,
                    "shared_prefix": args.prefix,
                    "families": args.families,
                    "block_size": args.block_size,
                    "pool_blocks": args.blocks,
                    "concurrency": args.concurrency,
                    "decode": args.decode,
                    "events": args.events,
                    "hash_algo": args.hash_algo,
                },
                "clock": "wall" if args.wall else "cpu",
                "seconds": {k: round(v, 3) for k, v in spent.items()}
                | {"manager_total": round(managed, 3), "whole_run_wall": round(wall, 3)},
                "counts": count,
                "hit_rate_blocks": round(count["hit"] / max(1, count["hit"] + count["new"]), 3),
                "requests_per_s": round(args.requests / managed),
                "requests_per_s_with_hashing": round(args.requests / (managed + spent["hash"])),
                "calls_per_s": round(calls / managed),
                "block_ops_per_s": round(block_ops / managed),
                "us_per_request": {k: round(1e6 * v / args.requests, 1) for k, v in spent.items() if v},
            },
            indent=1,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fuzz", type=int, metavar="SEED")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="full")
    parser.add_argument("--set", default="{}", metavar="JSON", help="config overrides")
    parser.add_argument("--replay", metavar="FILE")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--families", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--wall", action="store_true", help="time with the wall clock")
    parser.add_argument("--groups", default="full", choices=("full", "full+swa", "full+3swa"))
    parser.add_argument("--hash-algo", default="sha256")
    args = parser.parse_args()

    _import_vllm()
    if args.bench:
        bench(args)
        return 0
    if args.fuzz is not None:
        return fuzz(args.fuzz, args.steps, args.preset, json.loads(args.set))
    if args.replay:
        return replay(args.replay)
    serve(iter(sys.stdin.readline, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
