"""``kvyard trace``: inspects, cuts, converts and generates traces."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from kvyard.cli.outputs import print_json, say_written, words_beside
from kvyard.cli.reading import CHAIN_IDS, LIMIT, keep_piped, read_trace, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_flags
from kvyard.clock import from_seconds
from kvyard.errors import KvyardError
from kvyard.files import STDOUT, check_outputs, is_regular, name_of
from kvyard.replay.traces import FORMATS, Trace, open_trace
from kvyard.replay.traces.agents import AgentWorkload, generate_agents
from kvyard.replay.traces.changes import scaled, sliced, tiled, with_arrivals
from kvyard.replay.traces.fitting import AgentFigures, AgentSamples
from kvyard.replay.traces.generate import Workload
from kvyard.replay.traces.generate import generate as generated
from kvyard.replay.traces.hinting import with_hints
from kvyard.replay.traces.identity import TOKEN_BLOCK
from kvyard.replay.traces.info import Info, Reuse, describe
from kvyard.replay.traces.writing import TARGETS, Written, write_trace
from kvyard.settings import count, settings_of
from kvyard.units import show_bytes

BYTES_PER_WORD = 4.41
"""Bytes per word of prompts written in words, with the space."""
FAR = 0.15
"""Relative difference from which on a figure of a generated trace is marked."""
LARGE = 100 << 20
WIDE = 112

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Inspect, cut, convert and generate traces.")

File = Annotated[
    Path,
    typer.Argument(
        help="A trace (.gz and .xz are unpacked), a directory of sessions, or a pipe such as /dev/stdin.",
        callback=keep_piped,
    ),
]
Out = Annotated[Path, typer.Argument(help="File to write, compressed if its name ends in .gz or .xz; - for stdout.")]
To = Annotated[str, typer.Option("--to", help=f"The format to write: {' or '.join(TARGETS)}.")]
Lossy = Annotated[
    bool, typer.Option("--lossy", help="Drop dependencies between requests that the format can't express.")
]


@app.command()
@with_reading(CHAIN_IDS, LIMIT)
def info(
    file: File,
    reading: Mapping[str, Any],
    capacity: Annotated[
        str, typer.Option(help="Cache sizes in blocks, such as 1k,20k,1m.")
    ] = "1000,10000,30000,50000,100000",
    html: Annotated[Path | None, typer.Option(help="Also write plots to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Summarize a trace: lengths, arrival rates, and the reuse that a cache could have."""
    capacities = [count("--capacity", part.strip()) for part in capacity.split(",")]
    if min(capacities) < 0:
        raise KvyardError(f"--capacity {capacity}: a number of blocks can't be negative")
    check_outputs(html, STDOUT if as_json else None, reads=[file])
    trace = read_trace(file, reading)
    info_read = describe(trace, capacities, token_block=reading["trace_block_size"] or TOKEN_BLOCK)
    if html is not None:
        from kvyard.replay.traces.page import write_page

        write_page(info_read, html)
    if as_json:
        print_json(info_read)
    else:
        with words_beside(html):
            for line in info_lines(info_read):
                typer.echo(line)
    say_written([html])


@app.command()
@with_reading(CHAIN_IDS, LIMIT)
def convert(file: File, out: Out, reading: Mapping[str, Any], to: To = "mooncake", lossy: Lossy = False) -> None:
    """Convert a trace to another format, for another tool or a real engine."""
    check_outputs(out, reads=[file])
    _write(read_trace(file, reading), out, to, lossy, reading["trace_block_size"])


@app.command(name="slice")
@with_reading()
def slice_(
    file: File,
    out: Out,
    reading: Mapping[str, Any],
    skip: Annotated[int, typer.Option(min=0, help="Leave out this many requests.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Take this many requests.")] = None,
    since: Annotated[float, typer.Option("--from", min=0.0, help="Second of the first arrival to take.")] = 0.0,
    until: Annotated[float | None, typer.Option(min=0.0, help="Second of the first arrival not to take.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Take this many whole sessions.")] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Leave out requests with fewer tokens, prompt and answer together.")
    ] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out requests with more tokens, prompt and answer together.")
    ] = None,
    to: To = "mooncake",
    lossy: Lossy = False,
) -> None:
    """Write a part of a trace, chosen by number, time, session or length."""
    check_outputs(out, reads=[file])
    trace = read_trace(file, reading)
    part = sliced(
        trace,
        skip=skip,
        first=first,
        since=from_seconds(since),
        until=None if until is None else from_seconds(until),
        sessions=sessions,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )
    _write(part, out, to, lossy, reading["trace_block_size"])


