"""Chains: the chained block hashes of one growing sequence, made from tokens or from the block ids of a trace.

A chained hash covers the whole prefix, so the hash at a position identifies everything before it. That is why a chain can
be compared with another in a handful of probes, and why a trace's cumulative ids never need to be expanded into tokens:
(id, offset inside the id's block) already names every boundary at any block size.

A chain offers ``keys``, a sequence of hashes indexed by block position, and answers for the wire (tokens, extra keys).
It does not know what is cached.
"""

from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import dropwhile
from typing import SupportsIndex, overload

import xxhash

from kvyard.errors import KvyardError
from kvyard.hashing.algorithms import Algorithm, Key
from kvyard.hashing.keys import Keys, PackedKeys, packed_keys
from kvyard.hashing.namespace import PLAIN, ExtraKeys, Namespace


def _compact(tokens: Sequence[int]) -> MutableSequence[int]:
    """Return token ids at four bytes each where they fit, which is nearly always: what is cached keeps its tokens."""
    try:
        return array("I", tokens)
    except OverflowError:
        return list(tokens)


def _fits(token: int) -> bool:
    return 0 <= token < 1 << 32


class Chain:
    """Common ground of all chains. ``keys`` only ever grows at its end."""

    __slots__ = ("block_size", "keys", "namespace")

    keys: Keys
    block_size: int
    namespace: Namespace

    def hashes(self, start: int, stop: int) -> list[Key]:
        """Return the hashes of blocks ``start`` to ``stop``."""
        keys = self.keys
        return [keys[i] for i in range(start, stop)]

    def packed_hashes(self, start: int, stop: int) -> Sequence[Key]:
        """Return the hashes in the chain's own packed form: cheaper than a list if few of them are read."""
        return self.hashes(start, stop)

    def tokens_of(self, start: int, stop: int) -> list[int] | None:
        """Return the token ids of blocks ``start`` to ``stop``; ``None`` where only trace ids are known."""
        words = self.words_of(start, stop)
        return None if words is None else list(words)

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        """Return the tokens in the chain's own packed form: cheaper than a list if few of them are read."""
        return None

    def extras_of(self, start: int, stop: int) -> list[ExtraKeys | None]:
        """Return per block what joined its hash (LoRA, salt, media), as events carry it; ``None`` for a block of plain text."""
        return self.namespace.wire_extras(start, stop, self.block_size)

    def coarser(self, block_size: int) -> "Chain":
        """This chain seen at a larger block size, a multiple of its own. Hashes are picked, never recomputed.

        Raises ``ValueError`` where ``block_size`` isn't a multiple.
        """
        if block_size == self.block_size:
            return self
        if block_size < self.block_size or block_size % self.block_size:
            raise ValueError(f"block size {block_size} is not a multiple of the hash block size {self.block_size}")
        return CoarseChain(self, block_size // self.block_size)

    def finer(self, block_size: int) -> "Chain":
        """Return a chain made by ``coarser``, seen at a size between its original's and its own. Raises ``ValueError``
        otherwise.
        """
        if block_size != self.block_size:
            raise ValueError(f"a chain of blocks of {self.block_size} tokens has no blocks of {block_size}")
        return self

    def cut(self, start: int, stop: int, with_tokens: bool = True) -> "Chain":
        """Return a chain that answers only for ``start`` to ``stop``, so that what outlives a request doesn't keep all of
        it.

        Returns this chain itself if little would be freed. Without ``with_tokens`` only hashes are kept.
        """
        return self

    def reaches(self, position: int) -> bool:
        """Return true if the hash at ``position`` is available; only a cut chain lacks any."""
        return True


class TokenChain(Chain):
    """The chain of a sequence of token ids, hashed block by block as it grows."""

    __slots__ = ("_last", "_next", "algorithm", "packed", "tokens")

    def __init__(
        self, tokens: Sequence[int], block_size: int, algorithm: Algorithm, namespace: Namespace = PLAIN
    ) -> None:
        """Hash every full block of ``tokens``. Raises ``ValueError`` for a block size below 1."""
        if block_size < 1:
            raise ValueError(f"block size must be at least 1, got {block_size}")
        self.tokens = _compact(tokens)
        self.block_size = block_size
        self.algorithm = algorithm
        self.namespace = namespace
        self.packed = self.keys = packed_keys(algorithm.root)
        """``keys``, as what they are."""
        self._last: Key | None = None
        """The hash of the last full block."""
        self._next = block_size
        """Token count at which the next block is complete."""
        self._hash(tokens)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, including those of the unfinished block."""
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add ``tokens`` at the end and hash the blocks they complete.

        Raises ``HashingError``, changing nothing, for a token the algorithm can't hash in a block that is now full.
        """
        held = self.tokens
        try:
            held.extend(tokens)
        except OverflowError:
            # The tokens before the one that is too large were taken in already.
            held = self.tokens = [*held, *dropwhile(_fits, tokens)]
        if len(held) >= self._next:
            try:
                self._hash(held[self._next - self.block_size :])
            except KvyardError:
                del held[len(held) - len(tokens) :]
                raise

    def _hash(self, fresh: Sequence[int]) -> None:
        """Hash the full blocks of ``fresh``, the tokens after the last hashed block."""
        keys, size = self.packed, self.block_size
        first = self._next // size - 1
        space = self.namespace
        extras = None if space is PLAIN else space.extras(first, first + len(fresh) // size, size)
        fresh_keys = self.algorithm.hash_blocks(self._last, fresh, size, extras)
        if fresh_keys:
            keys.extend(fresh_keys)  # type: ignore[arg-type]
            self._last = fresh_keys[-1]
            self._next += len(fresh_keys) * size

    def hashes(self, start: int, stop: int) -> list[Key]:
        return self.packed.between(start, stop)

    def packed_hashes(self, start: int, stop: int) -> Sequence[Key]:
        return self.packed.packed(start, stop)

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        return self.tokens[start * self.block_size : stop * self.block_size]

    def cut(self, start: int, stop: int, with_tokens: bool = True) -> Chain:
        if with_tokens and 4 * (stop - start) + 64 >= len(self.keys):
            return self
        return _CutChain(self, start, stop, with_tokens)


class CoarseChain(Chain):
    """A chain seen at a multiple of its block size: every ``factor``-th hash."""

    __slots__ = ("_fine", "factor")

    def __init__(self, fine: Chain, factor: int) -> None:
        self._fine = fine
        self.factor = factor
        self.block_size = fine.block_size * factor
        self.namespace = fine.namespace
        self.keys = _CoarseKeys(fine.keys, factor)

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        return self._fine.words_of(start * self.factor, stop * self.factor)

    def finer(self, block_size: int) -> Chain:
        return self if block_size == self.block_size else self._fine.coarser(block_size)

    def cut(self, start: int, stop: int, with_tokens: bool = True) -> Chain:
        fine = self._fine.cut(start * self.factor, stop * self.factor, with_tokens)
        return self if fine is self._fine else CoarseChain(fine, self.factor)

    def reaches(self, position: int) -> bool:
        return self._fine.reaches((position + 1) * self.factor - 1)


class _CoarseKeys:
    __slots__ = ("factor", "fine")

    def __init__(self, fine: Keys, factor: int) -> None:
        self.fine = fine
        self.factor = factor

    def __len__(self) -> int:
        return len(self.fine) // self.factor

    def __getitem__(self, index: int) -> Key:
        return self.fine[(index + 1) * self.factor - 1]


class _CutChain(Chain):
    """Part of a token chain that outlives it, at its old positions."""

    __slots__ = ("_base", "_cut", "_tokens")

    def __init__(self, whole: TokenChain, start: int, stop: int, with_tokens: bool) -> None:
        # One hash more at the front: a run's parent is asked for too.
        base = max(0, start - 1)
        self.block_size = whole.block_size
        self.namespace = whole.namespace
        self._cut = self.keys = _CutKeys(whole.packed.cut(base, stop), base)
        self._base = start
        self._tokens = whole.tokens[start * self.block_size : stop * self.block_size] if with_tokens else None

    def hashes(self, start: int, stop: int) -> list[Key]:
        return self._cut.between(start, stop)

    def packed_hashes(self, start: int, stop: int) -> Sequence[Key]:
        return self._cut.packed(start, stop)

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        if self._tokens is None or start < self._base:
            return None  # the hash before the cut was kept, its tokens weren't
        size, base = self.block_size, self._base
        return self._tokens[(start - base) * size : (stop - base) * size]

    def reaches(self, position: int) -> bool:
        return self._cut.base <= position < len(self._cut)


class _CutKeys:
    __slots__ = ("base", "keys")

    def __init__(self, keys: PackedKeys, base: int) -> None:
        self.keys = keys
        self.base = base

    def between(self, start: int, stop: int) -> list[Key]:
        low = self._within(start, stop)
        return self.keys.between(low, low + stop - start)

    def packed(self, start: int, stop: int) -> Sequence[Key]:
        low = self._within(start, stop)
        return self.keys.packed(low, low + stop - start)

    def _within(self, start: int, stop: int) -> int:
        """Return ``start`` counted from the cut. Raises ``IndexError`` if a block of ``start`` to ``stop`` was cut away."""
        if start < self.base or stop > self.base + len(self.keys):
            raise IndexError(f"blocks {start} to {stop} of a chain of which {self.base} to {len(self)} were kept")
        return start - self.base

    def __len__(self) -> int:
        return self.base + len(self.keys)

    def __getitem__(self, index: int) -> Key:
        return self.keys[self._within(index, index + 1)]


class PairChain(Chain):
    """A chain of blocks of token pairs: each token with the one after it. A block is known once the token after it is.

    SGLang caches text in this way for EAGLE, whose drafter computes a position from its token and the next.
    """

    __slots__ = ("_whole",)

    def __init__(self, whole: "TokenChain | TraceChain") -> None:
        self._whole = whole
        self.block_size = whole.block_size
        self.namespace = whole.namespace
        self.keys = _PairKeys(whole)

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        """Return the tokens of the blocks and the one after them."""
        whole = self._whole
        if not isinstance(whole, TokenChain):
            return None
        return whole.tokens[start * self.block_size : stop * self.block_size + 1]


class _PairKeys:
    __slots__ = ("_whole",)

    def __init__(self, whole: "TokenChain | TraceChain") -> None:
        self._whole = whole

    def __len__(self) -> int:
        return max(0, self._whole.num_tokens - 1) // self._whole.block_size

    def __getitem__(self, index: int) -> Key:
        whole = self._whole
        key = whole.keys[index]
        if not isinstance(whole, TokenChain):
            return key  # a trace doesn't name the token after a block: most likely it is the same, too
        following = whole.tokens[(index + 1) * whole.block_size]
        if isinstance(key, bytes):
            return xxhash.xxh3_128_digest(key, following)
        return xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), following)


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
        """Return the number of tokens, including those of the unfinished block."""
        return self.trace.num_tokens

    def grow(self, num_tokens: int) -> None:
        """Add ``num_tokens`` generated tokens at the end. Raises ``ValueError`` for a negative number."""
        if num_tokens < 0:
            raise ValueError(f"a sequence grows by 0 tokens or more, not by {num_tokens}")
        self.trace.num_tokens += num_tokens

    def hashes(self, start: int, stop: int) -> list[Key]:
        return self.trace.keys_between(start, stop)


