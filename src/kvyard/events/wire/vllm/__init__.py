"""vLLM's wire: msgpack batches of maps (0.24 and later) or positional arrays (before). Ours is the same, with a reason for
removals. SGLang's is in ``kvyard.events.wire.sglang``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.events.wire.format import EngineGuess, StreamRules, WireFormat
from kvyard.events.wire.vllm.reader import MAP, VllmReader
from kvyard.events.wire.vllm.writer import VllmWriter

_OPTIONAL = ("group_idx", "kv_cache_spec_kind", "locality", "ownership", "session_id", "reason")


def look(payload: Any, guess: EngineGuess) -> bool:
    """Note what a batch of maps or arrays looks like."""
    if isinstance(payload, Mapping):
        payload = [payload.get("ts"), payload.get("events"), *([payload] if "data" in payload else [])]
    if not isinstance(payload, list) or any(isinstance(item, Mapping) and "data" in item for item in payload):
        return False
    guess.batch_lengths[len(payload)] += 1
    if len(payload) > 1 and isinstance(payload[1], list):
        for event in payload[1]:
            _look_at_event(event, guess)
    return True


def _look_at_event(event: Any, guess: EngineGuess) -> None:
    if isinstance(event, bytes):
        guess.encodings["wrapped"] += 1
        try:
            event = msgspec.msgpack.decode(event)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
            return
    if isinstance(event, Mapping):
        guess.encodings["map"] += 1
        named = [name for name in _OPTIONAL if event.get(name) is not None]
        hashes, medium = event.get("block_hashes"), event.get("medium")
    elif isinstance(event, list) and event:
        guess.encodings["array"] += 1
        stored = event[0] == "BlockStored"
        at = 6 if stored else 2
        hashes, medium = (event[1] if len(event) > 1 else None), (event[at] if len(event) > at else None)
        named = ["group_idx"] if stored and len(event) > 9 and event[9] is not None else []
    else:
        return
    guess.fields += [name for name in named if name not in guess.fields]
    if isinstance(medium, str):
        guess.media[medium[:40]] += 1
    guess.note_hashes(hashes)


def _likeness(guess: EngineGuess) -> int:
    if {"group_idx", "kv_cache_spec_kind", "locality"} & set(guess.fields):
        return 70
    if guess.encodings["array"]:
        return 0 if guess.hashes["signed"] else 50
    return 20 if guess.encodings["map"] else 0


RULES = StreamRules(
    repeated_stores="vLLM announces every copy: a block cached twice is stored twice and gone after two removals.",
    eviction_leaves_children=True,
    lower_tiers_in_chunks=True,
    finer_entries=True,
    offload_forgets=True,
    empty_stores="vLLM sends them when all blocks of a stretch are masked",
    sizes_vary=True,
    single_removals=True,
    arrays_are_old=True,
    cautions=(
        "A clear speaks of the GPU pool only, though it doesn't say so: copies in host memory may still be there.",
        "With adapters the hash covers the adapter's path, which isn't sent: such hashes can't be computed elsewhere.",
    ),
)

VLLM = WireFormat(
    title="vLLM",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers),
    look=look,
    likeness=_likeness,
    rules=RULES,
)
VLLM_ARRAY = WireFormat(
    title="vLLM",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers, arrays=True),
    rules=RULES,
)
KVYARD = WireFormat(
    title="kvyard",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers),
    likeness=lambda guess: 90 if "reason" in guess.fields else 0,
    rules=StreamRules(made_from_hashes=True),
)
