"""``kvyard gateway``: an OpenAI-compatible proxy that routes by cache."""

import asyncio
import signal
from collections.abc import Mapping
from functools import partial

import typer

from kvyard.cli.engines import ConfigFile, Engines, Fleets, Names, RouterSet, Set, gathered, say_serving
from kvyard.cli.serving import Announced, PortFile, ReadyFile, Verbose, log_to_stderr, read_token, warn_if_open
from kvyard.cli.settings import with_flags
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import ADMIN_VARIABLE, FLAGS, UPSTREAM_VARIABLE, GatewayConfig, convert, own_part

KEEP_ALIVE = 75
"""Seconds that a client's connection is kept between requests: longer than balancers keep theirs, so that they go first."""


@with_flags(FLAGS)
def gateway(
    settings: Mapping[str, object],
    engine: Engines = None,
    fleet: Fleets = None,
    dns: Names = None,
    config: ConfigFile = None,
    router_set: RouterSet = None,
    set_: Set = None,
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
    from kvyard.server.running import Running, allow_files, listen, tls_files

    log_to_stderr(verbose)
    read = partial(
        gathered,
        GatewayConfig,
        FLAGS,
        own_part,
        convert,
        settings=settings,
        engine=engine,
        fleet=fleet,
        dns=dns,
        config=config,
        router_set=router_set,
        set_=set_,
    )
    made = read()
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

    served.reloading.read = read
    if config is not None:
        served.reloading.files.append(str(config))

    def ready(url: str) -> None:
        settle()
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, served.reloading.ask)
        served.supervisor.keep("garbage", partial(stay_settled, lambda: not served.traffic.counters.under_way))
        say_serving(f"gateway serving at {url}", len(served.members.engines), made)
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
