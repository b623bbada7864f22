"""``kvyard doctor``: why doesn't this prompt match?"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import msgspec
import typer

from kvyard.cli.events import until_interrupted
from kvyard.clock import WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import SCHEMES, check
from kvyard.hashing import Namespace, algorithm
from kvyard.server import prompt
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.diagnosis import Diagnosis, diagnose
from kvyard.server.doctor.finding import Expected, Finding
from kvyard.server.doctor.watching import LIMITS, ask_for_replay, play, watch

WIDTH = 110


def doctor(
    sources: Annotated[
        list[str], typer.Argument(metavar="ENDPOINT|FILE...", help="Where engines publish; or recordings of it.")
    ],
    tokens: Annotated[str | None, typer.Option(help="The prompt: token ids, with commas or spaces between.")] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="A file with token ids: a JSON list, or numbers.")] = None,
    text: Annotated[str | None, typer.Option(help="The prompt's text, after the chat template.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A file with that text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="The model's tokenizer.json.")] = None,
    special: Annotated[bool, typer.Option(help="Let the tokenizer add its special tokens.")] = True,
    lora: Annotated[str | None, typer.Option(help="The adapter's name.")] = None,
    salt: Annotated[str | None, typer.Option(help="The cache salt.")] = None,
    replay: Annotated[
        list[str] | None, typer.Option(help="Where an endpoint replays; one for each of them, or none.")
    ] = None,
    topic: Annotated[str, typer.Option(help="The topic that your router subscribes to.")] = "",
    block_size: Annotated[int | None, typer.Option(min=1, help="The block size that your router expects.")] = None,
    hash_algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="The hash that your router expects.")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Its seed, the text of PYTHONHASHSEED.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to watch.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Watch engines for a while and say which link between their caches and your router is broken.

    Send the prompt to an engine while it watches. Ctrl-C ends it early, with what was learnt so far. Exits with 0 if nothing
    is broken, with 1 if something is.
    """
    if hash_algorithm is not None:
        algorithm(hash_algorithm, seed, {})
    elif seed is not None:
        raise KvyardError("--seed belongs to --algorithm: give both")
    asked = None
    if any(way is not None for way in (tokens, tokens_file, text, text_file)):
        asked = prompt.gather(
            tokens=tokens,
            tokens_file=tokens_file,
            text=text,
            text_file=text_file,
            tokenizer_file=tokenizer,
            special=special,
        )
        if not asked:
            raise KvyardError("the prompt is empty: give at least one token")
    live = [source for source in sources if source.startswith(SCHEMES)]
    if replay and len(replay) != len(live):
        raise KvyardError(f"{len(live)} endpoints and {len(replay)} replay endpoints: give one for each, or none")
    for endpoint in (*live, *(replay or ())):
        check(endpoint)
    space = Namespace(lora_name=lora or None, salt=salt or None)
    replays: dict[str, str | None] = dict(zip(live, replay, strict=True)) if replay else dict.fromkeys(live)
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
    ]
    clock = WallClock()
    with until_interrupted():
        for case in cases:
            if not case.live:
                play(case, case.name)
        watched = [case for case in cases if case.live]
        if watched:
            watch(watched, from_seconds(seconds), clock)
            ask_for_replay(watched)
    found = diagnose(cases, Expected(block_size=block_size, algorithm=hash_algorithm, seed=seed))
    if as_json:
        typer.echo(json.dumps({"healthy": found.healthy, **msgspec.to_builtins(found)}, indent=2))
    else:
        _show(found, cases)
    raise typer.Exit(0 if found.healthy else 1)


def _show(found: Diagnosis, cases: list[Case]) -> None:
    for case in cases:
        facts = case.checker.facts()
        size = f", blocks of {case.block_size}" if case.block_size is not None else ""
        typer.echo(f"{case.name}: {facts.messages} messages, {sum(case.announced.values())} blocks announced{size}")
        if found.tokens is not None:
            typer.echo(f"  matches {found.matched[case.name]} of {found.tokens} tokens")
    broken = [finding for finding in found.findings if finding.broken]
    for title, part in (("Broken", broken), ("Good to know", [one for one in found.findings if not one.broken])):
        if part:
            typer.echo(f"\n{title}")
            for finding in part:
                _lines(finding, several=len(cases) > 1)
    count = f"{len(broken)} {'thing is' if len(broken) == 1 else 'things are'} broken."
    typer.echo(f"\n{count}" if broken else "\nNothing is broken.")


def _lines(finding: Finding, several: bool) -> None:
    where = f" at {finding.where}" if several else ""
    for head, text in ((f"{finding.code}{where}: ", finding.seen), ("means: ", finding.means), ("fix: ", finding.fix)):
        indent = "  " if head.startswith(finding.code) else "      "
        for line in wrap(head + text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  "):
            typer.echo(line)
