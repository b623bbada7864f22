"""Plain tables on a terminal."""

from collections.abc import Sequence

import typer


def print_table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> None:
    """Print rows of cells in columns: those numbered in ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        typer.echo("  ".join(cells).rstrip())
