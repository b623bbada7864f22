"""The chain of a trace row, which has block ids and lengths but no tokens.

Ids are cumulative: each names everything up to and including its block. So (id, offset inside the id's block) names every
boundary at any block size, and nothing is ever expanded.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvyard.hashing.algorithms import Key
from kvyard.hashing.chain import Chain
from kvyard.hashing.namespace import PLAIN, Namespace


class TraceChain(Chain):
    """The chain of a trace row: cumulative block ids for the prompt, private keys for what is generated after it."""

    __slots__ = ("trace",)

    def __init__(
        self,
        ids: Sequence[int],
        id_block_size: int,
        num_prompt_tokens: int,
        block_size: int,
        own: int,
        namespace: Namespace = PLAIN,
    ) -> None:
        """``ids`` name the prompt's blocks of ``id_block_size`` tokens; ``own`` is unique per request and keeps its
        generated blocks apart from everyone else's. Raises ``ValueError`` where the ids don't cover the prompt, or where
        the namespace has media or embeddings: those are part of what the ids name.
        """
        if block_size < 1 or id_block_size < 1:
            raise ValueError(f"block sizes must be at least 1, got {block_size} and {id_block_size}")
        if num_prompt_tokens < 0 or len(ids) * id_block_size < num_prompt_tokens:
            raise ValueError(f"{len(ids)} ids of {id_block_size} tokens don't cover a prompt of {num_prompt_tokens}")
        if namespace.media or namespace.embeds is not None:
            raise ValueError("a trace's ids tell media and embeddings apart already: leave them out of its namespace")
        self.block_size = block_size
        self.namespace = namespace
        if namespace.plain:
            trace = _TraceKeys(ids, id_block_size, num_prompt_tokens, block_size, own)
        else:
            trace = _SpacedTraceKeys(ids, id_block_size, num_prompt_tokens, block_size, own)
            trace.space = namespace.fingerprint()
        self.trace = self.keys = trace

    @property
    def num_tokens(self) -> int:
        """How many tokens the sequence has, the unfinished block included."""
        return self.trace.num_tokens

    def grow(self, num_tokens: int) -> None:
        """Add ``num_tokens`` generated tokens at the end. Raises ``ValueError`` for a negative number."""
        if num_tokens < 0:
            raise ValueError(f"a sequence grows by 0 tokens or more, not by {num_tokens}")
        self.trace.num_tokens += num_tokens

    def hashes(self, start: int, stop: int) -> list[Key]:
        return self.trace.stretch(start, stop)


class _TraceKeys:
    __slots__ = ("block_size", "id_block_size", "ids", "num_prompt_tokens", "num_tokens", "own", "space")

    def __init__(
        self, ids: Sequence[int], id_block_size: int, num_prompt_tokens: int, block_size: int, own: int
    ) -> None:
        self.ids = ids
        self.id_block_size = id_block_size
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.block_size = block_size
        self.own = own
        self.space = 0
        """What tells the namespace from others; 0 where it is plain."""

    def __len__(self) -> int:
        return self.num_tokens // self.block_size

    def __getitem__(self, index: int) -> int:
        last = (index + 1) * self.block_size - 1
        if last < self.num_prompt_tokens:
            size = self.id_block_size
            return self.ids[last // size] * size + last % size
        if index >= len(self):
            raise IndexError(f"block {index} of a chain of {len(self)} blocks")
        # Negative, so that it can't meet an id's key, and unique, so that no other request hits it.
        return ~((self.own << 40) | index)

    def stretch(self, start: int, stop: int) -> list[Key]:
        """All of ``start`` to ``stop`` at once."""
        ids, size, step = self.ids, self.id_block_size, self.block_size
        prompt = min(stop, self.num_prompt_tokens // step)
        found: list[Key] = []
        if size % step == 0 and prompt > start:
            # Blocks don't cross ids: each id's keys are evenly spaced.
            per = size // step
            first, last = start // per, (prompt - 1) // per
            for name in ids[first : last + 1]:
                found += range(name * size + step - 1, (name + 1) * size, step)
            del found[prompt - first * per :]
            del found[: start - first * per]
        else:
            found += [ids[at // size] * size + at % size for at in range((start + 1) * step - 1, prompt * step, step)]
        found += [self[i] for i in range(max(start, prompt), stop)]
        return found


class _SpacedTraceKeys(_TraceKeys):
    """The same for a namespace that isn't plain: the ids of two namespaces never meet."""

    __slots__ = ()

    def __getitem__(self, index: int) -> int:
        key = super().__getitem__(index)
        return key if key < 0 else xxhash.xxh3_64_intdigest(key.to_bytes(16, "little"), self.space)

    def stretch(self, start: int, stop: int) -> list[Key]:
        return [self[i] for i in range(start, stop)]
