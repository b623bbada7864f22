"""Output of commands: JSON on stdout, plain tables, messages that keep out of a result's way, and paths of results."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import msgspec
import typer

from kvyard.files import STDOUT, encode_json, is_stdout, write_whole


def print_json(value: object) -> None:
    """Write ``value`` to stdout for programs: indented, and UTF-8 whatever the terminal has."""
    write_whole(STDOUT, msgspec.json.format(encode_json(value), indent=2) + b"\n")


@contextmanager
def words_beside(*outputs: Path | None) -> Iterator[None]:
    """Has what is printed for people go to stderr if one of ``outputs`` is stdout, so that a program can read that."""
    if any(map(is_stdout, outputs)):
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


def say_written(paths: Iterable[Path | None]) -> None:
    """Name the files on stderr."""
    for path in paths:
        if path is not None and not is_stdout(path):
            typer.echo(f"written: {path}", err=True)


def print_table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> None:
    """Print rows of cells in columns: those numbered in ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        typer.echo("  ".join(cells).rstrip())
