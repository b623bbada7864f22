"""``kvyard gateway``: an OpenAI-compatible proxy that routes by cache."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import typer

from kvyard.cli.engines import EngineFlags, gathered, say_serving
from kvyard.cli.serving import Announced, PortFile, ReadyFile, Verbose, log_as, log_to_stderr, read_token, warn_if_open
from kvyard.cli.settings import with_fields, with_flags
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import ADMIN_VARIABLE, FLAGS, UPSTREAM_VARIABLE, GatewayConfig


@with_flags(FLAGS)
@with_fields("engine_flags", EngineFlags)
def gateway(
    settings: Mapping[str, object],
    engine_flags: EngineFlags,
    ready_file: ReadyFile = None,
    port_file: PortFile = None,
    verbose: Verbose = False,
) -> None:
    """Serve an OpenAI-compatible gateway in front of engines until interrupted.

    Each request goes to the engine that can start it soonest, by the prompt's cached prefix (from KV events) and by load.
    Answers pass through unchanged. It listens on this machine only, unless --host is given.
    """
    try:
        import kvyard.server.gateway.serving  # noqa: F401
    except ImportError as error:
        raise KvyardError(f"the gateway needs {error.name}: pip install 'kvyard[server]'") from None
    from kvyard.server.running import hangups_wait

    log_to_stderr(verbose)
    with hangups_wait():
        code = _serve(settings, engine_flags, ready_file, port_file)
    if code:
        raise typer.Exit(code)
    typer.echo("stopped", err=True)


def _serve(
    settings: Mapping[str, object], engine_flags: EngineFlags, ready_file: Path | None, port_file: Path | None
) -> int:
    """Serve until interrupted. Returns the exit code."""
    from kvyard.server.gateway.serving import GatewayServing
    from kvyard.server.running import listen

    read = partial(gathered, GatewayConfig, FLAGS, "gateway", settings, engine_flags)
    gateway_config = read()
    announced = Announced(ready_file, port_file)
    serving = GatewayServing(
        gateway_config,
        read,
        engine_flags.config,
        token=read_token(gateway_config.token_file),
        upstream_token=read_token(gateway_config.upstream_token_file, UPSTREAM_VARIABLE),
        index_token=read_token(gateway_config.index_token_file, None),
        admin_token=read_token(gateway_config.admin_token_file, ADMIN_VARIABLE),
    )
    bound = listen(gateway_config.host, gateway_config.port)
    warn_if_open(gateway_config.host, serving.token)

    def ready(url: str, engines: int, **more: object) -> None:
        several = f", {gateway_config.processes} processes" if gateway_config.processes > 1 else ""
        say_serving(f"gateway serving at {url}{several}", engines, gateway_config)
        announced.ready([url], **more)

    with bound, announced:
        if gateway_config.processes > 1:
            return serving.serve_by_processes(bound, ready, lambda number: log_as(f"process {number}"))
        serving.serve(bound, ready)
        return 0
