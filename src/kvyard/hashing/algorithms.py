"""Hash algorithms: the tokens of a prompt in, the chained hash of every full block out.

``sha256``, ``sha256_cbor``, ``xxhash`` and ``xxhash_cbor`` give the very bytes that vLLM 0.32 gives, so that an engine and
an index that never met agree on names. ``xxh3`` is ours: 64-bit integers, several times faster, for simulation and for
fleets that only talk to themselves; it resists accidents, not attackers.

All work on a whole prompt per call. None knows what a block is stored as, or where extra keys come from.
"""

import hashlib
import operator
import os
import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Protocol, TypeAlias

import cbor2
import xxhash

from kvyard.errors import KvyardError, suggest
from kvyard.hashing.namespace import TAGS, ExtraKeys

Key: TypeAlias = int | bytes
"""One chained block hash: an integer, or the digest itself."""

Extras: TypeAlias = Sequence[ExtraKeys | None] | None
"""Extra keys that join the hash of each full block; ``None`` for plain text."""

VLLM_SEED = "vllm-none-hash"
XXH3_SEED = "kvyard-root"

_U64 = (1 << 64) - 1
_MAX_TABLE = 1 << 19
_GROUP = 64
"""Pieces that are cut off at once."""


class HashingError(KvyardError, ValueError):
    """An unknown algorithm, or something that it can't hash."""


class Algorithm(Protocol):
    """A way to name blocks. Equal arguments give equal keys, whatever objects they are made of."""

    name: str
    seed: str
    """The text that ``root`` was made from; two sides that share it agree on every key."""

    @property
    def root(self) -> Key:
        """The parent of the first block of every chain."""

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: Extras = None
    ) -> list[Key]:
        """Return the keys of every full block of ``tokens``, chained from ``parent`` (``None`` or empty: from ``root``).

        ``extras`` has one entry per full block; leave it out for plain text. Changes nothing. Raises ``HashingError`` for a
        block size below 1, a parent that isn't a key of this algorithm, or a wrong number of extras.
        """


Factory: TypeAlias = Callable[[str | None], Algorithm]
"""Makes an algorithm from a seed text, or from its own default for ``None``."""


def algorithm(name: str, seed: str | None = None, environ: Mapping[str, str] = os.environ) -> Algorithm:
    """Return the algorithm called ``name``. Its seed is ``seed``, else the text of ``PYTHONHASHSEED``, else its own default.

    Raises ``HashingError`` for a name that isn't in ``ALGORITHMS``.
    """
    make = ALGORITHMS.get(name)
    if make is None:
        raise HashingError(f"unknown hash algorithm {name!r}: {suggest(name, sorted(ALGORITHMS))}")
    return make(environ.get("PYTHONHASHSEED") if seed is None else seed)


def wire_hash(key: Key) -> int:
    """Return the key as events carry it: the low 64 bits, unsigned."""
    return key & _U64 if isinstance(key, int) else int.from_bytes(key[-8:], "big")


class _Digests:
    """Common ground of vLLM's four: the key is a digest of the serialised (parent, tokens, extra keys)."""

    def __init__(self, name: str, seed: str, digest: Callable[[bytes], bytes], dump: Callable[[object], bytes]) -> None:
        self.name = name
        self.seed = seed
        self._digest = digest
        self.root = digest(dump(seed))
        self._size = len(self.root)

    def _parent(self, parent: Key | None) -> bytes:
        if parent is None or parent == b"":
            return self.root
        if not isinstance(parent, bytes) or len(parent) != self._size:
            raise HashingError(f"a parent for {self.name} is a digest of {self._size} bytes, not {parent!r}")
        return parent