class _TraceKeys:
    __slots__ = ("block_size", "id_block_size", "ids", "num_prompt_tokens", "num_tokens", "own", "space")

    def __init__(
        self, ids: Sequence[int], id_block_size: int, num_prompt_tokens: int, block_size: int, own: int
    ) -> None:
        self.ids: list[int] = ids if isinstance(ids, list) else list(ids)  # which is quicker to look into when compiled
        self.id_block_size = id_block_size
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.block_size = block_size
        self.own = own
        self.space = 0
        """Number that distinguishes the namespace from others; 0 for the plain one."""

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

    def keys_between(self, start: int, stop: int) -> list[Key]:
        """Return all of ``start`` to ``stop`` at once."""
        ids, size, step = self.ids, self.id_block_size, self.block_size
        prompt = min(stop, self.num_prompt_tokens // step)
        keys: list[Key] = []
        if size % step == 0 and prompt > start:
            # Blocks don't cross ids: each id's keys are evenly spaced.
            per = size // step
            first, last = start // per, (prompt - 1) // per
            for name in ids[first : last + 1]:
                keys += range(name * size + step - 1, (name + 1) * size, step)
            del keys[prompt - first * per :]
            del keys[: start - first * per]
        else:
            keys += [
                ids[position // size] * size + position % size
                for position in range((start + 1) * step - 1, prompt * step, step)
            ]
        keys += [self[i] for i in range(max(start, prompt), stop)]
        return keys


class _SpacedTraceKeys(_TraceKeys):
    """Trace keys of a namespace that isn't plain: the ids of two namespaces never collide."""

    __slots__ = ()

    def __getitem__(self, index: int) -> int:
        key = super().__getitem__(index)
        return key if key < 0 else xxhash.xxh3_64_intdigest(key.to_bytes(16, "little"), self.space)

    def keys_between(self, start: int, stop: int) -> list[Key]:
        return [self[i] for i in range(start, stop)]


class Run:
    """Blocks ``start`` to ``stop`` (exclusive, in blocks) of ``chain``: the unit that everything above works on.

    A run is a view, so slicing and splitting cost the same for one block and for ten thousand. Immutable by convention.
    """

    __slots__ = ("chain", "start", "stop")

    def __init__(self, chain: Chain, start: int = 0, stop: int | None = None) -> None:
        self.chain = chain
        self.start = start
        self.stop = len(chain.keys) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: SupportsIndex) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> "Run": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Key | Run":
        """Return the hash at a position of the run, or a shorter run over the same chain (step 1 only)."""
        if isinstance(index, slice):
            low, high, step = index.indices(len(self))
            if step != 1:
                raise ValueError("a run is consecutive: slice it with step 1")
            return Run(self.chain, self.start + low, self.start + max(low, high))
        position = index.__index__()
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"block {position} of a run of {len(self)} blocks")
        return self.chain.keys[self.start + position]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.hashes)

    def split(self, offset: int) -> "tuple[Run, Run]":
        """Return the first ``offset`` blocks and the rest, both views of the same chain."""
        if not 0 <= offset <= len(self):
            raise ValueError(f"cannot split a run of {len(self)} blocks at {offset}")
        middle = self.start + offset
        return Run(self.chain, self.start, middle), Run(self.chain, middle, self.stop)

    @property
    def hashes(self) -> list[Key]:
        """The chained hash of every block, in order."""
        return self.chain.hashes(self.start, self.stop)

    @property
    def parent(self) -> Key | None:
        """The hash of the block before the run, ``None`` at the start of the chain."""
        return self.chain.keys[self.start - 1] if self.start else None

    @property
    def tokens(self) -> list[int] | None:
        """The token ids the run covers, ``None`` where the chain was made from trace ids."""
        return self.chain.tokens_of(self.start, self.stop)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        if (self.start, self.stop) != (other.start, other.stop):
            return False
        # A chained hash covers everything before it, so the last one speaks for all.
        return self.stop == self.start or self.chain.keys[self.stop - 1] == other.chain.keys[other.stop - 1]

    def __hash__(self) -> int:
        return hash((self.start, self.stop, self.chain.keys[self.stop - 1] if self.stop > self.start else None))

    def __repr__(self) -> str:
        return f"Run({self.start}..{self.stop} of {type(self.chain).__name__})"
