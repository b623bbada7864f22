"""``kvyard mock``: a fleet of vLLM endpoints without a GPU."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.serving import (
    TOKEN_VARIABLE,
    Announced,
    PortFile,
    ReadyFile,
    TlsCert,
    TlsKey,
    Verbose,
    log_to_stderr,
    read_token,
    warn_if_open,
)
from kvyard.cli.settings import assignment, with_settings
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.server.mock.config import SETTINGS
from kvyard.server.mock.schemas import WorkerState
from kvyard.settings import read_texts

ANY_PORT = "tcp://127.0.0.1:0"


@with_settings(SETTINGS)
def mock(
    settings: Mapping[str, object],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the first worker; the others follow. 0 for any.")] = 8000,
    kv_events: Annotated[
        bool, typer.Option("--kv-events", help="Publish KV events on this machine at any ports; they are printed.")
    ] = False,
    kv_events_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Or vLLM's JSON, with its rule for which side binds.")
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter; may be repeated.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="A fault, such as error_rate=0.05 or events_off; may be repeated."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"A file with the bearer token; or set {TOKEN_VARIABLE}.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    called: Annotated[
        list[str] | None, typer.Option("--hosts", metavar="NAME", help="A name it may be called by; may be repeated.")
    ] = None,
    ready_file: ReadyFile = None,
    port_file: PortFile = None,
    verbose: Verbose = False,
) -> None:
    """Serve a fleet of vLLM endpoints without a GPU until interrupted.

    Clients, routers and dashboards use it as vLLM: the OpenAI API with streaming, /metrics, LoRA, and KV events over ZeroMQ.
    Caching, eviction, events and the times of tokens come from the engine of kvyard replay. It listens on this machine only,
    unless --host is given.
    """
    from kvyard.server.garbage import settle, stay_settled
    from kvyard.server.mock.config import Lora, make_config
    from kvyard.server.mock.faults import MockFaults, changed
    from kvyard.server.mock.fleet import MockFleet
    from kvyard.server.running import tls_files

    log_to_stderr(verbose)
    given = dict(settings)
    if kv_events_config is not None:
        if kv_events or any(name.startswith("kv_events_") for name in given):
            raise KvyardError("--kv-events-config says all there is about events: leave the other flags out")
        given |= _as_vllm(kv_events_config)
    if kv_events and "kv_events_endpoint" not in given:
        given = {"kv_events_endpoint": ANY_PORT, "kv_events_replay_endpoint": ANY_PORT} | given
    config = make_config(
        given,
        loras=tuple(
            Lora(name=name, path=path, number=number)
            for number, (name, path) in enumerate((assignment(text, "--lora", "NAME=PATH") for text in lora or ()), 1)
        ),
        faults=changed(MockFaults(), read_texts(MockFaults, dict(map(_fault, fault or ())), " after --fault")),
    )
    token = read_token(token_file)
    announced = Announced(ready_file, port_file)
    fleet = MockFleet(config, host, port, token=token, tls=tls_files(tls_cert, tls_key), hosts=called or ())
    warn_if_open(host, token)

    def ready(urls: list[str]) -> None:
        settle()
        fleet.supervisor.keep(
            "garbage", partial(stay_settled, lambda: not any(worker.load for worker in fleet.workers))
        )
        for state in fleet.states():
            where = "".join(
                f", events of rank {stream.rank} at {stream.endpoint}"
                + (f" (replay {stream.replay_endpoint})" if stream.replay_endpoint else "")
                for stream in state.streams
            )
            typer.echo(f"{state.name} serving {config.served_model_name} at {state.url}{where}", err=True)
        typer.echo(f"times: {config.engine.timing.describe()}", err=True)
        announced.ready(urls, workers=[_described(state) for state in fleet.states()])

    with announced:
        fleet.run(ready)
    typer.echo("stopped", err=True)


def _described(state: WorkerState) -> dict[str, object]:
    streams = [
        {"rank": stream.rank, "endpoint": stream.endpoint, "replay_endpoint": stream.replay_endpoint}
        for stream in state.streams
    ]
    return {"name": state.name, "url": state.url, "streams": streams}


class VllmEvents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's own settings of events. The sizes of queues are taken and change nothing: ours never make the engine wait."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000


def _as_vllm(text: str) -> dict[str, Any]:
    """Return the settings that vLLM's JSON stands for."""
    from kvyard.events.transport.endpoint import check, is_bound

    try:
        events = msgspec.json.decode(text, type=VllmEvents)
    except DECODE_ERRORS as error:
        raise KvyardError(f"--kv-events-config can't be read: {error}") from None
    if not events.enable_kv_cache_events or events.publisher == "null":
        return {}
    return {
        "kv_events_endpoint": events.endpoint,
        "kv_events_replay_endpoint": events.replay_endpoint,
        "kv_events_topic": events.topic or None,
        "kv_events_connect": not is_bound(check(events.endpoint)),
        "buffer_steps": events.buffer_steps,
    }


def _fault(text: str) -> tuple[str, str]:
    name, value = assignment(text if "=" in text else f"{text}=on", "--fault")
    return name.replace("-", "_"), value
