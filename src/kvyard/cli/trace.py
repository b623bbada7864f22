"""``kvyard trace``: look into traces, cut and convert them, and make them up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.reading import ChainIds, FormatName, IdBlockSize, SkipBad, Sort
from kvyard.cli.settings import with_flags
from kvyard.clock.units import from_seconds
from kvyard.errors import KvyardError
from kvyard.replay.traces import FORMATS, Trace, open_trace
from kvyard.replay.traces.changes import scaled, sliced, with_arrivals
from kvyard.replay.traces.generate import Workload
from kvyard.replay.traces.generate import generate as generated
from kvyard.replay.traces.identity import TOKEN_BLOCK
from kvyard.replay.traces.writing import TARGETS, Written, write_trace
from kvyard.settings import count, settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look into traces, cut, convert and generate them.")

File = Annotated[Path, typer.Argument(help="A trace, packed with gzip or xz or not; or a directory of sessions.")]
Out = Annotated[Path, typer.Argument(help="A new file, packed if its name ends in .gz or .xz.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read so many requests at most.")]
To = Annotated[str, typer.Option("--to", help=f"The format to write: {' or '.join(TARGETS)}.")]
Lossy = Annotated[bool, typer.Option("--lossy", help="Leave out who waits for whom where the format can't say it.")]


@app.command()
def info(
    file: File,
    format_name: FormatName = None,
    block_size: IdBlockSize = None,
    capacity: Annotated[
        str, typer.Option(help="Cache sizes in blocks, such as 1k,20k,1m.")
    ] = "1000,10000,30000,50000,100000",
    html: Annotated[Path | None, typer.Option(help="Also write plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    skip_bad: SkipBad = False,
    sort: Sort = False,
    chain_ids: ChainIds = False,
    limit: Limit = None,
) -> None:
    """Count what is in a trace: lengths, rates, and how much of it a cache could reuse."""
    import msgspec

    from kvyard.cli.trace_show import info_lines
    from kvyard.replay.traces.info import describe

    capacities = [count("--capacity", part.strip()) for part in capacity.split(",")]
    if min(capacities) < 0:
        raise KvyardError(f"--capacity {capacity}: a number of blocks can't be negative")
    trace = open_trace(
        file, format_name, block_size=block_size, skip_bad=skip_bad, sort=sort, chain_ids=chain_ids, limit=limit
    )
    found = describe(trace, capacities, token_block=block_size or TOKEN_BLOCK)
    if html is not None:
        from kvyard.replay.traces.page import write_page

        write_page(found, html)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        for line in info_lines(found):
            typer.echo(line)
    if html is not None:
        typer.echo(f"plots: {html}", err=True)


@app.command()
def convert(
    file: File,
    out: Out,
    to: To = "mooncake",
    lossy: Lossy = False,
    format_name: FormatName = None,
    block_size: IdBlockSize = None,
    skip_bad: SkipBad = False,
    sort: Sort = False,
    chain_ids: ChainIds = False,
    limit: Limit = None,
) -> None:
    """Write a trace in another format, so that another tool, or a real engine, can run it."""
    trace = open_trace(
        file, format_name, block_size=block_size, skip_bad=skip_bad, sort=sort, chain_ids=chain_ids, limit=limit
    )
    _write(trace, out, to, lossy, block_size)


@app.command(name="slice")
def slice_(
    file: File,
    out: Out,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many requests.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Take so many requests.")] = None,
    since: Annotated[float, typer.Option("--from", min=0.0, help="Second of the first arrival to take.")] = 0.0,
    until: Annotated[float | None, typer.Option(min=0.0, help="Second of the first arrival not to take.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Take so many sessions as a whole.")] = None,
    to: To = "mooncake",
    lossy: Lossy = False,
    format_name: FormatName = None,
    block_size: IdBlockSize = None,
    skip_bad: SkipBad = False,
    sort: Sort = False,
) -> None:
    """Write a part of a trace, chosen by number, time or session."""
    trace = open_trace(file, format_name, block_size=block_size, skip_bad=skip_bad, sort=sort)
    part = sliced(
        trace,
        skip=skip,
        first=first,
        since=from_seconds(since),
        until=None if until is None else from_seconds(until),
        sessions=sessions,
    )
    _write(part, out, to, lossy, block_size)


@app.command()
def scale(
    file: File,
    out: Out,
    speedup: Annotated[float, typer.Option(help="Divide gaps and think times by this.")] = 1.0,
    arrivals: Annotated[
        str | None, typer.Option(help="Draw arrivals anew before that, such as poisson:2 or gamma:2,3.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    to: To = "mooncake",
    lossy: Lossy = False,
    format_name: FormatName = None,
    block_size: IdBlockSize = None,
    skip_bad: SkipBad = False,
    sort: Sort = False,
) -> None:
    """Write a trace at another speed, or with other arrivals."""
    trace = open_trace(file, format_name, block_size=block_size, skip_bad=skip_bad, sort=sort)
    if arrivals is not None:
        trace = with_arrivals(trace, arrivals, seed)
    elif speedup == 1:
        raise KvyardError("nothing to change: pass --speedup, or --arrivals, or both")
    _write(scaled(trace, speedup), out, to, lossy, block_size)


@app.command()
@with_flags(settings_of(Workload))
def generate(out: Out, settings: Mapping[str, object], to: To = "mooncake", lossy: Lossy = False) -> None:
    """Make a trace up: arrivals, lengths, shared prefixes, sessions."""
    workload = Workload(**settings_of(Workload).parse(settings))
    _write(generated(workload), out, to, lossy, None)


@app.command(name="formats")
def formats_() -> None:
    """List the formats that can be read and written."""
    typer.echo("read:")
    for name in sorted(FORMATS.names()):
        typer.echo(f"  {name:<12} {FORMATS.get(name).summary}")
    typer.echo("written:")
    for target in TARGETS.values():
        typer.echo(f"  {target.name:<12} {target.summary}")


def _write(trace: Trace, out: Path, to: str, lossy: bool, block_size: int | None) -> None:
    written: Written = write_trace(trace, out, to, token_block=block_size or TOKEN_BLOCK, lossy=lossy)
    typer.echo(f"{out}: {written.rows} requests", err=True)
    for note in written.notes:
        typer.echo(f"  {note}", err=True)
    for note in trace.tally.notes():
        typer.echo(f"  {note}", err=True)
