"""Counts of tokens that stand for "however many come" and "not even one"."""

from __future__ import annotations

from typing import Final

ENDLESS: Final = 1 << 60
NEVER: Final = -1
