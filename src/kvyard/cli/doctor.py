"""``kvyard doctor``: finds out why a router doesn't see an engine's cache."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.events import finding_lines, until_interrupted
from kvyard.cli.outputs import print_json
from kvyard.cli.serving import TOKEN_VARIABLE, Json, Lora, Salt, pairs, read_token, with_prompt
from kvyard.clock import WallClock, from_seconds
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import SCHEMES, check
from kvyard.hashing import Namespace, algorithm
from kvyard.server.dashboard.view import FleetView
from kvyard.server.doctor.case import LIMITS, Case, ask_for_replay, play, watch
from kvyard.server.doctor.diagnosis import Diagnosis, diagnose
from kvyard.server.doctor.engine_rules import Local
from kvyard.server.doctor.finding import Expected
from kvyard.server.doctor.gateway_visit import visit_gateway
from kvyard.server.doctor.template import rendered
from kvyard.server.doctor.visit import MESSAGES, TEXT, Questions, Round, Visit
from kvyard.server.tokens import FileTokenizer, gather_prompt

HTTP = ("http://", "https://")
HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d+(/.*)?")


@with_prompt("The model's tokenizer.json; engines' own are compared with it.")
def doctor(
    prompt: Mapping[str, Any],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENDPOINT|URL|FILE...",
            help="Where engines publish (tcp://), where they answer (http://), or recordings of events.",
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a kvyard gateway, whose engines, streams and predicted hits are checked."
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(help="The model's chat template (.jinja, or tokenizer_config.json), compared with the engines'."),
    ] = None,
    messages_file: Annotated[
        Path | None, typer.Option(help="JSON list of chat messages to compare templates with.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that engines should serve.")] = None,
    probe: Annotated[bool, typer.Option(help="Send engines at http:// a few short requests.")] = True,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the engines' API key, or the gateway's admin token; or set {TOKEN_VARIABLE}."),
    ] = None,
    lora: Lora = None,
    salt: Salt = None,
    replay: Annotated[
        list[str] | None, typer.Option(help="Replay endpoint of each event endpoint; give all or none.")
    ] = None,
    topic: Annotated[str, typer.Option(help="The topic that your router subscribes to.")] = "",
    block_size: Annotated[int | None, typer.Option(min=1, help="The block size that your router expects.")] = None,
    hash_algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="Hash algorithm that your router expects.")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Hash seed that your router expects (PYTHONHASHSEED).")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to watch.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Watch engines for a while and name the broken link between their caches and your router.

    Send the prompt to an engine meanwhile. Engines at http:// are asked for models, metrics and tokens, and sent a few short
    requests. Ctrl-C ends the watch early, with what is known so far. Exit code 0 if nothing is broken, 1 if something is.
    """
    sources = sources or []
    if not sources and gateway is None:
        raise KvyardError(
            "name what to look at: an engine's events (tcp://), its URL (http://), a recording, or --gateway URL"
        )
    for source in sources:
        if HOST_AND_PORT.fullmatch(source) and not Path(source).exists():
            raise KvyardError(
                f"{source} has no scheme: say http://{source} for an engine, tcp://{source} for its events"
            )
    if gateway is not None and not gateway.startswith(HTTP):
        raise KvyardError(f"--gateway is a URL such as http://localhost:8080, not {gateway!r}")
    if hash_algorithm is not None:
        algorithm(hash_algorithm, seed, {})
    elif seed is not None:
        raise KvyardError("--seed belongs to --algorithm: give both")
    asked = None
    if any(prompt[way] is not None for way in ("tokens", "tokens_file", "text", "text_file")):
        asked = gather_prompt(**prompt)
        if not asked:
            raise KvyardError("the prompt is empty: give at least one token")
    urls = [source for source in sources if source.startswith(HTTP)]
    local, ask = _questions(urls, prompt, template, messages_file, model, probe, block_size)
    token = read_token(token_file) if urls or gateway is not None else None
    live = [source for source in sources if source.startswith(SCHEMES)]
    replays = dict(pairs(live, replay))
    for endpoint in (*live, *(replay or ())):
        check(endpoint)
    space = Namespace(lora_name=lora or None, salt=salt or None)
    cases = [
        Case(
            source,
            replay=replays.get(source),
            prompt=asked,
            namespace=space,
            topic=topic,
            limits=LIMITS,
            live=source in replays,
        )
        for source in sources
        if source not in urls
    ]
    visits = _observe(cases, urls, ask, token, seconds)
    expected = Expected(model=model, block_size=block_size, algorithm=hash_algorithm, seed=seed)
    asked_gateway = None if gateway is None else visit_gateway(gateway, token)
    diagnosis = diagnose(cases, expected, visits, local, asked_gateway)
    if as_json:
        value = {"healthy": diagnosis.healthy, **msgspec.to_builtins(diagnosis)}
        for finding, shown in zip(diagnosis.findings, value["findings"], strict=True):
            shown["broken"] = finding.broken
        print_json(value)
    else:
        _show(diagnosis, cases)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _observe(cases: list[Case], urls: list[str], ask: Questions, token: str | None, seconds: float) -> list[Visit]:
    """Play recordings, watch live streams for ``seconds`` and visit the engines at ``urls`` meanwhile, until all is done or
    Ctrl-C. Returns the visits.
    """
    visits: Round | None = None
    with until_interrupted():
        for case in cases:
            if not case.live:
                play(case, case.name)
        watched = [case for case in cases if case.live]
        if urls:
            listening = lambda: all(case.subscription.counters.connections for case in watched)  # noqa: E731
            visits = Round(urls, ask, token, listening if watched else None)
            visits.start()
        if watched:
            busy = visits.is_alive if visits is not None else lambda: False
            watch(watched, from_seconds(seconds), WallClock(), busy)
            ask_for_replay(watched)
        if visits is not None:
            visits.wait()
    return [] if visits is None else visits.visits


