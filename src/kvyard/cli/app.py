"""The root command and its table of sub-commands, which are imported only when called.

Help must answer at once even when a sub-command needs sockets or a report library, and a broken optional part must not
take the others down. So the table carries each command's one line of help, and the module behind it is loaded by
``Unloaded`` when the command is called.

Exit codes: 0 done, 1 the command ran and its answer is no, 2 refused (usage or ``KvyardError``), 130 interrupted, 141
its reader went away (``kvyard ... | head``).
"""

import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from errno import ENOSPC
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.completion import get_completion_inspect_parameters, show_callback
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from kvyard import __version__
from kvyard.cli.plain_stream import PlainStream
from kvyard.errors import KvyardError

REFUSED = 2
INTERRUPTED = 130
NOT_READ = 141
COMPLETE_VARIABLE = "_KVYARD_COMPLETE"
"""Set by shells that ask for completions."""
SHELLS = ("bash", "zsh", "fish")


class CommandEntry(NamedTuple):
    """Import path of a sub-command, ``module:attribute`` (a function or a ``typer.Typer``), and its line in the help."""

    target: str
    summary: str
    heading: str = "Commands"


_GROUPS = {
    "Plan and replay": (
        ("plan", "plan", "Find the cheapest fleet for a trace, a model and an SLO."),
        ("replay", "replay", "Replay a trace through a fleet of workers."),
        ("trace", "app", "Inspect, cut, convert and generate traces."),
        ("model", "model", "Compute KV-cache groups, blocks and bytes of a model on a card."),
        ("events", "app", "Read and check streams of KV-cache events."),
    ),
    "Serve": (
        ("gateway", "gateway", "Route OpenAI requests by cached prefix and load."),
        ("index", "app", "Serve an index of KV-cache events, or query one."),
        ("mock", "mock", "Serve a fleet of vLLM endpoints without a GPU."),
        ("epp", "epp", "Pick endpoints for Envoy by cached prefix and load."),
        ("doctor", "doctor", "Find out why a router doesn't see an engine's cache."),
    ),
    "Lab": (
        ("sweep", "sweep", "Replay a trace at every combination of some settings."),
        ("league", "league", "Compare routing policies on one trace."),
        ("hints", "hints", "Estimate the gain of retention hints, by recall."),
        ("tune", "tune", "Search any settings of a fleet for goals under an SLO."),
        ("compare", "compare", "Compare the reports of several replays."),
        ("calibrate", "calibrate", "Fit timing to a live engine, or to an engine's log."),
        ("profile", "app", "Fit timing to measured passes, and inspect the fit."),
        ("validate", "validate", "Compare a real run with its replay."),
        ("expect", "expect", "Find out why prefix-cache hits of an engine are missing."),
        ("conform", "conform", "Compare block manager and schedulers with logs of real engines."),
        ("hunt", "hunt", "Search the scheduler of an installed engine for deadlocks."),
    ),
}
"""By heading, the three rings: name, attribute of the module of that name, and the line in the help."""

COMMANDS: Mapping[str, CommandEntry] = {
    name: CommandEntry(f"kvyard.cli.{name}:{attribute}", summary, heading)
    for heading, commands in _GROUPS.items()
    for name, attribute, summary in commands
}


HEADINGS = ("Arguments", "Question", "Fleet", "Traffic", "Router", "Engine", "", "Output", "Options")
"""Order of sections in a command's help; all others stand at the empty name."""
SUMMARY_LIMIT = 500
"""Characters of a summary; long ones are wrapped, not cut."""
UNBROKEN = "\u2011"
"""A hyphen that stays on the line of what follows it."""
OUTPUT = "Output"
"""Heading of options for results and printed output."""


class Suggesting:
    """Part of a command: adds the closest options to the error about an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except Exception as error:
            _suggest(self, ctx, error)
            raise


class PlainCommand(Suggesting, TyperCommand):
    """Has options in its help under the headings that they name (``rich_help_panel``), without boxes."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            if line is not None:
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(line)
        for heading in sorted(sections, key=_place):
            with formatter.section(heading):
                _write_rows(formatter, sections[heading])


def _write_rows(formatter: Any, rows: list[tuple[str, str]]) -> None:
    """Write options and their help. Lines aren't broken at hyphens, which names of choices have."""
    begin = len(formatter.buffer)
    formatter.write_dl([(names, text.replace("-", UNBROKEN)) for names, text in rows])
    formatter.buffer[begin:] = [part.replace(UNBROKEN, "-") for part in formatter.buffer[begin:]]


def _place(heading: str) -> int:
    return HEADINGS.index(heading if heading in HEADINGS else "")


