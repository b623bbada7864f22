"""``kvyard validate``: a real run beside its replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.app import INTERRUPTED, OUTPUT
from kvyard.cli.outputs import print_json, say_written, words_beside
from kvyard.cli.reading import keep_piped, read_trace, with_reading
from kvyard.cli.replay import patient
from kvyard.cli.settings import with_settings
from kvyard.replay.settings import SETTINGS

FAILED = 1


@with_settings(SETTINGS)
@with_reading(block_size="--trace-block-size")
def validate(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run with the times of its requests, from vllm bench serve --save-detailed, AIPerf (profile_export.jsonl), "
            "kvyard gateway --record, LLMServingSim (requests.jsonl or its folder), or an engine's log of requests."
        ),
    ],
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    workload: Annotated[
        Path | None,
        typer.Option(
            help="The trace that the run was driven with, which says what prompts share.", callback=keep_piped
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if a mean or percentile of TTFT, TPOT or E2E is further off than this many percent."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also draw it, in one page.", rich_help_panel=OUTPUT)] = None,
    per_request: Annotated[
        Path | None,
        typer.Option(
            help="Write what each request took, measured and replayed, as JSON lines.", rich_help_panel=OUTPUT
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="Name of the run.", rich_help_panel=OUTPUT)] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON instead of the table.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Replay a real run and compare simulated with measured times.

    Requests arrive as they did in the run, at one worker unless --workers is given. Settings are those of kvyard replay; those
    that the run states (blocks, max_num_seqs, ...) are taken from it unless you give them.
    """
    import msgspec

    from kvyard.files import STDOUT, check_outputs, write_whole
    from kvyard.lab.validate.compare import validate as compare_with_replay
    from kvyard.lab.validate.reading import read_run
    from kvyard.lab.validate.show import print_validation, write_validation

    check_outputs(
        html, per_request, STDOUT if as_json else None, reads=[run, *([] if workload is None else [workload])]
    )
    measured = read_run(run, None if workload is None else read_trace(workload, reading))
    measured.name = label or measured.name
    with patient() as obey:

        def advance(arrived: int, through: int, now: int) -> None:
            obey()

        validation = compare_with_replay(measured, settings, progress=advance)
    if per_request is not None:
        write_whole(per_request, b"".join(msgspec.json.encode(pair) + b"\n" for pair in validation.pairs))
    if html is not None:
        write_validation(validation, html)
    if as_json:
        whole = msgspec.structs.asdict(validation)
        del whole["pairs"]
        print_json(whole)
    else:
        with words_beside(html, per_request):
            print_validation(validation)
    say_written([html, per_request])
    if not validation.complete:
        raise typer.Exit(INTERRUPTED)
    if within is not None and validation.worst * 100 > within:
        typer.echo(
            f"The largest error of TTFT, TPOT and E2E is {validation.worst:.1%}, more than {within:g}%.", err=True
        )
        raise typer.Exit(FAILED)
