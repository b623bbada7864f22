"""The options of every command that reads a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from kvyard.replay.traces import FORMATS

FormatName = Annotated[
    str | None,
    typer.Option(
        "--format", help=f"The trace's format, if its first record doesn't tell: {', '.join(FORMATS.names())}."
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad rows and go on.")]
Sort = Annotated[bool, typer.Option("--sort", help="Put requests in order of arrival, holding all of them.")]
ChainIds = Annotated[bool, typer.Option("--chain-ids", help="For ids that name blocks and not prefixes.")]
IdBlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens an id of the trace stands for.")]
Slo = Annotated[str | None, typer.Option(help="What a good request is, in ms, such as ttft=500,itl=20.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No bar, no table: only files and errors.")]
