"""Naming of blocks in the service: from the hashes that clients of Dynamo's indexer already compute.

Those clients may send, instead of tokens, one *local* hash per block: XXH3-64 of its token ids as little-endian 32-bit
words, seed 1337, without its past. So the service's request keys are chained from local hashes, and a prompt and its local
hashes lead to the same keys. Extra keys (adapter, salt, media) join a block's key and not its local hash.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

import cbor2
import xxhash

from kvyard.hashing import ExtraKeys, HashingError, Key, Namespace
from kvyard.hashing.algorithms import Extras, packed, pieces
from kvyard.index.identity import Identity

LOCAL_SEED = 1337
"""Dynamo's."""
_U64 = (1 << 64) - 1


class LocalNames:
    """An ``Algorithm``: keys chained from local hashes."""

    name = "local"

    def __init__(self, seed: str = "kvyard-index-local") -> None:
        self.seed = seed
        self.root: int = xxhash.xxh3_64_intdigest(seed.encode())

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: Extras = None
    ) -> list[Key]:
        """See ``Algorithm``. Raises ``HashingError`` for token ids of more than 32 bits."""
        if block_size < 1:
            raise HashingError(f"block size must be at least 1, got {block_size}")
        try:
            words = packed("I", tokens)
        except (OverflowError, TypeError):
            raise HashingError("token ids must be whole numbers from 0 to 4294967295") from None
        local = list(map(xxhash.xxh3_64_digest, pieces(words, 4 * block_size), repeat(LOCAL_SEED)))
        return self.chain(parent, local, extras)  # type: ignore[return-value]

    def chain(
        self, parent: Key | None, local: Sequence[bytes], extras: Sequence[ExtraKeys | None] | None = None
    ) -> list[int]:
        """Return the keys of blocks with these local hashes, as eight bytes each, after ``parent``."""
        if parent is None:
            parent = self.root
        if not isinstance(parent, int):
            raise HashingError("a parent for local names is an integer")
        key, digest = parent & _U64, xxhash.xxh3_64_intdigest
        if extras is None:
            return [key := digest(block_hash, key) for block_hash in local]
        if len(extras) != len(local):
            raise HashingError(f"{len(extras)} extra keys for {len(local)} blocks")
        return [
            key := digest(block_hash if extra is None else block_hash + cbor2.dumps(extra, canonical=True), key)
            for block_hash, extra in zip(local, extras, strict=True)
        ]


def keys_of_hashes(
    identity: Identity, hashes: Sequence[int], namespace: Namespace, turn: int = 8192
) -> Iterator[list[int]]:
    """Yield the request keys of blocks with these hashes, ``turn`` blocks at a time: local ones, or in direct mode the engine's
    own.

    Raises ``IdentityError`` in direct mode for a namespace, which is part of the engine's hashes already.
    """
    if identity.direct:
        yield [block_hash & _U64 for block_hash in hashes]
        return
    names = identity.algorithm
    assert isinstance(names, LocalNames)
    extras = identity.extras(len(hashes), namespace)
    parent: int | None = None
    for first in range(0, len(hashes), turn):
        local = [(block_hash & _U64).to_bytes(8, "big") for block_hash in hashes[first : first + turn]]
        keys = names.chain(parent, local, None if extras is None else extras[first : first + turn])
        parent = keys[-1]
        yield keys