def _questions(
    urls: list[str],
    prompt: Mapping[str, Any],
    template: Path | None,
    messages_file: Path | None,
    model: str | None,
    probe: bool,
    block_size: int | None,
) -> tuple[Local, Questions]:
    """Return the questions to engines, and their texts as tokens made here. Raises ``KvyardError`` for unusable options."""
    if not urls and (template is not None or messages_file is not None or model is not None):
        raise KvyardError("--model, --template and --messages-file are about engines at http://: name one")
    tokenizer, special = prompt["tokenizer_file"], prompt["special"]
    if template is not None and tokenizer is None:
        raise KvyardError("--template needs --tokenizer: templates are compared by the tokens they make")
    messages = MESSAGES if messages_file is None else _messages(messages_file)
    ask = Questions(model=model, messages=messages, probe=probe, block_size=block_size or 16)
    if tokenizer is None or not urls:
        return Local(), ask
    encode = FileTokenizer(str(tokenizer)).encode
    chat = None if template is None else encode(rendered(template, ask.messages), False)
    text_ids, bare_ids = encode(TEXT, special), encode(TEXT, False)
    return Local(text_ids=text_ids, bare_ids=bare_ids, chat_ids=chat), ask


def _messages(path: Path) -> list[dict[str, Any]]:
    try:
        content = msgspec.json.decode(path.read_bytes())
        return msgspec.convert(content["messages"] if isinstance(content, dict) else content, list[dict[str, Any]])
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    except (LookupError, *DECODE_ERRORS):
        raise KvyardError(f"{path} holds no chat: write a JSON list of messages, each with role and content") from None


def _show_engine(seen: Visit) -> None:
    facts = [", ".join(seen.models[:4]) or "no models", seen.version]
    facts += [f"{seen.round_trip_ms:.1f} ms away"] if seen.round_trip_ms is not None else []
    facts += [f"blocks of {seen.block_size}"] if seen.block_size is not None else []
    typer.echo(f"{seen.url}: {seen.problem or ', '.join(filter(None, facts))}")
    if len(seen.cached) > 1 and seen.prompt_tokens is not None and seen.cached[1] is not None:
        typer.echo(f"  found {seen.cached[1]} of {seen.prompt_tokens} tokens again when they were sent a second time")


def _show_gateway(url: str, view: FleetView) -> None:
    ready = sum(worker.state in ("ready", "busy") for worker in view.workers)
    fresh = sum(stream.state == "fresh" for stream in view.streams)
    streams = f"{fresh} of {len(view.streams)} streams whole"
    typer.echo(f"{url}: policy {view.policy}, {ready} of {len(view.workers)} engines ready, {streams}")
    promises = view.totals.promises
    if promises is not None and promises.promised:
        share = f"{promises.delivered / promises.promised:.1%}"
        typer.echo(f"  engines found {promises.delivered:,} of {promises.promised:,} promised prompt tokens ({share})")
        for reason, tokens in sorted(promises.missing.items(), key=lambda entry: -entry[1]):
            typer.echo(f"    {tokens:,} missing: {view.reasons.get(reason, reason)}")
    if promises is not None and promises.unpromised:
        typer.echo(f"  and {promises.unpromised:,} that weren't promised")


def _show(diagnosis: Diagnosis, cases: list[Case]) -> None:
    for seen in diagnosis.engines:
        _show_engine(seen)
    if diagnosis.gateway is not None and diagnosis.gateway.view is not None:
        _show_gateway(diagnosis.gateway.url, diagnosis.gateway.view)
    for case in cases:
        facts = case.checker.facts()
        size = f", blocks of {case.block_size}" if case.block_size is not None else ""
        typer.echo(f"{case.name}: {facts.messages} messages, {sum(case.announced.values())} blocks announced{size}")
        if case.announced and case.name not in diagnosis.device_blocks and not facts.capacities:
            ways = "name its engine's http:// URL, or use kvyard events check with --blocks"
            typer.echo(f"  capacity wasn't checked, the device's number of blocks is unknown: {ways}")
        if diagnosis.tokens is not None:
            typer.echo(f"  matches {diagnosis.matched[case.name]} of {diagnosis.tokens} tokens")
    broken = [finding for finding in diagnosis.findings if finding.broken]
    several = len(cases) + len(diagnosis.engines) + (diagnosis.gateway is not None) > 1
    for title, part in (
        ("Broken", broken),
        ("Good to know", [harmless for harmless in diagnosis.findings if not harmless.broken]),
    ):
        for line in finding_lines(title, part, several):
            typer.echo(line)
    count = f"{len(broken)} {'thing is' if len(broken) == 1 else 'things are'} broken."
    typer.echo(f"\n{count}" if broken else "\nNothing is broken.")
