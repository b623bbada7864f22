"""Tables for narrow terminals: whole columns are left out before any figure is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

WIDE = 10_000
LEAST_NAME = 20
"""Characters that the first column keeps, if it has as many."""


def fitted(table: Table, console: Console, leave_out: Iterable[str]) -> Table:
    """Return ``table`` without the columns that don't fit, in the order of ``leave_out``, and with their names below it."""
    from rich.measure import Measurement

    columns = list(table.columns)
    widths = {id(column): _width(column) for column in columns}
    wide = Measurement.get(console, console.options.update(max_width=WIDE), table).maximum
    around = (wide - sum(widths.values())) / len(columns)
    first = columns[0]
    widths[id(first)] = first.min_width = min(LEAST_NAME, widths[id(first)])
    widths |= {id(column): min(LEAST_NAME, widths[id(column)]) for column in columns[1:] if column.justify != "right"}
    left: list[str] = []
    for name in leave_out:
        if sum(widths[id(column)] + around for column in table.columns) <= console.width:
            break
        dropped = next((column for column in table.columns if _plain(column.header) == name), None)
        if dropped is not None:
            table.columns.remove(dropped)
            left.append(name)
    if left:
        caption = f"Not shown, for want of room: {', '.join(left)}."
        table.caption, table.caption_justify = f"{table.caption} {caption}" if table.caption else caption, "left"
    return table


def _width(column: Column) -> int:
    """Return the width of its longest cell."""
    from rich.cells import cell_len

    return max(cell_len(_plain(cell)) for cell in (column.header, *column.cells))


def _plain(cell: object) -> str:
    from rich.text import Text

    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
