"""Namespaces: what sets a prompt apart from another with the same tokens, block by block.

An adapter, a tenant's salt, images or prompt embeddings each add *extra keys* to the hash of the blocks they touch; the
chain carries them on to every later block. This module knows which keys belong to which block, in vLLM's order and in both
of its forms: tagged, as 0.32 hashes them, and bare, as older versions hash them and as every version puts them in events.
It computes no block hashes.
"""

import hashlib
from itertools import pairwise
from typing import TypeAlias

import cbor2
import msgspec
import xxhash

from kvyard.errors import KvyardError

ExtraKeys: TypeAlias = tuple[object, ...]
"""Extra keys of one block: nested tuples of text, bytes and integers."""

TAGS = ("lora", "mm", "cache_salt", "prompt_embeds")
"""The tags of the tagged form, in the order in which extra keys appear in a block."""

_LORA, _MEDIA, _SALT, _EMBEDS = TAGS


class NamespaceError(KvyardError, ValueError):
    """A namespace that can't be hashed."""


class Media(msgspec.Struct, frozen=True):
    """One image, clip or recording: its content hash and the placeholder tokens it fills."""

    hash: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise NamespaceError(f"a media item must start at token 0 or later, not at {self.offset}")
        if self.length < 1:
            raise NamespaceError(f"a media item must cover at least one token, not {self.length}")

    @property
    def stop(self) -> int:
        """The token after the last one the item fills."""
        return self.offset + self.length


class Embeds(msgspec.Struct, frozen=True):
    """Prompt embeddings as raw bytes, row after row; generated tokens come after them and have none."""

    data: bytes
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or len(self.data) % self.bytes_per_token:
            raise NamespaceError(
                f"{len(self.data)} bytes of prompt embeddings are no whole number of {self.bytes_per_token}-byte rows"
            )

    def digest(self, start: int, stop: int) -> bytes:
        """SHA-256 of the rows of tokens ``start`` to ``stop``; past the last row that of nothing, as in vLLM."""
        width = self.bytes_per_token
        return hashlib.sha256(memoryview(self.data)[start * width : stop * width]).digest()


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the tokens that a prompt's hashes depend on.

    ``lora_id`` is for events only. vLLM 0.32 hashes an adapter's path with its name, and its paths are never empty: leave
    ``lora_path`` out only where no real engine has to agree. An empty salt is no salt. ``media`` is sorted by offset and
    doesn't overlap. ``tagged=False`` gives the hashes of vLLM before 0.32.
    """

    lora_name: str | None = None
    lora_path: str = ""
    lora_id: int | None = None
    salt: str | None = None
    media: tuple[Media, ...] = ()
    embeds: Embeds | None = None
    tagged: bool = True

    def __post_init__(self) -> None:
        if self.lora_name is None and (self.lora_path or self.lora_id is not None):
            raise NamespaceError("an adapter's path or id needs its name: give lora_name as well")
        for before, other in pairwise(self.media):
            if other.offset < before.offset:
                raise NamespaceError(f"media must be sorted by offset, but {other.offset} follows {before.offset}")
            if other.offset < before.stop:
                raise NamespaceError(
                    f"media must not overlap, but the item at {before.offset} ends after the one at {other.offset} starts"
                )

    @property
    def plain(self) -> bool:
        """Return true if nothing here reaches a hash: ordinary text."""
        return self.lora_name is None and not self.salt and not self.media and self.embeds is None

    def extras(self, first: int, last: int, block_size: int) -> list[ExtraKeys | None] | None:
        """Return the extra keys of each block from ``first`` to ``last`` (exclusive); ``None`` if no block has any."""
        return self._keys(first, last, block_size, self.tagged)

    def wire_extras(self, first: int, last: int, block_size: int) -> list[ExtraKeys | None]:
        """Return the extra keys for events: always untagged, and always one entry per block."""
        return self._keys(first, last, block_size, False) or [None] * (last - first)

    def fingerprint(self) -> int:
        """Return 64-bit digest of this namespace's adapter and salt, where a chain has no tokens to hash them with."""
        return xxhash.xxh3_64_intdigest(cbor2.dumps((self.lora_name, self.lora_path, self.salt or None)))

    def _keys(self, first: int, last: int, size: int, tagged: bool) -> list[ExtraKeys | None] | None:
        if self.plain:
            return None
        name = self.lora_name
        common: ExtraKeys = () if name is None else ((_LORA, name, self.lora_path) if tagged else name,)
        # Blocks that nothing but the adapter touches share one tuple, so a long prompt costs no more than its media.
        keys = [common] * (last - first)
        for item in self.media:
            for block in range(max(first, item.offset // size), min(last, (item.stop - 1) // size + 1)):
                offset = item.offset - block * size
                keys[block - first] += ((_MEDIA, item.hash, offset) if tagged else (item.hash, offset),)
        if self.salt and first == 0 and keys:
            keys[0] += ((_SALT, self.salt) if tagged else self.salt,)
        if self.embeds is not None:
            for block in range(first, last):
                digest = self.embeds.digest(block * size, (block + 1) * size)
                keys[block - first] += ((_EMBEDS, digest) if tagged else digest,)
        return [key or None for key in keys] if any(keys) else None


PLAIN = Namespace()
"""Ordinary text: no extra keys anywhere."""
