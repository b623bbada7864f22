"""Settings as command-line flags, equal in all commands.

Common settings have flags of their own (``Setting.flag``); the others are set with ``--set NAME=VALUE`` or in a file. Values
stay text here; ``kvyard.settings`` parses them.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from kvyard.errors import KvyardError
from kvyard.settings import Declared, Parser, Settings, bandwidth, count, duration, flag, number, size

METAVARS: Mapping[Parser, str] = {count: "N", number: "X", size: "SIZE", duration: "TIME", bandwidth: "GB/S"}
"""By how a setting is read; names for all others."""

Command = Callable[..., None]


def with_flags(
    known: Settings, hidden: Collection[str] = (), searched: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Gives a command the flags of ``known``. It gets those that were used as one mapping, ``settings``. Its help is silent
    about those that are ``hidden``, and names no value for those that are ``searched`` unless given.
    """
    flags = [
        setting._replace(default="searched") if setting.name in searched else setting
        for setting in known.values()
        if setting.mark.flag
    ]

    def decorate(command: Command) -> Command:
        def run(**given: Any) -> None:
            flagged = {flag.name: given.pop(flag.name) for flag in flags}
            command(**given, settings={name: value for name, value in flagged.items() if value is not None})

        return with_parameters(command, run, ["settings"], (_flag(flag, flag.name in hidden) for flag in flags))

    return decorate


def with_settings(
    known: Settings, hidden: Collection[str] = (), searched: Collection[str] = ()
) -> Callable[[Command], Command]:
    """``with_flags``, and ``--config``, ``--set``, ``--list-settings``: ``settings`` has file, flags and ``--set`` in one."""

    def listed(wanted: bool) -> None:
        if wanted:
            width = max(map(len, known))
            for name, setting in known.items():
                typer.echo(f"{name:<{width}}  {setting.full_help}")
                for line in setting.options():
                    typer.echo(f"{'':<{width}}    {line}")
            raise typer.Exit

    more = [
        # What is left out is refused by name, with the reason, rather than as a typing error.
        *(parameter(name, str | None, typer.Option(hidden=True)) for name in known.left_out),
        parameter("config", Path | None, typer.Option(help="Settings from a TOML file; flags override it.")),
        parameter(
            "set_",
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; --list-settings names them."),
        ),
        parameter(
            "list_settings",
            bool,
            typer.Option("--list-settings", callback=listed, is_eager=True, help="Name all settings and exit."),
            default=False,
        ),
    ]

    def decorate(command: Command) -> Command:
        def run(settings: Mapping[str, object], **given: Any) -> None:
            known.check_names(name for name in known.left_out if given.pop(name) is not None)
            given.pop("list_settings")
            file, assigned = given.pop("config"), _assigned(given.pop("set_") or [], settings, known)
            command(**given, settings=known.merge(file, {**settings, **assigned}))

        return with_flags(known, hidden, searched)(with_parameters(command, run, [], more))

    return decorate


def with_group(name: str, *options: inspect.Parameter) -> Callable[[Command], Command]:
    """Gives a command ``options``. It gets their values as one mapping, ``name``."""

    def decorate(command: Command) -> Command:
        def run(**given: Any) -> None:
            group = {option.name: given.pop(option.name) for option in options}
            command(**given, **{name: group})

        return with_parameters(command, run, [name], options)

    return decorate


def with_fields(name: str, kind: Any) -> Callable[[Command], Command]:
    """Gives a command an option for each field of ``kind``, a named tuple. It gets their values as one of these, ``name``."""
    hints = get_type_hints(kind, include_extras=True)

    def decorate(command: Command) -> Command:
        def run(**given: Any) -> None:
            group = kind(**{field: given.pop(field) for field in hints})
            command(**given, **{name: group})

        defaults = kind._field_defaults
        kept = inspect.Parameter.KEYWORD_ONLY
        options = [
            inspect.Parameter(option, kept, default=defaults[option], annotation=hints[option]) for option in hints
        ]
        return with_parameters(command, run, [name], options)

    return decorate


def with_parameters(
    command: Command, run: Command, without: Iterable[str], more: Iterable[inspect.Parameter]
) -> Command:
    """Return ``run`` under the name and help of ``command``, with its parameters, less those ``without``, and
    ``more`` of them.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name not in without
    ]
    every = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *more]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__dict__["__signature__"] = inspect.Signature(every)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return run


def parameter(name: str, kind: Any, option: Any, default: object = None) -> inspect.Parameter:
    """One option of a command, as typer reads it from a signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flag(setting: Declared, hidden: bool = False) -> inspect.Parameter:
    spelled = (setting.name, *setting.mark.also)
    names = [name if name.startswith("-") else "--" + name.replace("_", "-") for name in spelled]
    panel = setting.heading or None
    if setting.parse is flag:
        option = typer.Option(*names, help=setting.full_help, rich_help_panel=panel, hidden=hidden)
        return parameter(setting.name, bool | None, option)
    metavar = "N" if setting.name == "workers" else METAVARS.get(setting.parse, "NAME")
    option = typer.Option(*names, help=setting.full_help, metavar=metavar, rich_help_panel=panel, hidden=hidden)
    if setting.default is msgspec.NODEFAULT:
        return parameter(setting.name, str, option, default=inspect.Parameter.empty)
    return parameter(setting.name, str | None, option)


def _assigned(texts: list[str], flagged: Mapping[str, object], known: Settings) -> dict[str, object]:
    assigned: dict[str, object] = {}
    for text in texts:
        name, value = assignment(text, "--set")
        name = name.replace("-", "_")
        known.check_names([name], " after --set")
        (name,) = known.named({name: value})
        if name in flagged or name in assigned:
            raise KvyardError(f"{name} is set twice: leave one of the two out")
        assigned[name] = value
    return assigned


def assignment(text: str, flag: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    """Return the name and the value of text in that ``form``. Raises ``KvyardError`` if it isn't that."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise KvyardError(f"{flag} {text}: write {form}")
    return name.strip(), value.strip()
