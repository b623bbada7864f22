"""Hashes on wires (signed or unsigned, any width, digests as bytes or hex), and their one form inside kvyard.

Inside, an integer hash is unsigned and 64 bits wide, whatever its sign on the wire, and a digest is bytes. Everything here
works on a whole list at built-in speed and looks at single hashes only where it must.
"""

from collections.abc import Sequence

from kvyard.events.wire.decoded import EventRefused, ProblemKind
from kvyard.hashing import DigestKeys, Key, wire_hash

U64 = (1 << 64) - 1
_LOWEST = -(1 << 63)
MAX_DIGEST = 128
"""Bytes of the longest thing taken for a digest."""


class BadHash(EventRefused):
    """Something that can't be a block hash."""

    def __init__(self, reason: str) -> None:
        super().__init__(ProblemKind.HASH, reason)


def read_hashes(hashes: list[Key], narrow: bool = False) -> list[Key]:
    """Return ``hashes`` in the form used inside; the same list where nothing had to change.

    ``narrow`` turns digests into the integers vLLM would have sent: their last 64 bits. Raises ``BadHash``.
    """
    if not hashes:
        return hashes
    try:
        low, high = min(hashes), max(hashes)  # a mixed list raises
    except TypeError:
        return [read_hash(key, narrow) for key in hashes]
    if isinstance(low, int) and isinstance(high, int):
        if low >= 0 and high <= U64:
            return hashes
        if low < _LOWEST or high > U64:
            raise BadHash("a hash wider than 64 bits")
        return [key & U64 for key in hashes]  # type: ignore[operator]  # all are integers here
    return [read_hash(key, narrow) for key in hashes]


def read_hash(key: Key, narrow: bool = False) -> Key:
    """Return one hash in the form used inside. Raises ``BadHash``."""
    if isinstance(key, int):
        if not _LOWEST <= key <= U64:
            raise BadHash("a hash wider than 64 bits")
        return key & U64
    if not 0 < len(key) <= MAX_DIGEST:
        raise BadHash(f"a digest of {len(key)} bytes")
    return wire_hash(key) if narrow else key


def read_hex(text: str, narrow: bool = False) -> Key:
    """Return a digest written in hex, as TensorRT-LLM sends its SHA-256 hashes. Raises ``BadHash``."""
    try:
        return read_hash(bytes.fromhex(text), narrow)
    except ValueError as error:
        raise BadHash("a hash that is neither a number nor hex digits") from error


def write_hashes(hashes: Sequence[Key], integers: bool) -> list[Key]:
    """Return ``hashes`` as the wire takes them: integers unsigned in 64 bits, digests as they are unless ``integers`` are
    wanted.
    """
    if not hashes:
        return []
    if isinstance(hashes, DigestKeys):
        return [*hashes.narrowed()] if integers else [*hashes]
    if isinstance(hashes[0], int):
        try:
            low, high = min(hashes), max(hashes)
        except TypeError:
            pass
        else:
            if low >= 0 and high <= U64:  # type: ignore[operator]
                return hashes if isinstance(hashes, list) else list(hashes)
    if integers:
        return [wire_hash(key) for key in hashes]
    return [key if isinstance(key, bytes) else key & U64 for key in hashes]


def write_hash(key: Key | None, integers: bool) -> Key | None:
    """Return one hash, or none, as the wire takes it."""
    if key is None:
        return None
    return key if isinstance(key, bytes) and not integers else wire_hash(key)
