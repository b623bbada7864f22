"""SGLang's wire: vLLM's batches, mostly as arrays, with signed hashes and words of its own for media. It is only read."""

from kvyard.events.wire.format import EngineGuess, StreamRules, WireFormat
from kvyard.events.wire.vllm import ARRAY, VllmReader

_MEDIA = {"CPU_PINNED", "DISK", "EXTERNAL"}


def _likeness(guess: EngineGuess) -> int:
    if _MEDIA & set(guess.media):
        return 80
    return 50 if guess.encodings["array"] and guess.hashes["signed"] else 0


SGLANG = WireFormat(
    title="SGLang",
    reader=lambda narrow, block_size: VllmReader(narrow, ARRAY),
    likeness=_likeness,
    rules=StreamRules(
        repeated_stores="SGLang's hashes leave out adapters and extra keys, so one hash can be stored for several of them.",
        eviction_leaves_children=True,
        lower_tiers_in_chunks=True,
        cautions=(
            "Adapters and extra keys are not part of its hashes: two adapters with one prompt share them.",
            "Groups aren't named: what a sliding window no longer has is announced as if all of it were there. Give the "
            "engine's groups, and only the ends of runs count for its windows.",
        ),
    ),
)
