"""``kvyard epp``: an endpoint picker for data planes of the Gateway API Inference Extension."""

from collections.abc import Mapping
from functools import partial

import typer

from kvyard.cli.engines import EngineFlags, gathered, say_serving
from kvyard.cli.serving import Announced, PortFile, ReadyFile, Verbose, log_to_stderr, read_token
from kvyard.cli.settings import with_fields, with_flags
from kvyard.errors import KvyardError
from kvyard.server.epp.config import FLAGS, EppConfig
from kvyard.server.gateway.config import ADMIN_VARIABLE, UPSTREAM_VARIABLE


@with_flags(FLAGS)
@with_fields("engine_flags", EngineFlags)
def epp(
    settings: Mapping[str, object],
    engine_flags: EngineFlags,
    ready_file: ReadyFile = None,
    port_file: PortFile = None,
    verbose: Verbose = False,
) -> None:
    """Pick endpoints for an Envoy until interrupted. Envoy asks over gRPC (ext-proc) and carries the requests itself.

    Each request goes to the engine that can start it soonest, by the prompt's cached prefix (from KV events) and by load. It
    listens on this machine only, unless --host is given.
    """
    try:
        from kvyard.server.epp.service import build
    except ImportError as error:
        raise KvyardError(f"the endpoint picker needs {error.name}: pip install 'kvyard[epp]'") from None
    from kvyard.server.garbage import settle, stay_settled
    from kvyard.server.running import Running, is_loopback, listen, tls_files

    log_to_stderr(verbose)
    picker_config = gathered(EppConfig, FLAGS, "epp", settings, engine_flags)
    announced = Announced(ready_file, port_file)
    tls = tls_files(picker_config.tls_cert, picker_config.tls_key)
    admin_token = read_token(picker_config.admin_token_file, ADMIN_VARIABLE)
    app, served = build(
        picker_config,
        upstream_token=read_token(picker_config.upstream_token_file, UPSTREAM_VARIABLE),
        index_token=read_token(picker_config.index_token_file, None),
        admin_token=admin_token,
        tls=tls,
    )
    bound = listen(picker_config.host, picker_config.http_port)
    if admin_token is None and not is_loopback(picker_config.host):
        typer.echo(f"warning: all who reach {picker_config.host} can change engines: give --admin-token-file", err=True)

    def ready(url: str) -> None:
        settle()
        gateway = served.gateway
        gateway.supervisor.keep("garbage", partial(stay_settled, lambda: not gateway.traffic.counters.under_way))
        say_serving(f"endpoint picker at {served.url}, HTTP at {url}", len(gateway.members.engines), picker_config)
        announced.ready([served.url, url])

    with bound, announced:
        Running(
            app,
            bound,
            around=served,
            ready=ready,
            ending=served.gateway.drain,
            hurrying=served.hurry,
            drain_seconds=picker_config.drain_seconds,
            tls=tls,
        ).run()
    typer.echo("stopped", err=True)
