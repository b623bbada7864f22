"""The options of every command that reads a trace."""

import atexit
import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.settings import Command, parameter, with_group
from kvyard.errors import KvyardError
from kvyard.replay.traces import FORMATS, Trace, open_trace

GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\0"
"""First bytes of compressed files."""
HEADING = "How the trace is read"
TRACE_BLOCK_SIZE = "--trace-block-size"
"""Works with every command that reads a trace; those that have no engine also call it by a shorter name."""


def _switch(name: str, help: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), help=help, rich_help_panel=HEADING)
    return parameter(name, bool, option, default=False)


CHAIN_IDS = _switch("chain_ids", "For ids that name blocks and not prefixes.")
LIMIT = parameter(
    "limit", int | None, typer.Option(min=1, help="Read at most this many requests.", rich_help_panel=HEADING)
)


def keep_piped(context: typer.Context, path: Path | None) -> Path | None:
    """``path``, or if it is a pipe, such as /dev/stdin, a copy of what comes out of it: traces are read several times, by
    other processes too. The copy goes with this process. Raises ``KvyardError`` if it can't be made.
    """
    if context.resilient_parsing:
        return path  # a shell completes the line: there is nothing to read, and reading might never end
    try:
        if path is None or not (path.is_fifo() or path.is_socket() or path.is_char_device()):
            return path
        folder = tempfile.TemporaryDirectory(prefix="kvyard-piped-")
        atexit.register(folder.cleanup)
        with path.open("rb") as pipe:
            first = pipe.read(len(XZ))
            packed = ".gz" if first.startswith(GZIP) else ".xz" if first == XZ else ""
            kept = Path(folder.name, path.name + packed)
            with kept.open("wb") as file:
                file.write(first)
                shutil.copyfileobj(pipe, file)
    except OSError as error:
        raise KvyardError(f"{path} can't be read: {error.strerror or error}; write it to a file first") from None
    return kept


TraceFile = Annotated[
    Path,
    typer.Argument(
        help="A trace in one of the formats of kvyard trace formats; .gz, .xz and pipes such as /dev/stdin work too.",
        callback=keep_piped,
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(help="Limits of a good request, such as ttft=500ms,itl=20ms, or of the run, such as ttft_p99<1s."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress and no table, only errors.", rich_help_panel=OUTPUT)
]


def with_reading(*more: inspect.Parameter, block_size: str = "--block-size") -> Callable[[Command], Command]:
    """Gives a command options for ``read_trace``, and ``more`` of them. It gets all as one mapping, ``reading``."""
    formats = f"The trace's format, if its first record doesn't show it: {', '.join(FORMATS.names())}."
    return with_group(
        "reading",
        parameter("format", str | None, typer.Option("--format", help=formats, rich_help_panel=HEADING)),
        parameter(
            "trace_block_size",
            int | None,
            typer.Option(
                *dict.fromkeys((block_size, TRACE_BLOCK_SIZE)),
                min=1,
                help="Tokens per id of the trace.",
                rich_help_panel=HEADING,
            ),
        ),
        _switch("skip_bad", "Count bad rows and go on."),
        _switch("sort", "Put requests in order of arrival, holding all of them."),
        *more,
    )


def read_trace(path: Path, reading: Mapping[str, Any]) -> Trace:
    """Return the trace in ``path``, by the options of ``with_reading``."""
    return open_trace(path, **reading)
