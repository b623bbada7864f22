"""Prompts for a live endpoint: token ids made up so that they share what the trace says they share, and nothing else.

A trace's ids are cumulative: equal ids mean equal prefixes. So the tokens of a block are drawn from its id, and two prompts
have the same tokens exactly as far as they have the same ids. The same seed gives the same tokens, on every machine.
"""

import msgspec
import numpy as np
import xxhash

from kvyard.blocks import NO_HINTS, Hints
from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces import TraceRequest

LOWEST = 1000
VOCABULARY = 32_000
"""Ids from ``LOWEST`` up to this are ordinary tokens of about every model; below are often special ones."""
LEAST = 512
"""A smaller vocabulary doesn't tell prompts apart."""


class PromptMaker:
    """Makes prompts. Remembers nothing."""

    def __init__(self, seed: int = 0, vocabulary: int = VOCABULARY) -> None:
        """Raises ``KvyardError`` for a vocabulary that is too small to tell prompts apart."""
        if not LEAST <= vocabulary <= 1 << 32:
            raise KvyardError(f"a vocabulary has from {LEAST} to {1 << 32} tokens, not {vocabulary}")
        self._seed = seed
        self._lowest = LOWEST if vocabulary >= 2 * LOWEST else vocabulary // 8
        self._span = vocabulary - self._lowest

    def tokens(self, row: TraceRequest) -> list[int]:
        """Return the prompt of ``row``: its own tokens where the trace has them, made up ones otherwise."""
        if row.tokens is not None:
            return list(row.tokens)
        if row.ids is None:
            # Nothing is known of what it shares: it shares nothing.
            return self._draw(f"request {row.id}", row.input_length)
        size = row.id_block_size
        ids: list[int] = []
        for id_ in row.ids:
            ids += self._draw(f"id {id_}", size)
        del ids[row.input_length :]
        if len(ids) < row.input_length:
            ids += self._draw(f"request {row.id}", row.input_length - len(ids))
        return ids

    def _draw(self, name: str, count: int) -> list[int]:
        key = xxhash.xxh3_128_intdigest(f"{self._seed} {name}".encode())
        # The raw stream of a bit generator is promised to stay the same; what is derived from it isn't.
        raw = np.random.Philox(key=key).random_raw(count)
        drawn: list[int] = (raw % np.uint64(self._span) + np.uint64(self._lowest)).tolist()
        return drawn


def answer_length(row: TraceRequest, longest: int | None) -> int:
    """Return tokens to ask for: as recorded, but no more than a context of ``longest`` tokens has room for."""
    length = row.output_length if longest is None else min(row.output_length, longest - row.input_length)
    return max(1, length)


def body_of(
    row: TraceRequest, tokens: list[int], model: str | None, *, exact: bool = True, longest: int | None = None
) -> bytes:
    """Return the completion request for ``row``. ``exact``: the answer shall have just the recorded length, by vLLM's
    extensions, or what there is room for in ``longest`` tokens.
    """
    length = answer_length(row, longest)
    body: dict[str, object] = {
        "prompt": tokens,
        "max_tokens": length,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    name = row.lora or model
    if name is not None:
        body["model"] = name
    if exact:
        body["ignore_eos"] = True
        body["min_tokens"] = length
    if row.priority:
        body["priority"] = row.priority
    if row.hints != NO_HINTS:
        body |= _hint_fields(row.hints)
    if row.salt is not None:
        body["cache_salt"] = row.salt
    return msgspec.json.encode(body)


def _hint_fields(hints: Hints) -> dict[str, object]:
    """Return hints by the names of vLLM (sessions and ranges) and of Dynamo (ends and times to live)."""
    fields: dict[str, object] = {"session_id": hints.session} if hints.session else {}
    if hints.session_end:
        fields["nvext"] = {
            "session_control": {"action": "close"} | ({"session_id": hints.session} if hints.session else {})
        }
    elif hints.ttl is not None:
        control = {"type": "ephemeral", "ttl": f"{max(1, round(hints.ttl / SECOND))}s"}
        if hints.ttl_then != "ordinary":
            control["then"] = hints.ttl_then  # a name of our own, which other engines pass over
        fields["nvext"] = {"cache_control": control}
    if hints.retention:
        fields["retention_directives"] = [
            {
                "start": directive.start,
                "end": directive.stop,
                "priority": directive.priority,
                "duration": None if directive.duration is None else directive.duration / SECOND,
            }
            for directive in hints.retention
        ]
    return fields
