"""Settings as command-line flags, the same for every command that takes some.

Those that people reach for have flags of their own, marked so in their structs; all others go through ``--set NAME=VALUE`` or a
file. Values stay text here: what they mean is the business of ``kvyard.settings``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.errors import KvyardError
from kvyard.settings import Declared, Parser, Settings, bandwidth, count, duration, flag, number, size

METAVARS: Mapping[Parser, str] = {count: "N", number: "X", size: "SIZE", duration: "TIME", bandwidth: "GB/S"}
"""By how a setting is read; names for all others."""

Command = Callable[..., None]


def with_settings(known: Settings) -> Callable[[Command], Command]:
    """Gives a command all flags of ``known``, which it gets as one mapping, ``settings``: file, flags and ``--set`` in one."""
    flags = [one for one in known.values() if one.mark.flag]

    def listed(wanted: bool) -> None:
        if wanted:
            width = max(map(len, known))
            for name, setting in known.items():
                typer.echo(f"{name:<{width}}  {setting.full_help}")
            raise typer.Exit

    more = [
        # What is left out is refused by name, with the reason, rather than as a typing error.
        *(_parameter(name, str | None, typer.Option(hidden=True)) for name in known.left_out),
        _parameter("config", Path | None, typer.Option(help="Settings from a TOML file; flags go before it.")),
        _parameter(
            "set_",
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; --list-settings names them."),
        ),
        _parameter(
            "list_settings",
            bool,
            typer.Option("--list-settings", callback=listed, is_eager=True, help="Name all settings and exit."),
            default=False,
        ),
    ]

    def decorate(command: Command) -> Command:
        def run(**given: Any) -> None:
            flagged = {one.name: given.pop(one.name) for one in flags}
            known.check_names(name for name in known.left_out if given.pop(name) is not None)
            given.pop("list_settings")
            file: Path | None = given.pop("config")
            on_top = flagged | _assigned(given.pop("set_") or [], flagged, known)
            command(**given, settings=known.merge(file, on_top))

        return with_parameters(command, run, [*map(_flag, flags), *more])

    return decorate


def with_parameters(command: Command, run: Command, more: list[inspect.Parameter]) -> Command:
    """``run`` under the name and help of ``command``, with its parameters, less ``settings``, and ``more`` of them."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
    every = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *more]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__dict__["__signature__"] = inspect.Signature(every)
    run.__annotations__ = {one.name: one.annotation for one in every}
    return run


def _flag(setting: Declared) -> inspect.Parameter:
    names = ["--" + name.replace("_", "-") for name in (setting.name, *setting.mark.also)]
    if setting.parse is flag:
        return _parameter(setting.name, bool | None, typer.Option(*names, help=setting.full_help))
    metavar = "N" if setting.name == "workers" else METAVARS.get(setting.parse, "NAME")
    return _parameter(setting.name, str | None, typer.Option(*names, help=setting.full_help, metavar=metavar))


def _parameter(name: str, kind: Any, option: Any, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _assigned(texts: list[str], flagged: Mapping[str, object], known: Settings) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        name, value = assignment(text, "--set")
        name = name.replace("-", "_")
        known.check_names([name], " after --set")
        if flagged.get(name) is not None or name in found:
            raise KvyardError(f"{name} is set twice: leave one of the two out")
        found[name] = value
    return found


def assignment(text: str, flag: str) -> tuple[str, str]:
    """The name and the value of ``NAME=VALUE``. Raises ``KvyardError`` where it isn't that."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise KvyardError(f"{flag} {text}: write NAME=VALUE, with an equals sign between the two")
    return name.strip(), value.strip()