class _PickledDigests(_Digests):
    """Serialised as a pickle, vLLM's default. Python only, and careful: see ``_unshared``."""

    def __init__(self, name: str, seed: str, digest: Callable[[bytes], bytes]) -> None:
        super().__init__(name, seed, digest, _pickled)

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: Extras = None
    ) -> list[Key]:
        digest, dump, version = self._digest, pickle.dumps, pickle.HIGHEST_PROTOCOL
        key = self._parent(parent)
        if extras is None and len(tokens) == block_size > 0:
            # What a growing request asks for, one block at a time.
            return [digest(dump((key, tuple(tokens), None), version))]
        _check(tokens, block_size, extras)
        joined = repeat(None) if extras is None else map(_unshared, extras)
        blocks = zip(*[iter(tokens)] * block_size, strict=False)
        return [key := digest(dump((key, block, extra), version)) for block, extra in zip(blocks, joined, strict=False)]


class _CborDigests(_Digests):
    """Serialised as canonical CBOR, which every language can write."""

    def __init__(self, name: str, seed: str, digest: Callable[[bytes], bytes]) -> None:
        super().__init__(name, seed, digest, _cbor)
        # What precedes the parent: an array of three opens, then a byte string of a digest's length.
        self._front = _array_head(3) + _cbor(bytes(self._size))[: -self._size]

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: Extras = None
    ) -> list[Key]:
        _check(tokens, block_size, extras)
        endings = repeat(_cbor(None)) if extras is None else map(_cbor_of_extra, extras)
        digest, front, middle, join = self._digest, self._front, _array_head(block_size), b"".join
        key = self._parent(parent)
        # The encoder spends most of its time starting up, and CBOR concatenates: so it sees each token id once, ever.
        blocks = zip(*[map(_TOKENS.__getitem__, tokens)] * block_size, strict=False)
        return [
            key := digest(b"%b%b%b%b%b" % (front, key, middle, join(block), ending))
            for block, ending in zip(blocks, endings, strict=False)
        ]


class _Xxh3:
    """XXH3-64 of the packed tokens, seeded with the parent.

    The seed is 64 bits as is the parent, so nothing of it is lost. XXH3 mixes seed and data by exclusive or, so seeds must be
    hashes themselves; as every parent is, the root included. Small numbers in their place would collide at once.

    Plain blocks are 32-bit little-endian words. Where a token needs more, or extra keys join, the width and the CBOR of the
    extra keys go around the words: longer than any plain block, and readable in one way only, so different blocks never
    look alike to the hash.
    """

    def __init__(self, name: str, seed: str) -> None:
        self.name = name
        self.seed = seed
        self.root: int = xxhash.xxh3_64_intdigest(seed.encode())

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: Extras = None
    ) -> list[Key]:
        _check(tokens, block_size, extras)
        digest = xxhash.xxh3_64_intdigest
        key = self._parent(parent)
        try:
            all_words = packed("I", tokens)
        except OverflowError:
            return [key := digest(data, key) for data in _with_wide_tokens(tokens, block_size, extras)]
        blocks = pieces(all_words, 4 * block_size)
        if extras is None:
            return [key := digest(words, key) for words in blocks]
        return [
            key := digest(words if extra is None else b"I" + words + _cbor_of_extra(extra), key)
            for words, extra in zip(blocks, extras, strict=True)
        ]

    def _parent(self, parent: Key | None) -> int:
        if parent is None or parent == b"":
            return self.root
        if not isinstance(parent, int) or not 0 <= parent <= _U64:
            raise HashingError(f"a parent for {self.name} is an integer of 64 bits, not {parent!r}")
        return parent


def _with_wide_tokens(tokens: Sequence[int], block_size: int, extras: Extras) -> Iterator[bytes]:
    """Yield the bytes that ``_Xxh3`` hashes, block by block, where a token somewhere takes more than 32 bits."""
    blocks = zip(*[iter(tokens)] * block_size, strict=False)
    for block, extra in zip(blocks, repeat(None) if extras is None else extras, strict=False):
        try:
            words = packed("I", block)
            yield words if extra is None else b"I" + words + _cbor_of_extra(extra)
        except OverflowError:
            try:
                yield b"Q" + packed("Q", block) + _cbor_of_extra(extra)
            except OverflowError:
                raise HashingError("xxh3 takes token ids from 0 to 2**64 - 1 only") from None


