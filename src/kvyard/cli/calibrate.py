"""``kvyard calibrate``: a timing profile from a live engine, or from logs of one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvyard.cli.app import INTERRUPTED
from kvyard.cli.outputs import words_beside
from kvyard.cli.serving import TOKEN_VARIABLE, read_token
from kvyard.errors import KvyardError

if TYPE_CHECKING:
    from kvyard.lab.calibrate.held_out import HeldOut
    from kvyard.lab.calibrate.probing import ProbeResult


def calibrate(
    url: Annotated[str | None, typer.Argument(help="The engine, such as http://localhost:8000.")] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Fit to files instead of a live engine: measured passes, an engine's log, or a run that kvyard validate reads "
            "(vllm bench serve --save-detailed, AIPerf, kvyard gateway --record). May be repeated.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; by default that of its source.")] = None,
    model: Annotated[str | None, typer.Option(help="The model to request; by default the first one served.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"A file with the engine's API key; or set {TOKEN_VARIABLE}.")
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(help="Tokens of the longest prompt to send. [default: 4096]")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests to send at once. [default: 64]")] = None,
    rounds: Annotated[int | None, typer.Option(help="Times that each probe is sent. [default: 2]")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds after which no further probe begins. [default: 300]")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="The engine's setting: it computes longer prompts in chunks.")
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="The engine's setting; by default read from the engine or inferred from the measurements."),
    ] = None,
) -> None:
    """Fit a timing profile to a real engine: kvyard calibrate URL -o mine.json, then --timing profile:mine.json.

    A live engine receives a few hundred requests with new prompts: single prompts, batches that decode, and both together. It
    should serve nothing else meanwhile. Ctrl-C ends the command and writes nothing.
    """
    import msgspec

    from kvyard.cli.fits import show_fit
    from kvyard.files import check_outputs
    from kvyard.lab.calibrate.calibration import fit_profile
    from kvyard.lab.calibrate.held_out import replay_held_out

    if (url is None) == (not logs):
        raise KvyardError("say what to calibrate from: the URL of a live engine, or --from FILE")
    asked = {"max_prompt": max_prompt, "max_batch": max_batch, "rounds": rounds, "seconds": seconds}
    bounds = {bound: value for bound, value in asked.items() if value is not None}
    if logs:
        live = {"model": model, "token_file": token_file, **bounds}
        for flag, value in live.items():
            if value is not None:
                raise KvyardError(f"--{flag.replace('_', '-')} is for live engines: leave it out with --from")
    check_outputs(output, reads=logs or ())
    if logs:
        from kvyard.lab.calibrate.sources import read_source

        sources = [read_source(log, max_num_batched_tokens) for log in logs]
        fitted = fit_profile([source.measurements for source in sources], name)
        asked_ahead = (True, False) if async_scheduling is None else (async_scheduling,)
        checked = {
            ahead: replay_held_out(
                sources, {"max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": ahead}
            )
            for ahead in asked_ahead
        }
        ahead = min(checked, key=lambda ahead: _wait_error(checked[ahead]))
        show_fit(fitted, output, checked[ahead])
        if len(checked) > 1 and checked[ahead] is not None:
            with words_beside(output):
                typer.echo(
                    f"\nPasses are decided {'ahead' if ahead else 'when they start'}: held-out prompts wait as in the log. "
                    f"Replay with: --timing profile:{output or 'FILE'} --set async_scheduling={str(ahead).lower()}"
                )
        return
    assert url is not None
    from kvyard.lab.calibrate.plan import CalibrationLimits
    from kvyard.lab.calibrate.probing import probe_engine

    limits = msgspec.structs.replace(CalibrationLimits(), **bounds)
    try:
        seen = asyncio.run(
            probe_engine(
                url,
                limits,
                model=model,
                token=read_token(token_file),
                budget=max_num_batched_tokens,
                progress=_tell,
            )
        )
    except KeyboardInterrupt:
        typer.echo("\ninterrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{seen.requests} requests in {seen.rounds:.3g} rounds\n", err=True)
    fitted = fit_profile([seen.measurements], name or seen.facts.model.rsplit("/", 1)[-1])
    settings, words = _settings(seen, fitted.profile.request_ms, async_scheduling)
    show_fit(fitted, output, replay_held_out([seen.source], settings))
    with words_beside(output):
        typer.echo(words)
        flags = " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items() if value is not None)
        typer.echo(f"\nReplay with: --timing profile:{output or 'FILE'} {flags}")


def _wait_error(checked: HeldOut | None) -> float:
    """Return the size of the error of mean TTFT, which shows how long prompts wait for a pass."""
    return 0.0 if checked is None else abs(checked.errors.get("ttft", 0.0))


def _settings(seen: ProbeResult, request_ms: float, async_scheduling: bool | None) -> tuple[dict[str, object], str]:
    """Return with which settings to replay what that engine does, and how it decides passes, in words."""
    from kvyard.lab.calibrate.probing import waits_a_pass

    facts = seen.facts
    ahead: bool | None
    if async_scheduling is not None:
        ahead, why = async_scheduling, "as you say"
    elif facts.async_scheduling is not None:
        ahead, why = facts.async_scheduling, "as the engine says"
    else:
        ahead, passes = waits_a_pass(seen.probes, request_ms)
        why = f"a prompt waits for {passes:.1f} passes beside others"
    settings: dict[str, object] = {
        "block_size": facts.block_size,
        "num_gpu_blocks": facts.num_gpu_blocks,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "max_num_seqs": facts.max_num_seqs,
        "max_model_len": facts.max_model_len,
    }
    if ahead is None:
        return settings, (
            "- Whether the engine decides passes ahead: say --async-scheduling or --no-async-scheduling "
            "(vLLM does on GPUs, and doesn't on CPUs)."
        )
    return settings | {
        "async_scheduling": ahead
    }, f"\nPasses are decided {'ahead' if ahead else 'when they start'}: {why}."


def _tell(number: int, of: int, what: str) -> None:
    line = f"probe {number} of {of}: {what}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if number == of else ""))
        sys.stderr.flush()
    else:
        typer.echo(line, err=True)
