"""Sets of small numbers as the bits of one integer: workers by slot, places by number. Each decision has many."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

_BYTES: Final = [tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256)]
_LATER: Final[dict[int, tuple[int, ...]]] = {}
_WIDE: Final = 32
_SPARSE: Final = 8
_FILLED: Final = re.compile(rb"[^\0]")


def bits(mask: int) -> Sequence[int]:
    """Return the numbers of the bits that are set, lowest first, byte by byte."""
    if mask < 256:
        return _BYTES[mask]
    out: list[int] = []
    if mask.bit_length() > 8 * _WIDE and mask.bit_count() <= _SPARSE:
        # Of thousands of workers few are in most sets.
        while mask:
            top = mask.bit_length() - 1
            out.append(top)
            mask ^= 1 << top
        out.reverse()
        return out
    row = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    if len(row) > _WIDE:
        for match in _FILLED.finditer(row):
            index = match.start()
            out += [index * 8 + bit for bit in _BYTES[row[index]]]
        return out
    for index, byte in enumerate(row):
        if byte:
            positions = _LATER.get(index << 8 | byte)
            if positions is None:
                positions = _LATER[index << 8 | byte] = tuple(index * 8 + bit for bit in _BYTES[byte])
            out += positions
    return out


def mask_of(numbers: Iterable[int]) -> int:
    """Return the integer that has just these bits set."""
    wanted = list(numbers)
    if len(wanted) <= _WIDE:
        mask = 0
        for number in wanted:
            mask |= 1 << number
        return mask
    row = bytearray((max(wanted) >> 3) + 1)
    for number in wanted:
        row[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(row, "little")
