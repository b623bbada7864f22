"""The one way from measurements to a profile, whatever they come from."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvyard.engine.timing.fitting import Fit, errors_by_kind, fit
from kvyard.engine.timing.measurements import Measurement, Measurements
from kvyard.engine.timing.profile import FitError, Profile


class FittedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile beside what it was fitted to."""

    profile: Profile
    rows: tuple[Measurement, ...]
    fit: Fit
    notes: tuple[str, ...] = ()
    """What the measurements couldn't show."""


def fit_profile(sources: Sequence[Measurements], name: str | None = None, notes: Sequence[str] = ()) -> FittedProfile:
    """Fit one profile to all of ``sources``. Raises ``KvyardError`` where there are too few passes.

    Where one of them has the host's time apart, as an engine's log may, those without are taken for the device's time alone.
    """
    rows = tuple(row for source in sources for row in source.rows)
    found = fit(rows)
    seen, unseen = errors_by_kind(rows, found.errors), errors_by_kind(rows, found.unseen_errors)
    names = [Path(source.source).name for source in sources]
    devices = dict.fromkeys(source.device for source in sources if source.device)
    profile = Profile(
        name=name or names[0].split(".")[0],
        device=", ".join(devices),
        source=f"{len(rows)} passes of {' and '.join(names)}",
        errors={
            kind: FitError(points=of.points, fitted=round(of.mean, 4), unseen=round(unseen[kind].mean, 4))
            for kind, of in seen.items()
        },
        coefficients=found.coefficients,
        curve=found.curve,
    )
    return FittedProfile(profile=profile, rows=rows, fit=found, notes=tuple(notes))