@app.command()
@with_reading()
def scale(
    file: File,
    out: Out,
    reading: Mapping[str, Any],
    speedup: Annotated[float, typer.Option(help="Divide gaps and think times by this.")] = 1.0,
    arrivals: Annotated[
        str | None, typer.Option(help="Draw new arrivals before that, such as poisson:2 or gamma:2,3.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    to: To = "mooncake",
    lossy: Lossy = False,
) -> None:
    """Write a trace at another speed or with other arrivals."""
    check_outputs(out, reads=[file])
    trace = read_trace(file, reading)
    if arrivals is not None:
        trace = with_arrivals(trace, arrivals, seed)
    elif speedup == 1:
        raise KvyardError("nothing to change: pass --speedup, or --arrivals, or both")
    _write(scaled(trace, speedup), out, to, lossy, reading["trace_block_size"])


@app.command()
@with_reading(CHAIN_IDS, LIMIT)
def repeat(
    file: File,
    out: Out,
    reading: Mapping[str, Any],
    times: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of copies.")],
    first: Annotated[int | None, typer.Option(min=1, help="Take this many requests of the result.")] = None,
    to: To = "mooncake",
    lossy: Lossy = False,
) -> None:
    """Write several copies of a trace one after the other. Copies share no prefixes."""
    check_outputs(out, reads=[file])
    trace = tiled(read_trace(file, reading), times)
    _write(trace if first is None else sliced(trace, first=first), out, to, lossy, reading["trace_block_size"])


@app.command()
@with_reading(CHAIN_IDS, LIMIT)
def hint(
    file: File,
    out: Out,
    reading: Mapping[str, Any],
    hints: Annotated[str, typer.Option(help="Hints and their quality, such as session-end:recall=0.5,false=0.1.")],
    seed: Annotated[int, typer.Option(help="Of who says it.")] = 0,
    to: To = "mooncake",
    lossy: Lossy = False,
) -> None:
    """Write a trace with session hints, generated from its own future."""
    _write(with_hints(read_trace(file, reading), hints, seed), out, to, lossy, reading["trace_block_size"])


@app.command()
@with_flags(settings_of(Workload))
def generate(out: Out, settings: Mapping[str, object], to: To = "mooncake", lossy: Lossy = False) -> None:
    """Generate a trace: arrivals, lengths, shared prefixes, sessions."""
    check_outputs(out)
    workload = Workload(**settings_of(Workload).parse(settings))
    _write(generated(workload), out, to, lossy, None)


@app.command(name="generate agent")
@with_flags(settings_of(AgentWorkload))
def generate_agent(
    out: Out,
    settings: Mapping[str, object],
    fit: Annotated[
        Path | None,
        typer.Option(help="Take what isn't given here from this trace, and compare the two.", callback=keep_piped),
    ] = None,
    to: To = "mooncake",
    lossy: Lossy = False,
) -> None:
    """Generate a trace of agents: tools, sub-agents, think times, shared skills, rollouts."""
    check_outputs(out, reads=[fit] if fit is not None else [])
    given = settings_of(AgentWorkload).parse(settings)
    if fit is None:
        _write(generate_agents(AgentWorkload(**given)), out, to, lossy, None)
        return
    samples = AgentSamples(open_trace(fit))
    trace = generate_agents(replace(samples.workload(), **given))
    _write(trace, out, to, lossy, None)
    for line in figure_lines(samples.figures(), AgentSamples(trace).figures()):
        typer.echo(line, err=True)


def figure_lines(wanted: AgentFigures, generated: AgentFigures) -> Iterator[str]:
    """Yield the figures of two traces side by side, for people."""
    yield f"  {'':<14}{'given':>12}{'generated':>12}"
    for name in AgentFigures.__struct_fields__:
        given, generated_ = getattr(wanted, name), getattr(generated, name)
        far = given and abs(generated_ / given - 1) > FAR and name not in ("requests", "sessions")
        note = f"   {generated_ / given - 1:+.0%}" if far else ""
        yield f"  {name:<14}{given:>12,.6g}{generated_:>12,.6g}{note}"


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
    if to == "vllm-custom":
        _announce(trace, out)
    written: Written = write_trace(trace, out, to, token_block=block_size or TOKEN_BLOCK, lossy=lossy)
    typer.echo(f"{name_of(out)}: {written.rows} requests", err=True)
    for note in written.notes:
        typer.echo(f"  {note}", err=True)
    for note in trace.tally.notes():
        typer.echo(f"  {note}", err=True)


def _announce(trace: Trace, out: Path) -> None:
    """Say how much will be written if that is a lot. Raises ``KvyardError`` if there is no room for it."""
    size = round(sum(request.input_length for request in trace) * BYTES_PER_WORD)
    if size < LARGE:
        return
    typer.echo(f"{name_of(out)}: about {show_bytes(size)}, because prompts are written in words", err=True)
    if is_regular(out):
        free = shutil.disk_usage(out.absolute().resolve().parent).free
        if free < size:
            raise KvyardError(f"{out} needs about {show_bytes(size)}, and {show_bytes(free)} are free: pass --limit N")


NARROW = ("mean", "p50", "p90", "p99", "max")
"""Columns that fit into 60 characters."""
COLUMNS = ("mean", "min", "p50", "p90", "p95", "p99", "max", "std")


def info_lines(info: Info) -> Iterator[str]:
    """Yield the lines, for people."""
    yield f"{info.name} ({info.format})"
    yield f"  requests   {info.requests:,}"
    if info.sessions:
        yield f"  sessions   {info.sessions:,}, with {info.waiting:,} requests that start after others end"
    if info.tool_calls:
        yield f"  tools      {info.tool_calls:,} answers call one"
    if info.hints:
        yield "  hints      " + ", ".join(f"{requests:,} of {name}" for name, requests in info.hints.items())
    yield f"  tokens     {info.input.total:,} in, {info.output.total:,} out"
    if info.rate is not None and info.peak is not None:
        burst = "" if info.burstiness is None else f"; gaps vary by {info.burstiness:.2f} (1: Poisson)"
        yield (
            f"  arrivals   over {info.duration:,.0f} s, {info.rate:.2f} a second, at most {info.peak:.2f} in "
            f"{info.window:.1f} s{burst}"
        )
    else:
        yield "  arrivals   all at once" + (": sessions have no place on a common clock" if info.sessions > 1 else "")
    yield ""
    columns = COLUMNS if shutil.get_terminal_size((WIDE, 24)).columns >= WIDE else NARROW
    each = 12 if columns is COLUMNS else 8
    yield f"  {'':<14}" + "".join(f"{name:>{each}}" for name in columns)
    spreads = {"input tokens": info.input, "output tokens": info.output, "think ms": info.think}
    for name, spread in spreads.items():
        if spread is not None:
            yield f"  {name:<14}" + "".join(f"{getattr(spread, column):>{each},.0f}" for column in columns)
    yield ""
    if info.reuse is None:
        yield "  reuse      not known: the trace doesn't say what prompts share"
    else:
        yield from _reuse_lines(info.reuse, bool(info.sessions) and info.rate is None)
    for reason, rows in info.left_out.items():
        yield f"  {rows:,} rows left out: {reason}"
    if info.skipped:
        yield f"  {info.skipped:,} bad rows skipped, the first of them:"
        yield from (f"    {example}" for example in info.skipped_examples)


def _reuse_lines(reuse: Reuse, one_by_one: bool) -> Iterator[str]:
    yield f"  blocks     {reuse.blocks:,} of {reuse.block_size} tokens looked up, {reuse.unique:,} different"
    yield (
        f"  bound      {reuse.infinite_blocks:.4f} of blocks, {reuse.infinite_tokens:.4f} of prompt tokens hit, with room for "
        "everything"
    )
    if reuse.median_session_tokens is not None:
        yield f"             {reuse.median_session_tokens:.4f} of prompt tokens in the median session"
    yield "  hits       blocks hit / blocks looked up, prompts in order, without time passing"
    if one_by_one:
        yield "             (sessions one after the other; side by side they need more room)"
    yield f"  {'cache blocks':>16}{'LRU':>10}{'Belady':>10}"
    for size in reuse.capacities:
        yield f"  {size.blocks:>16,}{size.lru:>10.4f}{size.belady:>10.4f}"
    if reuse.distances:
        middle = next(blocks for blocks, share in reuse.distances if share >= 0.5)
        most = next(blocks for blocks, share in reuse.distances if share >= 0.9)
        yield (
            f"  distance   half of what is used again has at most {middle:,} other blocks in between, nine tenths at most "
            f"{most:,}"
        )
    if reuse.unknown:
        yield f"  {reuse.unknown:,} requests without ids are left out of blocks, bound and hits"
