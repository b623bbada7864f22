"""``kvyard index``: the index as a service, and queries to one."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.outputs import print_json
from kvyard.cli.serving import (
    ADMIN_VARIABLE,
    TOKEN_VARIABLE,
    Announced,
    Json,
    Lora,
    PortFile,
    ReadyFile,
    Salt,
    Verbose,
    log_to_stderr,
    pairs,
    warn_if_open,
    with_prompt,
)
from kvyard.cli.serving import read_token as token_of
from kvyard.cli.settings import assignment, with_flags
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.server.indexer.config import TIERS, Config, convert, load
from kvyard.server.tokens import gather_prompt
from kvyard.settings import settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve an index of KV-cache events, or query one.")

TokenFile = Annotated[Path | None, typer.Option(help=f"A file with the bearer token; or set {TOKEN_VARIABLE}.")]
Endpoints = Annotated[
    list[str] | None,
    typer.Option("--endpoint", help="Follow this event endpoint instead of asking a service; may be repeated."),
]
Replays = Annotated[
    list[str] | None, typer.Option("--replay", help="Replay endpoint of each --endpoint; give all or none.")
]


@app.command()
@with_flags(settings_of(Config))
def serve(
    settings: Mapping[str, object],
    config: Annotated[Path | None, typer.Option(help="A TOML or JSON file.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="URL for the redis backend, such as redis://localhost:6379.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="URL of another index service to copy the index from at start; may be repeated."),
    ] = None,
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="MODEL=PATH of a tokenizer.json, for prompts as text; may be repeated.")
    ] = None,
    ready_file: ReadyFile = None,
    port_file: PortFile = None,
    verbose: Verbose = False,
) -> None:
    """Serve the index over HTTP until interrupted.

    Workers come from the configuration, from a peer, or from POST /register. GET /openapi.json describes all routes. It listens
    on this machine only, unless --host is given.
    """
    from kvyard.server.garbage import settle, stay_settled
    from kvyard.server.indexer.routes import build
    from kvyard.server.running import Running, listen, tls_files

    log_to_stderr(verbose)
    service_config = _over(
        convert(load(config), str(config)) if config is not None else Config(),
        peers=peer,
        tokenizers=None
        if tokenizer is None
        else dict(assignment(text, "--tokenizer", "MODEL=PATH") for text in tokenizer),
        backend_options=None if redis_url is None else {"url": redis_url},
        **settings_of(Config).parse(settings),
    )
    announced = Announced(ready_file, port_file)
    token = token_of(service_config.token_file)
    bound = listen(service_config.host, service_config.port)
    warn_if_open(service_config.host, token)

    def ready(url: str) -> None:
        settle()
        service.supervisor.keep("garbage", partial(stay_settled, lambda: True))
        typer.echo(f"serving at {url}", err=True)
        announced.ready([url])

    with bound, announced:
        served, service = build(service_config, token, token_of(service_config.admin_token_file, ADMIN_VARIABLE))
        tls = tls_files(service_config.tls_cert, service_config.tls_key)
        Running(served, bound, around=service, ready=ready, tls=tls).run()
    typer.echo("stopped", err=True)


@app.command()
@with_prompt()
def query(
    prompt: Mapping[str, Any],
    model: Annotated[str, typer.Option(help="Name of the model at the service.")] = "default",
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8090",
    tenant: Annotated[str | None, typer.Option(help="The group of workers. [default: default]")] = None,
    lora: Lora = None,
    salt: Salt = None,
    endpoint: Endpoints = None,
    replay: Replays = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Most seconds to follow --endpoint.")] = 5.0,
    block_size: Annotated[int, typer.Option(min=1, help="Block size of the index made from --endpoint.")] = 16,
    token_file: TokenFile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also name the first missing block of each worker.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score workers for a prompt: cached tokens by tier, and trust in them.

    It asks a running service; with --endpoint it follows engines itself. Exit code 1 if no worker has a part of the prompt.
    """
    given = {
        name: value
        for name, value in (("lora_name", lora), ("cache_salt", salt), ("tenant_id", tenant))
        if value is not None
    }
    asked: dict[str, Any] = {"model_name": model, **given}
    only_text = all(prompt[name] is None for name in ("tokenizer_file", "tokens", "tokens_file"))
    if prompt["text"] is not None and only_text and not endpoint:
        asked["text"] = prompt["text"]  # the service may have a tokenizer
    else:
        asked["token_ids"] = gather_prompt(**prompt)
    if endpoint:
        from kvyard.server.indexer.transient import ask

        listening = ask(asked, pairs(endpoint, replay), seconds=seconds, block_size=block_size, explain=explain)
        answer = asyncio.run(listening)
    else:
        if replay:
            raise KvyardError("--replay belongs to --endpoint: give both, or neither to ask a service")
        token = token_of(token_file)
        answer = {"score": _post(url, "/score", asked, token)}
        if explain:
            answer["explain"] = _post(url, "/explain", asked, token)
    if as_json:
        print_json(answer)
    else:
        table(answer["score"])
        for line in explanation_lines(answer.get("explain")):
            typer.echo(line)
    if not any(result["best"] for result in answer["score"]["results"]):
        raise typer.Exit(1)


