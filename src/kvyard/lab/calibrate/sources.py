"""Any file that times can be had from: passes, or a run that ``kvyard validate`` reads."""

from pathlib import Path
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.timing.measurements import READ, Measurements
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.passes import read_passes
from kvyard.lab.calibrate.windows import KNOWN, lone_prompts, windows
from kvyard.lab.validate.reading import MeasuredRun, read_run
from kvyard.replay.traces.files import whole

PASSES = (*READ, "device", "copy")
EVEN = "When single tokens came: the file has first and last tokens only, so all between are taken to have come evenly."


def read_source(path: str | Path, budget: int | None = None) -> Measurements:
    """The measurements in a file. ``budget`` is the engine's ``max_num_batched_tokens``, where it is known.

    Raises ``KvyardError`` for what can't be read, and for runs without a request that decodes.
    """
    if Path(path).is_file() and _has_passes(whole(Path(path))):
        return read_passes(path)
    return run_passes(read_run(path), str(path), budget)


def run_passes(run: MeasuredRun, source: str, budget: int | None = None) -> Measurements:
    """What the requests of ``run`` show of the passes of its engine. Raises ``KvyardError`` where that is nothing."""
    if run.closed_loop_s is not None:
        raise KvyardError(f"{source} doesn't say when its requests came, so what ran beside what isn't known")
    said = run.settings.get("max_num_batched_tokens")
    limit = budget if budget is not None else said if isinstance(said, int) else None
    rows = windows(run.requests, limit)
    if not rows:
        raise KvyardError(f"{source}: no answer of it has two tokens or more, so it shows no decode step")
    lone = lone_prompts(run.requests, limit)
    notes = list(run.notes)
    if any(
        one.request.output_length > 1 and len(one.gaps or ()) < KNOWN * (one.request.output_length - 1)
        for one in run.requests
    ):
        notes.append(EVEN)
    if all(one.cached is None for one in run.requests):
        notes.append("What was cached of prompts: the file doesn't say it, so all are taken to have been computed.")
    if limit is None:
        notes.append("How long prompts were cut: say --max-num-batched-tokens as the engine has it.")
    if run.client:
        return Measurements(source, None, tuple(rows), tuple(lone), notes=tuple(notes))
    return Measurements(source, None, (*rows, *lone), notes=tuple(notes))


def _has_passes(data: bytes) -> bool:
    """Whether this is a log of passes, or lines of them."""
    for part in (data, data.lstrip().split(b"\n", 1)[0]):
        try:
            found: Any = msgspec.json.decode(part)
        except DECODE_ERRORS:
            continue
        return isinstance(found, dict) and (bool(found.get("passes")) or found.get("kind") in PASSES)
    return False
