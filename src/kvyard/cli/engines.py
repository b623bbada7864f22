"""Shared options of commands in front of engines: the engines, and their settings by file and flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer

from kvyard.cli.settings import assignment
from kvyard.errors import KvyardError
from kvyard.router import RouterConfig
from kvyard.server.gateway.config import Disaggregation, GatewayConfig, GatewayEngine, NameConfig, own_part
from kvyard.server.indexer.config import load, settings_as
from kvyard.settings import Settings, chosen, read_texts

C = TypeVar("C", bound=GatewayConfig)


class EngineFlags(NamedTuple):
    """Options of commands in front of engines."""

    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,NAME=VALUE...]",
            help="An engine, such as http://h:8000,events=tcp://h:5557,replay=tcp://h:5558,block_size=16,role=decode; may be"
            " repeated.",
        ),
    ] = None
    fleet: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A kvyard mock, with all its workers; may be repeated.")
    ] = None
    dns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT[,NAME=VALUE...]",
            help="All addresses of a name, such as vllm:8000,events_port=5557,replay_port=5558; may be repeated.",
        ),
    ] = None
    config: Annotated[Path | None, typer.Option(help="A TOML or JSON file; flags override it.")] = None
    router_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A router setting (docs/reference/routing-policies.md); may be repeated."
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the file; may be repeated."),
    ] = None


def gathered(kind: type[C], known: Settings, server: str, settings: Mapping[str, object], flags: EngineFlags) -> C:
    """Return the configuration of ``server`` by file and flags, which count more. Raises ``KvyardError``."""
    engine, fleet, dns, config, router_set, set_ = flags
    where = "the flags" if config is None else str(config)
    values: dict[str, Any] = {}
    if config is not None:
        values = own_part(load(config), where, server)
        settings_as(values, kind, where)  # by itself first: what flags are laid over has to have the right shape
    given = known.parse(settings)
    values.update(chosen(kind, given))
    values.update(read_texts(kind, _pairs(set_, "--set"), " after --set"))
    split = dict(values.get("disaggregation", {}))
    roles = chosen(Disaggregation, given)
    if "decode_router" in roles:
        roles["decode_router"] = {**(split.get("decode_router") or {}), "policy": roles["decode_router"]}
    if roles:
        values["disaggregation"] = {**split, **roles}
    policy = dict(values.get("router", {}))
    if "router" in given:
        policy["policy"] = given["router"]
    policy.update(read_texts(RouterConfig, _pairs(router_set, "--router-set"), " after --router-set"))
    if policy:
        values["router"] = policy
    if "flow" in given:
        values["flow"] = {**values.get("flow", {}), "policy": given["flow"]}
    if engine:
        values["engines"] = [
            *values.get("engines", ()),
            *(_described(GatewayEngine, text, "--engine", "url") for text in engine),
        ]
    if fleet:
        values["fleets"] = [*values.get("fleets", ()), *fleet]
    if dns:
        values["names"] = [*values.get("names", ()), *(_name(text) for text in dns)]
    return settings_as(values, kind, where)


def say_serving(what: str, engines: int, config: GatewayConfig) -> None:
    """Print on stderr that requests are answered, for how many engines and by which policy."""
    counted = "1 engine" if engines == 1 else f"{engines} engines"
    typer.echo(f"{what}, {counted}, policy {config.router.policy}", err=True)
    if not engines and not config.names and not config.services and not config.fleets:
        typer.echo("warning: there is no engine: give --engine, --fleet or --dns, or POST /admin/engines", err=True)


def _pairs(texts: list[str] | None, flag: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, value = assignment(text, flag)
        name = name.replace("-", "_")
        if name in pairs:
            raise KvyardError(f"{name} is set twice: leave one of the two out")
        pairs[name] = value
    return pairs


def _described(kind: type[msgspec.Struct], text: str, flag: str, first: str) -> dict[str, Any]:
    """``FIRST,NAME=VALUE,...`` as made."""
    head, *rest = text.split(",")
    fields: dict[str, Any] = {first: head}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise KvyardError(f"{flag} {text}: {part!r} isn't NAME=VALUE")
        fields[name.replace("-", "_")] = value
    try:
        return read_texts(kind, fields)
    except KvyardError as error:
        raise KvyardError(f"{flag} {text}: {error}") from None


def _name(text: str) -> dict[str, Any]:
    described = _described(NameConfig, text, "--dns", "host")
    host, colon, port = described["host"].rpartition(":")
    if not colon or not port.isdecimal():
        raise KvyardError(f"--dns {text}: write HOST:PORT first")
    return {**described, "host": host.strip("[]"), "port": int(port)}
