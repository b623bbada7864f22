"""From a shape off the wire to an event: what each value means, and which values are refused.

The types have been checked by then; here are the rules. They are the same for every encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.events.wire.decoded import GROUP, HASH, MALFORMED, MEDIUM, Refused
from kvyard.events.wire.keys import BadHash, read_hash, read_hashes
from kvyard.events.wire.media import tier_of
from kvyard.events.wire.shapes import (
    AnyEvent,
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    Extras,
    MapCleared,
    MapRemoved,
    MapStored,
    Pair,
)
from kvyard.hashing import Key

MAX_COUNT = 1 << 31
"""No group, block size or window reaches this."""

_SCALARS = (str, int, float, bytes, type(None))


def read_event(shape: AnyEvent, narrow: bool = False, loose: bool = False) -> Event:
    """The event that ``shape`` says. Raises ``Refused``.

    ``narrow`` turns digests into 64-bit integers; ``loose`` says that tokens may be pairs.
    """
    if isinstance(shape, MapStored | ArrayStored):
        return _read_stored(shape, narrow, loose)
    if isinstance(shape, MapRemoved):
        return Removed(
            hashes=_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, GROUP, "group"),
            tier=_tier(shape.medium),
            reason=shape.reason,
            locality=shape.locality,
            ownership=shape.ownership,
        )
    if isinstance(shape, ArrayRemoved):
        return Removed(
            hashes=_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, GROUP, "group"),
            tier=_tier(shape.medium),
        )
    assert isinstance(shape, MapCleared | ArrayCleared)
    # A medium we can't read must not keep anything alive that may be gone.
    medium = shape.medium
    return Cleared(tier=tier_of(medium) if isinstance(medium, str) else None)


def _read_stored(
    shape: MapStored[int] | MapStored[Pair] | ArrayStored[int] | ArrayStored[Pair], narrow: bool, loose: bool
) -> Stored:
    hashes = _hashes(shape.block_hashes, narrow)
    parent: Key | None = shape.parent_block_hash
    if parent is not None:
        try:
            parent = read_hash(parent, narrow)
        except BadHash as error:
            raise Refused(HASH, f"parent: {error}") from None
    block_size = _count(shape.block_size, MALFORMED, "block size") or 0
    tokens = _tokens(shape.token_ids, loose) or None
    if tokens is None and not block_size and parent == 0:
        # A placeholder: the producer names blocks that it announced elsewhere. Some write "no parent" as 0 in these.
        parent = None
    name = shape.lora_name
    lora_name = name if isinstance(name, str) else None
    extras = None if shape.extra_keys is None else read_extras(shape.extra_keys)
    salt = None if extras is None or parent is not None else salt_of(extras, lora_name)
    # Arrays went out of use before these fields came.
    said = (shape.locality, shape.ownership, shape.session_id) if isinstance(shape, MapStored) else (None, None, None)
    return Stored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=block_size,
        group=_count(shape.group_idx, GROUP, "group"),
        tier=_tier(shape.medium),
        lora_name=lora_name,
        lora_id=shape.lora_id,
        extra_keys=extras,
        kind=shape.kv_cache_spec_kind,
        window=_count(shape.kv_cache_spec_sliding_window, MALFORMED, "window"),
        salt=salt,
        locality=said[0],
        ownership=said[1],
        session_id=said[2],
    )


def read_extras(keys: Extras) -> Extras | None:
    """Extra keys as nested tuples; ``None`` where no block has any. Raises ``Refused`` for anything but vLLM's forms."""
    if not any(keys):
        return None
    return [None if not key else tuple(_extra(item, at) for item in key) for at, key in enumerate(keys)]


def _extra(item: object, at: int) -> object:
    if isinstance(item, _SCALARS):
        return item
    if isinstance(item, list | tuple) and all(isinstance(part, _SCALARS) for part in item):
        return tuple(item)
    raise Refused(MALFORMED, f"extra key of block {at} is neither a plain value nor a list of them")


def salt_of(extras: Extras, lora_name: str | None) -> str | None:
    """The salt among the extra keys of a chain's first block: the one bare text that isn't the adapter's name.

    The wire doesn't tag extra keys. Two bare texts can't be told apart, and then there is no saying.
    """
    first = extras[0] if extras else None
    if not first:
        return None
    if lora_name is not None and first[0] == lora_name:
        first = first[1:]
    texts = [item for item in first if isinstance(item, str)]
    return texts[0] if len(texts) == 1 else None


def _hashes(hashes: list[Key], narrow: bool) -> list[Key]:
    try:
        return read_hashes(hashes, narrow)
    except BadHash as error:
        raise Refused(HASH, str(error)) from None


def _tokens(tokens: Sequence[int] | Sequence[Pair], loose: bool) -> list[int]:
    if loose:
        # Under EAGLE SGLang sends (this token, the next one); the first of each is the text.
        return [pair if isinstance(pair, int) else pair[0] for pair in tokens]
    return cast("list[int]", tokens)


def _tier(medium: str | None) -> Tier:
    tier = tier_of(medium)
    if tier is None:
        raise Refused(MEDIUM, f"unknown medium {cast('str', medium)[:40]!r}")
    return tier


def _count(value: int | None, kind: str, what: str) -> int | None:
    if value is None:
        return None
    if not 0 <= value < MAX_COUNT:
        raise Refused(kind, f"{what} {value} is out of range")
    return value
