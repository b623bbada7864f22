"""``kvyard mock``: a fleet of vLLM endpoints without a GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.engine.timing import timing_choices
from kvyard.errors import KvyardError

TOKEN_VARIABLE = "KVYARD_TOKEN"
ANY_PORT = "tcp://127.0.0.1:0"
BLOCK_SIZE = "16"
LONGEST = "32768"
"""Where no model says: vLLM's block size, and a context that fits into the default cache many times."""

Setting = str | None


def _flag(text: str, metavar: str = "N") -> Any:
    return typer.Option(help=text, metavar=metavar)


def mock(
    model: Annotated[
        Setting, _flag("A preset of kvyard model --list, or a config.json: shapes the cache.", "NAME")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. [default: the preset's name, or mock]")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers, each at a port of its own.")] = 1,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the first worker; the others follow. 0 for any.")] = 8000,
    speed: Annotated[float, typer.Option(help="How many times as fast as a real engine.")] = 1.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json. Without one, every byte is a token.")
    ] = None,
    timing: Annotated[Setting, _flag(f"{timing_choices()} (see kvyard profile).", "NAME")] = None,
    block_size: Annotated[Setting, _flag("Tokens per block, 16 by default.")] = None,
    num_gpu_blocks: Annotated[Setting, _flag("Blocks on each device, 16384 by default ...")] = None,
    gpu_memory: Annotated[Setting, _flag("... or, with --model, the memory of a card, such as 80GiB.", "SIZE")] = None,
    max_model_len: Annotated[Setting, _flag("Tokens of the longest request.")] = None,
    max_num_seqs: Annotated[Setting, _flag("Requests per pass.")] = None,
    max_num_batched_tokens: Annotated[Setting, _flag("Tokens per pass.")] = None,
    scheduling_policy: Annotated[Setting, _flag("fcfs or priority.", "NAME")] = None,
    dp_size: Annotated[int, typer.Option("--data-parallel-size", "--dp-size", min=1, help="Ranks of each worker.")] = 1,
    host_blocks: Annotated[Setting, _flag("Blocks of host memory below each device.")] = None,
    storage_blocks: Annotated[Setting, _flag("Blocks of storage below the host.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of an engine, as in kvyard replay."),
    ] = None,
    kv_events: Annotated[
        bool, typer.Option("--kv-events", help="Publish KV events on this machine at any ports; they are printed.")
    ] = False,
    kv_events_endpoint: Annotated[
        str | None, typer.Option(help="Or there, such as tcp://*:5557; ranks and workers take the ports after it.")
    ] = None,
    kv_events_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Or as vLLM takes it, and with its rule for who binds.")
    ] = None,
    kv_events_replay_endpoint: Annotated[str | None, typer.Option(help="Where lost events can be had again.")] = None,
    kv_events_connect: Annotated[
        bool, typer.Option("--kv-events-connect", help="Connect there instead, where a router has bound it.")
    ] = False,
    kv_events_topic: Annotated[str, typer.Option(help="The topic of events; {worker} is the worker's name.")] = "",
    hash_algorithm: Annotated[str, typer.Option(help="Of block hashes, as in vLLM.")] = "sha256_cbor",
    hash_seed: Annotated[
        str | None, typer.Option(help="PYTHONHASHSEED of all workers. [default: each has its own]")
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter; may be repeated.")] = None,
    max_loras: Annotated[int, typer.Option(min=0, help="Adapters that may be loaded.")] = 8,
    mean_output_tokens: Annotated[int, typer.Option(min=1, help="Length of answers that nobody cuts.")] = 128,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What goes wrong, such as error_rate=0.05; may be repeated."),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait at a worker.")] = 4096,
    token_file: Annotated[
        Path | None, typer.Option(help=f"A file with the bearer token; or set {TOKEN_VARIABLE}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of answers and faults.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more on stderr; never what a request says.")] = False,
) -> None:
    """Serve a fleet of vLLM endpoints without a GPU, until interrupted.

    Clients, routers and dashboards talk to it as to vLLM: the OpenAI API with streaming, /metrics, LoRA, and KV events over
    ZeroMQ. What is cached, evicted and announced, and when tokens come, is decided by the engine that kvyard replay runs.
    It listens on this machine only, unless told otherwise.
    """
    from kvyard.replay.settings import PER_WORKER, refuse_unknown
    from kvyard.replay.settings_engine import engine_config
    from kvyard.server.indexer.config import check_token_text, read_token
    from kvyard.server.mock.config import DEFAULT_MODEL, Lora, MockConfig
    from kvyard.server.mock.faults import Faults, changed
    from kvyard.server.mock.fleet import Fleet
    from kvyard.server.running import is_loopback

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    given: dict[str, object] = {
        "model": model,
        "timing": timing,
        "block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "gpu_memory": gpu_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "scheduling_policy": scheduling_policy,
        "host_blocks": host_blocks,
        "storage_blocks": storage_blocks,
    }
    for name, value in _pairs(set_, "--set"):
        refuse_unknown([name], PER_WORKER, " after --set")
        if name == "dp_size":
            raise KvyardError("--set dp_size: say --data-parallel-size")
        if given.get(name) is not None:
            raise KvyardError(f"{name} is set twice: leave one of the two out")
        given[name] = value
    settings = {name: value for name, value in given.items() if value is not None}
    if "model" in settings:
        if "gpu_memory" not in settings:
            settings.setdefault("num_gpu_blocks", "16384")
    else:
        settings.setdefault("max_model_len", LONGEST)
        if "groups" not in settings:
            settings.setdefault("block_size", BLOCK_SIZE)
    engine = engine_config({name: PER_WORKER[name].parse(name, value) for name, value in settings.items()}, seed)
    buffer_steps = 10_000  # vLLM's
    if kv_events_config is not None:
        if kv_events or kv_events_endpoint or kv_events_replay_endpoint or kv_events_topic or kv_events_connect:
            raise KvyardError("--kv-events-config says all there is about events: leave the other flags out")
        vllm = _as_vllm(kv_events_config)
        kv_events_endpoint, kv_events_replay_endpoint, kv_events_topic, kv_events_connect, buffer_steps = vllm
    if kv_events and kv_events_endpoint is None:
        kv_events_endpoint, kv_events_replay_endpoint = ANY_PORT, kv_events_replay_endpoint or ANY_PORT
    token: str | None = None
    if token_file is not None:
        token = read_token(str(token_file))
    elif TOKEN_VARIABLE in os.environ:
        token = check_token_text(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    config = MockConfig(
        engine=engine,
        workers=workers,
        dp_size=dp_size,
        served_model_name=served_model_name or (Path(model).stem if model else DEFAULT_MODEL),
        speed=speed,
        tokenizer=None if tokenizer is None else str(tokenizer),
        hash_algorithm=hash_algorithm,
        hash_seed=hash_seed,
        events_endpoint=kv_events_endpoint,
        replay_endpoint=kv_events_replay_endpoint,
        events_connect=kv_events_connect,
        buffer_steps=buffer_steps,
        topic=kv_events_topic,
        mean_output_tokens=mean_output_tokens,
        max_loras=max_loras,
        loras=tuple(
            Lora(name=name, path=path, number=number)
            for number, (name, path) in enumerate(_pairs(lora, "--lora", underscores=False), 1)
        ),
        faults=changed(Faults(), dict(_numbers(fault))),
        max_waiting=max_waiting,
        seed=seed,
    )
    fleet = Fleet(config, host, port, token=token)
    if token is None and not is_loopback(host):
        typer.echo(f"warning: everybody who reaches {host} can use this: set a token with --token-file", err=True)

    def ready(urls: list[str]) -> None:
        for state in fleet.states():
            where = "".join(
                f", events of rank {one.rank} at {one.endpoint}"
                + (f" (replay {one.replay_endpoint})" if one.replay_endpoint else "")
                for one in state.streams
            )
            typer.echo(f"{state.name} serving {config.served_model_name} at {state.url}{where}", err=True)

    fleet.run(ready)
    typer.echo("stopped", err=True)


class VllmEvents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's own settings of events. The sizes of queues are taken and change nothing: here nobody waits for a full one."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000


def _as_vllm(text: str) -> tuple[str | None, str | None, str, bool, int]:
    """Endpoint, replay endpoint, topic, whether to connect, and how many batches are kept for replay."""
    from kvyard.events.transport.endpoint import check, is_bound

    try:
        found = msgspec.json.decode(text, type=VllmEvents)
    except msgspec.MsgspecError as error:
        raise KvyardError(f"--kv-events-config can't be read: {error}") from None
    if not found.enable_kv_cache_events or found.publisher == "null":
        return None, None, "", False, found.buffer_steps
    connect = not is_bound(check(found.endpoint))
    return found.endpoint, found.replay_endpoint, found.topic, connect, found.buffer_steps


def _pairs(texts: list[str] | None, flag: str, underscores: bool = True) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise KvyardError(f"{flag} {text}: write NAME=VALUE")
        name = name.strip()
        found.append((name.replace("-", "_") if underscores else name, value.strip()))
    return found


def _numbers(texts: list[str] | None) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in _pairs(texts, "--fault"):
        try:
            found.append((name, msgspec.json.decode(value)))
        except msgspec.DecodeError:
            raise KvyardError(f"--fault {name}={value}: the value must be a number") from None
    return found
