"""``kvyard gateway``: an OpenAI-compatible proxy that routes by cache."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.serving import Announced, PortFile, ReadyFile, Verbose, log_to_stderr, read_token, warn_if_open
from kvyard.cli.settings import with_flags
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import ADMIN_VARIABLE, FLAGS, UPSTREAM_VARIABLE, GatewayConfig, convert, own_part
from kvyard.settings import chosen

KEEP_ALIVE = 75
"""Seconds that a client's connection is kept between requests: longer than balancers keep theirs, so that they go first."""
NUMBERS = ("block_size", "dp_size", "port", "events_port", "replay_port", "interval_s", "alignment")


@with_flags(FLAGS)
def gateway(
    settings: Mapping[str, object],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,NAME=VALUE...]",
            help="An engine, such as http://h:8000,events=tcp://h:5557,replay=tcp://h:5558,block_size=16; may be repeated.",
        ),
    ] = None,
    fleet: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A kvyard mock, with all its workers; may be repeated.")
    ] = None,
    dns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT[,NAME=VALUE...]",
            help="All addresses of a name, such as vllm:8000,events_port=5557,replay_port=5558; may be repeated.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML or JSON file; flags count more.")] = None,
    router_set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of the router, see docs/routing.md; may be repeated."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the file; may be repeated."),
    ] = None,
    ready_file: ReadyFile = None,
    port_file: PortFile = None,
    verbose: Verbose = False,
) -> None:
    """Serve an OpenAI-compatible gateway in front of engines, until interrupted.

    Each request goes to the engine that can begin soonest: by what it has cached of the prompt, as its KV events tell, and by
    what it has to do. Answers stream through as they are. It listens on this machine only, unless told otherwise.
    """
    try:
        from kvyard.server.gateway.routes import build
    except ImportError as error:
        raise KvyardError(f"the gateway needs {error.name}: pip install 'kvyard[server]'") from None
    from kvyard.server.garbage import settle, stay_settled
    from kvyard.server.indexer.config import load
    from kvyard.server.running import Running, allow_files, listen, tls_files

    log_to_stderr(verbose)
    where = "the flags" if config is None else str(config)
    found: dict[str, Any] = {}
    if config is not None:
        found = own_part(load(config), where)
        convert(found, where)  # by itself first: what flags are laid over has to have the right shape
    given = FLAGS.parse(settings)
    found.update(chosen(GatewayConfig, given))
    for text in set_ or ():
        name, value = _pair(text, "--set")
        found[name] = value
    policy = dict(found.get("router", {}))
    if "router" in given:
        policy["policy"] = given["router"]
    policy.update(_pair(text, "--router-set") for text in router_set or ())
    if policy:
        found["router"] = policy
    if engine:
        found["engines"] = [*found.get("engines", ()), *(_described(text, "--engine", "url") for text in engine)]
    if fleet:
        found["fleets"] = [*found.get("fleets", ()), *fleet]
    if dns:
        found["names"] = [*found.get("names", ()), *(_name(text) for text in dns)]
    made: GatewayConfig = convert(found, where)

    announced = Announced(ready_file, port_file)
    token = read_token(made.token_file)
    app, served = build(
        made,
        token=token,
        upstream_token=read_token(made.upstream_token_file, UPSTREAM_VARIABLE),
        index_token=read_token(made.index_token_file, None),
        admin_token=read_token(made.admin_token_file, ADMIN_VARIABLE),
    )
    tls = tls_files(made.tls_cert, made.tls_key)
    allow_files()
    bound = listen(made.host, made.port)
    warn_if_open(made.host, token)

    def ready(url: str) -> None:
        settle()
        served.supervisor.keep("garbage", partial(stay_settled, lambda: not served.traffic.counters.under_way))
        count = len(served.members.engines)
        engines = "1 engine" if count == 1 else f"{count} engines"
        typer.echo(f"gateway serving at {url}, {engines}, policy {made.router.policy}", err=True)
        if not count and not made.names and not made.fleets:
            typer.echo("warning: there is no engine: give --engine, --fleet or --dns, or POST /admin/engines", err=True)
        announced.ready([url])

    with bound, announced:
        Running(
            app,
            bound,
            around=served,
            ready=ready,
            ending=served.drain,
            drain_seconds=made.drain_seconds,
            keep_alive_seconds=KEEP_ALIVE,
            tls=tls,
        ).run()
    typer.echo("stopped", err=True)


def _pair(text: str, flag: str) -> tuple[str, Any]:
    """A setting's name and value; what reads as JSON is taken as that, all else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise KvyardError(f"{flag} {text}: write NAME=VALUE")
    try:
        return name.strip().replace("-", "_"), msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name.strip().replace("-", "_"), value


def _described(text: str, flag: str, first: str) -> dict[str, Any]:
    """``FIRST,NAME=VALUE,...`` as made."""
    head, *rest = text.split(",")
    found: dict[str, Any] = {first: head}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise KvyardError(f"{flag} {text}: {part!r} isn't NAME=VALUE")
        name = name.replace("-", "_")
        try:
            found[name] = msgspec.json.decode(value) if name in NUMBERS else value
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise KvyardError(f"{flag} {text}: {name} must be a number") from None
    return found


def _name(text: str) -> dict[str, Any]:
    found = _described(text, "--dns", "host")
    host, colon, port = found["host"].rpartition(":")
    if not colon or not port.isdecimal():
        raise KvyardError(f"--dns {text}: write HOST:PORT first")
    return {**found, "host": host.strip("[]"), "port": int(port)}
