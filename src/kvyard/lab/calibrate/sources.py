"""Files with times: passes, or a run that ``kvyard validate`` reads."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.timing.measurements import READ, Measurements
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.held_out import CalibrationSource, held_out_begins
from kvyard.lab.calibrate.passes import passes_of, read_passes
from kvyard.lab.calibrate.windows import KNOWN, lone_prompts, out_of_step, windows
from kvyard.lab.validate.reading import MeasuredRun, read_run
from kvyard.replay.traces.files import whole

PASSES = (*READ, "device", "copy")
EVEN = "When single tokens came: the file has first and last tokens only, so all between are taken to have come evenly."


def read_source(path: str | Path, budget: int | None = None) -> CalibrationSource:
    """Return the measurements in a file. ``budget`` is the engine's ``max_num_batched_tokens``, if it is known.

    Raises ``KvyardError`` for what can't be read, for runs without a request that decodes, and for runs of several ranks.
    """
    data = whole(Path(path)) if Path(path).is_file() else b""
    if _has_passes(data):
        return _logged(path, data)
    run = read_run(path)
    measurements = run_passes(run, str(path), budget)
    begins = held_out_begins(run.requests)
    if begins is None:
        return CalibrationSource(measurements=measurements)
    try:
        early = run_passes(run, str(path), budget, begins)
    except KvyardError:
        return CalibrationSource(measurements=measurements)
    return CalibrationSource(measurements=measurements, early=early, run=run, begins=begins)


def _logged(path: str | Path, data: bytes) -> CalibrationSource:
    """Return a log of passes, with its requests if it has them."""
    measurements = read_passes(path)
    log: Any = None
    with suppress(*DECODE_ERRORS):
        log = msgspec.json.decode(data)
    if not isinstance(log, dict) or not log.get("requests"):
        return CalibrationSource(measurements=measurements)
    run = read_run(path)
    _one_engine(run, str(path))
    begins = held_out_begins(run.requests)
    if begins is None:
        return CalibrationSource(measurements=measurements)
    # Times of a run count from its first arrival, those of passes don't.
    first = min(request["at"] for request in log["requests"] if request.get("at") is not None)
    early = [logged for logged in log["passes"] if logged[1] <= first + begins]
    if not early:
        return CalibrationSource(measurements=measurements)
    return CalibrationSource(
        measurements=measurements, early=passes_of(log | {"passes": early}, str(path)), run=run, begins=begins
    )


def run_passes(run: MeasuredRun, source: str, budget: int | None = None, until: int | None = None) -> Measurements:
    """Return measurements of the passes of the engine from the requests of ``run``, up to the time ``until``.

    Raises ``KvyardError`` if there are none, and for runs of several ranks.
    """
    _one_engine(run, source)
    if run.closed_loop_s is not None:
        raise KvyardError(f"{source} has no arrival times, so concurrent requests aren't known")
    configured = run.settings.get("max_num_batched_tokens")
    limit = budget if budget is not None else configured if isinstance(configured, int) else None
    rows = windows(run.requests, limit, until=until)
    if not rows:
        raise KvyardError(f"{source}: no answer of it has two tokens or more, so it shows no decode step")
    lone = lone_prompts([measured for measured in run.requests if until is None or measured.ended <= until], limit)
    notes = list(run.notes)
    if any(
        measured.request.output_length > 1 and len(measured.gaps or ()) < KNOWN * (measured.request.output_length - 1)
        for measured in run.requests
    ):
        notes.append(EVEN)
    if all(measured.cached is None for measured in run.requests):
        notes.append("What was cached of prompts: the file doesn't say it, so all are taken to have been computed.")
    if limit is None:
        notes.append("How long prompts were cut: say --max-num-batched-tokens as the engine has it.")
    if run.client:
        return Measurements(source, None, tuple(rows), tuple(lone), notes=tuple(notes))
    return Measurements(source, None, (*rows, *lone), notes=tuple(notes))


def _one_engine(run: MeasuredRun, source: str) -> None:
    """Raise ``KvyardError`` if ``run`` is of several engines: then nobody knows which requests were in one pass."""
    ranks = run.settings.get("data_parallel_size")
    if isinstance(ranks, int) and ranks > 1:
        raise KvyardError(
            f"{source} is a run of {ranks} data-parallel ranks, and doesn't say which rank had which request, so batches "
            "aren't known: calibrate from a run of one rank (--data-parallel-size 1), or from the log of a rank's passes"
        )
    apart = out_of_step(run.requests)
    if apart is not None:
        raise KvyardError(
            f"{source}: of two answers that decoded at the same time one got {apart:.0%} more tokens than the other, so they "
            "weren't in the same passes: it is a run of several engines or ranks, or of speculative decoding; calibrate from a "
            "run of one engine"
        )


def _has_passes(data: bytes) -> bool:
    """Return true if this is a log of passes, or lines of them."""
    for part in (data, data.lstrip().split(b"\n", 1)[0]):
        try:
            document: Any = msgspec.json.decode(part)
        except DECODE_ERRORS:
            continue
        return isinstance(document, dict) and (bool(document.get("passes")) or document.get("kind") in PASSES)
    return False