def _over(config: Config, **over: Any) -> Config:
    """Return the configuration, overridden by the command line."""
    options = msgspec.to_builtins(config)
    for name, value in over.items():
        if value is not None:
            options[name] = {**options[name], **value} if isinstance(value, dict) else value
    return convert(options, "the command line")


def _post(url: str, path: str, body: dict[str, Any], token: str | None) -> Any:
    from kvyard.server.http_client import HttpClient, NoAnswer

    try:
        with HttpClient(url, token=token, seconds=60.0) as client:
            reply = client.post(path, body)
    except NoAnswer as error:
        raise KvyardError(f"no server answers at {url}: {error}; is `kvyard index serve` running?") from None
    try:
        answer = reply.json()
    except DECODE_ERRORS:
        raise KvyardError(f"what answers at {url} is no indexer: {path} gave {reply.status}") from None
    if reply.status != 200:
        problem = answer if isinstance(answer, dict) else {}
        fix = f"; {problem['fix']}" if problem.get("fix") else ""
        raise KvyardError(f"{url} refused: {problem.get('error', reply.status)}{fix}")
    return answer


SHOWN = tuple(TIERS)[:3]
"""Tiers that have a column whether or not any worker has something there: Dynamo's."""


def table(scoring: dict[str, Any]) -> None:
    """Print who has how much, one row per rank, the best first."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for result in scoring["results"]:
        title = f"{result['tokens']} tokens, {result['blocks']} full blocks of {scoring['block_size']}"
        tiers = [
            name for name in TIERS if name in SHOWN or any(name in worker["tiers"] for worker in result["workers"])
        ]
        rows = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("worker", "tokens", *tiers, "score", "limited by", "state", "confidence", "age"):
            rows.add_column(name, justify="left" if name in ("worker", "limited by", "state") else "right")
        for worker in result["workers"]:
            rows.add_row(*_cells(worker, tiers))
        console.print(rows)
        for worker in result["workers"]:
            if worker["reason"]:
                console.print(f"{_name(worker)}: {worker['reason']}")
        if not result["workers"]:
            console.print("no worker is known")


def explanation_lines(explanations: dict[str, Any] | None) -> Iterator[str]:
    """Yield why each worker matches no more."""
    if explanations is None:
        return
    for explanation in explanations["explanations"]:
        yield ""
        yield explanation["summary"]
        for group in explanation["groups"]:
            number = "the only group" if group["group"] is None else f"group {group['group']}"
            yield f"  {number} ({group['kind']}) reaches {group['tokens']} tokens: {group['why']}"


def _cells(explanation: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    worker_tiers = explanation["tiers"]
    limited = "" if explanation["limited_by"] is None else f"group {explanation['limited_by']}"
    return [
        _name(explanation),
        str(explanation["tokens"]),
        *(str(worker_tiers[name]["tokens"]) if name in worker_tiers else "0" for name in tiers),
        f"{explanation['score']:.2f}",
        limited,
        explanation["state"],
        f"{explanation['confidence']:.0%}",
        _age(explanation["age_ms"]),
    ]


def _name(worker: dict[str, Any]) -> str:
    return f"{worker['instance_id']}@{worker['dp_rank']}"


def _age(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms / 60_000:.0f} min"
