"""TensorRT-LLM's wire: JSON lists of numbered event dicts, fetched from ``/kv_cache_events``. Its own stream over ZeroMQ writes
vLLM's maps with signed hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvyard.events.wire.format import EngineGuess, StreamRules, WireFormat
from kvyard.events.wire.trtllm.reader import TrtllmReader
from kvyard.events.wire.trtllm.writer import TrtllmWriter


def look(payload: Any, guess: EngineGuess) -> bool:
    """Note what a list of event dicts looks like."""
    items = [payload] if isinstance(payload, Mapping) else payload
    if not isinstance(items, list) or not any(isinstance(item, Mapping) and "data" in item for item in items):
        return False
    for item in items:
        guess.encodings["trtllm"] += 1
        data = item.get("data") if isinstance(item, Mapping) else None
        if isinstance(data, Mapping):
            blocks = data.get("blocks")
            if isinstance(blocks, list):
                guess.note_hashes([block.get("block_hash") for block in blocks if isinstance(block, Mapping)])
            guess.note_hashes(data.get("block_hashes"))
    return True


def _likeness(guess: EngineGuess) -> int:
    if guess.encodings["trtllm"]:
        return 100
    # Its own stream: the first eight bytes of a digest, signed, and never another medium.
    signed = guess.encodings["map"] and guess.hashes["signed"]
    return 30 if signed and set(guess.media) <= {"GPU"} else 0


TRTLLM = WireFormat(
    title="TensorRT-LLM",
    reader=TrtllmReader,
    writer=lambda integers, groups: TrtllmWriter(groups),
    streamed=False,
    look=look,
    likeness=_likeness,
    rules=StreamRules(
        lower_tiers_in_chunks=True,
        made_from_hashes=True,
        partial_blocks=True,
        ranks_share_a_topic=True,
        removals_incomplete=True,
        cautions=(
            "Its V1 manager announces a reclaimed block, not those below it: hashes of these stay in any mirror for ever.",
            "Adapters aren't named in its dicts, so requests with adapters can't be matched.",
        ),
    ),
)