def packed(width: str, numbers: Iterable[int]) -> bytes:
    """Return numbers as words of ``array``'s type ``width``, the same everywhere. Raises ``OverflowError`` for what doesn't
    fit.
    """
    if width == "I" and isinstance(numbers, memoryview) and numbers.format == "B":
        # Where bytes are tokens: this widens each to a word without making a number of it.
        return bytes(numbers).decode("latin-1").encode("utf-32-le")
    words = array(width, numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def pieces(data: bytes, size: int) -> list[bytes]:
    """Return the whole pieces of ``size`` bytes, cut in C: a long prompt has thousands of blocks."""
    count = len(data) // size
    if count <= _GROUP:
        return list(_cutter(size, count).unpack_from(data))
    whole = count // _GROUP * _GROUP * size
    cut: list[bytes] = []
    for group in _cutter(size, _GROUP).iter_unpack(memoryview(data)[:whole]):
        cut += group
    return cut + list(_cutter(size, count % _GROUP).unpack_from(data, whole))


@lru_cache(maxsize=256)
def _cutter(size: int, count: int) -> struct.Struct:
    """Cuts bytes into ``count`` pieces of ``size``."""
    return struct.Struct(f"{size}s" * count)


def _check(tokens: Sequence[int], block_size: int, extras: Extras) -> None:
    if block_size < 1:
        raise HashingError(f"block size must be at least 1, got {block_size}")
    if extras is not None and len(extras) != len(tokens) // block_size:
        raise HashingError(f"{len(extras)} extra keys for {len(tokens) // block_size} blocks: give one entry per block")


@lru_cache(maxsize=256)
def _unshared(extra: ExtraKeys | None) -> ExtraKeys | None:
    """Return ``extra`` with every text and digest an object of its own, and every tag one object.

    A pickle writes an object once and then refers back to it, so equal values give different bytes depending on whether
    they are one object or two. An engine decodes its requests off a wire, which makes them two; the tags are constants of
    its code, which makes them one. Doing the same here gives its bytes, and makes equal arguments give equal keys.
    """
    if extra is None:
        return None
    return tuple(
        [
            (_TAG_OF.get(item[0]) or _copy(item[0]), *map(_copy, item[1:])) if isinstance(item, tuple) else _copy(item)
            for item in extra
        ]
    )


def _copy(part: object) -> object:
    if isinstance(part, str):
        return part.encode(errors="surrogatepass").decode(errors="surrogatepass")
    if isinstance(part, bytes):
        return bytes(bytearray(part))
    return part


class _TokenTable(dict[int, bytes]):
    """The CBOR of every token id seen so far: a vocabulary's worth, some 10 MB for 128,000 ids."""

    def __missing__(self, token: int) -> bytes:
        if len(self) >= _MAX_TABLE:
            self.clear()
        # True and numpy integers find the entry of the number they equal, so they mustn't write a different one.
        encoded = self[token] = _cbor(operator.index(token) + 0)
        return encoded


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


_cbor_of_extra = lru_cache(maxsize=256)(_cbor)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@lru_cache(maxsize=64)
def _array_head(length: int) -> bytes:
    # A zero takes one byte, so what is left of an array of them is its head.
    return _cbor([0] * length)[:-length]


_TAG_OF = {tag: tag for tag in TAGS}
_TOKENS = _TokenTable()


def _or(seed: str | None, default: str = "") -> str:
    # A seed that can be guessed lets strangers prepare collisions, so vLLM draws one per process if none is set; so do we.
    return seed if seed is not None else default or os.urandom(32).hex()


ALGORITHMS: dict[str, Factory] = {
    "sha256": lambda seed: _PickledDigests("sha256", _or(seed, VLLM_SEED), _sha256),
    "sha256_cbor": lambda seed: _CborDigests("sha256_cbor", _or(seed, VLLM_SEED), _sha256),
    "xxhash": lambda seed: _PickledDigests("xxhash", _or(seed), xxhash.xxh3_128_digest),
    "xxhash_cbor": lambda seed: _CborDigests("xxhash_cbor", _or(seed), xxhash.xxh3_128_digest),
    "xxh3": lambda seed: _Xxh3("xxh3", _or(seed, XXH3_SEED)),
}
"""Every algorithm by name. Add a factory here to add one."""