def _suggest(command: Any, ctx: Any, error: Any) -> None:
    """Add the closest options that the help shows to the error about an unknown option."""
    written = getattr(error, "option_name", None)
    if written is None or not hasattr(error, "possibilities"):
        return
    shown = [
        name
        for parameter in command.get_params(ctx)
        if not getattr(parameter, "hidden", False)
        for name in parameter.opts
    ]
    near = get_close_matches(written, [name for name in shown if name.startswith("--")], 3, 0.6)
    error.possibilities = None
    error.message += f". Did you mean {' or '.join(near)}?" if near else "."


class PlainGroup(TyperGroup):
    """Lists its commands under their headings, in the order they were added, with no summary cut short."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take two words for a command that has them as its name, as ``generate agent``."""
        if len(args) > 1 and " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = command.entry.heading if isinstance(command, Unloaded) else "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(SUMMARY_LIMIT)))
        # Names of one width, so that all summaries begin in the same column.
        width = max(map(len, self.commands), default=0)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in lines])


class RootGroup(Suggesting, PlainGroup):
    """Turns what goes wrong with stdout and stderr into exit codes and a sentence."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _written():
            return super().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _written():
            return super().invoke(ctx)


@contextmanager
def _written() -> Iterator[None]:
    """Flush stdout at the end of the block. Raises ``KvyardError`` if it can't be written."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _print_nowhere()
        raise typer.Exit(NOT_READ) from None
    except OSError as error:
        _print_nowhere()
        where = f" {error.filename}" if error.filename else " what is printed" if error.errno == ENOSPC else ""
        raise KvyardError(f"can't read or write{where}: {error.strerror or error}") from None


def _print_nowhere() -> None:
    """Point stdout at the null device: Python flushes it once more at exit."""
    with suppress(OSError, ValueError):
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, sys.stdout.fileno())
        os.close(number)


def _make_streams_forgiving() -> None:
    """Print ? for characters that a stream can't encode, escape control characters, and discard output of closed streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            setattr(sys, name, PlainStream(stream))


def _end_in_order() -> None:
    """Make SIGTERM raise ``SystemExit``, so that unfinished files are removed; servers install their own handler."""
    process = os.getpid()

    def terminated(number: int, _: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)  # a child process: clean-up is the parent's
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminated)


class Unloaded(TyperCommand):
    """Stands in for a sub-command until it is called, and then hands over to the real one."""

    def __init__(self, name: str, entry: CommandEntry) -> None:
        super().__init__(name=name, help=entry.summary)
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Imports the real command and has it parse ``args``; what runs afterwards is the command of that context."""
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Return the real command. Raises whatever its module raises on import."""
        module, _, attribute = self.entry.target.partition(":")
        loaded = getattr(importlib.import_module(module), attribute)
        if isinstance(loaded, typer.Typer):
            loaded.rich_markup_mode = None
            loaded.info.cls = PlainGroup
            for command in loaded.registered_commands:
                command.cls = PlainCommand
            return get_group(loaded)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(self.name, cls=PlainCommand)(loaded)
        return get_command(single)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvyard {__version__}")
        raise typer.Exit


def _show_completion(ctx: typer.Context, param: typer.CallbackParam, shell: str | None) -> None:
    if shell is None:
        return
    if shell not in SHELLS:
        raise typer.BadParameter(f"choose one of {', '.join(SHELLS)}")
    show_callback(ctx, param, shell)


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            metavar="SHELL",
            callback=_show_completion,
            is_eager=True,
            help=f"Print the completion script of a shell: {', '.join(SHELLS)}.",
        ),
    ] = None,
) -> None:
    """Plan, simulate and route an LLM serving fleet by its KV caches. No GPU needed."""


def build(commands: Mapping[str, CommandEntry] = COMMANDS) -> TyperGroup:
    """Return the root command with those of ``commands`` whose module is installed. Imports none of them."""
    # Plain help rather than boxes: it starts in half the time and can be searched and compared.
    help_names = {"help_option_names": ["--help", "-h"]}
    app = typer.Typer(cls=RootGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=help_names)
    app.callback()(_root)
    group = get_group(app)
    for name, entry in commands.items():
        if importlib.util.find_spec(entry.target.partition(":")[0]) is not None:
            group.add_command(Unloaded(name, entry))
    return group


def main(argv: Sequence[str] | None = None, commands: Mapping[str, CommandEntry] = COMMANDS) -> NoReturn:
    """Runs ``kvyard`` on ``argv`` (if None, the process's arguments). Ends in ``SystemExit`` with the exit codes above.

    Bugs keep their traceback: only ``KvyardError`` is turned into a sentence.
    """
    _make_streams_forgiving()
    _end_in_order()
    if COMPLETE_VARIABLE in os.environ:
        get_completion_inspect_parameters()  # registers Typer's shells, as its own completion options would
    try:
        build(commands).main(args=argv, prog_name="kvyard")
    except KvyardError as error:
        with suppress(OSError):
            print(f"Error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)
