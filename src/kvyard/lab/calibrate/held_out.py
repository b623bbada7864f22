"""Error of a fit on data that it hasn't seen: the last part of a measured run is left out of the fit, and replayed.

Errors of single passes say little of a run: in queues they add up, and a wrong batch size fits every pass well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvyard.engine.timing.measurements import Measurements
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.calibration import fit_profile
from kvyard.lab.validate.compare import validate
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun

SHARE = 1 / 3
"""Share of a run's requests, the last to end, that are held out."""
FEWEST = 8
"""Least requests for a held-out error."""
LATENCIES = ("ttft", "tpot", "e2e")


class CalibrationSource(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements, and the part of them that ends where held-out time begins."""

    measurements: Measurements
    early: Measurements | None = None
    run: MeasuredRun | None = None
    """The measured requests, if there are any."""
    begins: int = 0
    """Start of held-out time, in nanoseconds since the run's first arrival."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a replay in held-out time."""

    errors: dict[str, float]
    """Error of the mean of each latency, as shares with their sign; of several runs the largest."""
    requests: int


def held_out_begins(requests: Sequence[MeasuredRequest]) -> int | None:
    """Return the time after which the last third of ``requests`` ends, ``None`` if there are too few."""
    ends = sorted(request.ended for request in requests)
    count = int(len(ends) * SHARE)
    return ends[-count - 1] if count >= FEWEST else None


def replay_held_out(sources: Sequence[CalibrationSource], settings: Mapping[str, object]) -> HeldOut | None:
    """Fit without held-out time, replay each run with that fit and ``settings``, and compare the requests that ended in it.

    ``None`` where no source has requests, or where what is left is too little for a fit.
    """
    if all(source.run is None or source.early is None for source in sources):
        return None
    try:
        fitted = fit_profile([source.early or source.measurements for source in sources], "held-out")
    except KvyardError:
        return None
    errors: dict[str, float] = {}
    requests = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_bytes(msgspec.json.encode(fitted.profile))
        for source in sources:
            if source.run is None or source.early is None:
                continue
            known = {name: value for name, value in settings.items() if value is not None}
            replayed = validate(source.run, {**known, "timing": f"profile:{path}"})
            names = {measured.request.id for measured in source.run.requests if measured.ended > source.begins}
            late = [pair for pair in replayed.pairs if pair.id in names]
            requests += len(late)
            for name in LATENCIES:
                both = np.array([pair for pair_row in late if (pair := getattr(pair_row, name)) is not None])
                if len(both):
                    measured, ours = both.mean(axis=0)
                    off = float(ours / measured - 1) if measured else 0.0
                    errors[name] = max(errors.get(name, 0.0), off, key=abs)
    return HeldOut(errors=errors, requests=requests) if errors else None
