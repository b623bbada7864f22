"""Rows of a prompt, put together from what an index keeps."""

from collections.abc import Iterable

from kvyard.index.backend import Rows


def joined(rows: Iterable[tuple[int, int]]) -> Rows:
    """Return ``rows`` with neighbours of equal content made one, and no empty row at the end."""
    out: Rows = []
    for stop, mask in rows:
        if out and out[-1][1] == mask:
            out[-1] = (stop, mask)
        else:
            out.append((stop, mask))
    if out and not out[-1][1]:
        out.pop()
    return out
