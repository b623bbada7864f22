"""Bytes as people write them."""

import re
from fractions import Fraction

from kvyard.errors import KvyardError

UNITS = {"": 1, "B": 1, "kB": 1000}
for _power, _prefix in enumerate("KMGT", 1):
    UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}


def parse_bytes(text: str) -> int:
    """Return the bytes that text such as ``80GiB`` or ``24 GB`` stands for. Raises ``KvyardError`` for anything else."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(matched[2]) if matched else None
    if matched is None or unit is None:
        raise KvyardError(f"{text!r} is not a size in bytes; write it like 80GiB or 24GB")
    return int(Fraction(matched[1]) * unit)


def show_bytes(count: float) -> str:
    """For people: with the binary unit that leaves the fewest digits."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or name == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {name}" if name == "B" else f"{count:.2f} {name}"
