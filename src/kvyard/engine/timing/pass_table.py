"""A pass table: how long the parts of a pass take, measured, on a few axes. What every source of tables is compiled into.

A pass is everything but attention by its tokens, the output layer by its sequences, and attention: of prompts by (new, past),
of decode steps by (requests, mean context), and, where a source measured both together, by all four. In between it is linear.
It knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kvyard.engine.timing.interpolation import across, along, row_between
from kvyard.errors import KvyardError

FORMAT = "kvyard-pass-table/2"


class Curve(msgspec.Struct, frozen=True):
    """Microseconds along one axis, which rises."""

    at: tuple[int, ...]
    us: tuple[float, ...]

    def value(self, x: float) -> float:
        """Return the value at ``x``, linear between two points; below the first point the first value, beyond the last as
        between the last two.
        """
        return along(self.at, self.us, x)


class Plane(msgspec.Struct, frozen=True):
    """Microseconds over two axes: one row of ``us`` per point of ``rows``, along ``at``."""

    rows: tuple[int, ...]
    at: tuple[int, ...]
    us: tuple[tuple[float, ...], ...]

    def row(self, x: float) -> Curve:
        """Return the curve along ``at`` for ``x`` on the axis of rows."""
        return Curve(self.at, row_between(self.rows, self.us, x))

    def value(self, x: float, y: float) -> float:
        """At ``x`` on the axis of rows and ``y`` along them: what ``row(x).value(y)`` is, without the rest of the row."""
        return across(self.rows, self.at, self.us, x, y)


class PassTable(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one card, split one way. Microseconds of all layers together, on one rank."""

    format: str = FORMAT
    source: str
    """Source of the numbers, with versions: for reports."""
    coverage: str = ""
    """Measured parts and stand-ins for measurements: for reports."""
    tokens: Curve
    """Time of everything but attention and the output layer, by tokens of the pass."""
    sequences: Curve
    """The output layer and sampling."""
    prompt: Plane
    """Attention of one prompt: rows by new tokens, along past ones."""
    decode: Plane
    """Attention of decode steps: rows by requests, along their mean context."""
    together: tuple[tuple[int, int, Plane], ...] = ()
    """Attention of a pass with both, where measured: (new, past, a plane like ``decode``)."""
    skew: Curve = Curve((1,), (0.0,))
    """By requests: what share of the way from the mean context to the longest one counts."""
    experts: Curve | None = None
    """Time of experts of data-parallel ranks that share them, exchanges included, by tokens of all ranks together. It is
    included in ``tokens``, for ranks that compute as many tokens each."""
    graph_tokens: int = 512
    """Up to here passes are padded to sizes of CUDA graphs."""

    def check(self) -> None:
        """Raise ``KvyardError``, naming the part, for a table that can't be computed with."""
        for name in ("tokens", "sequences", "skew"):
            _check_curve(name, getattr(self, name))
        if self.experts is not None:
            _check_curve("experts", self.experts)
        for name in ("prompt", "decode"):
            plane = getattr(self, name)
            _check_axis(name, plane.rows)
            if len(plane.us) != len(plane.rows):
                raise KvyardError(f"pass table: {name} has {len(plane.us)} rows for an axis of {len(plane.rows)}")
            for row in plane.us:
                _check_curve(name, Curve(plane.at, row))


def _check_curve(name: str, curve: Curve) -> None:
    _check_axis(name, curve.at)
    if len(curve.us) != len(curve.at):
        raise KvyardError(f"pass table: {name} has {len(curve.us)} values for an axis of {len(curve.at)}")
    if any(not 0 <= value < 1e12 for value in curve.us):
        raise KvyardError(f"pass table: {name} has a value that is no time")


def _check_axis(name: str, axis: Sequence[int]) -> None:
    if not axis or any(a >= b for a, b in pairwise(axis)):
        raise KvyardError(f"pass table: the axis of {name} must rise")
