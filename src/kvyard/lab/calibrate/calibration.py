"""The one way from measurements to a profile, whatever they come from, and what it can't know."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvyard.engine.timing.fitting import LEAST, Fit, errors_by_kind, fit, rough_fit, row_errors
from kvyard.engine.timing.measurements import Measurement, Measurements
from kvyard.engine.timing.profile import FitError, Profile

SHORT = 0.5
"""Share of the prompts, the shortest, from which the time of a request beyond its pass is estimated: of long ones the pass is
unsure.
"""


class FittedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile beside what it was fitted to."""

    profile: Profile
    rows: tuple[Measurement, ...]
    fit: Fit
    unknown: tuple[str, ...]
    """Properties that the measurements couldn't show."""


def fit_profile(sources: Sequence[Measurements], name: str | None = None) -> FittedProfile:
    """Fit one profile to all of ``sources``. Raises ``KvyardError`` if there are too few passes.

    Where one of them has the host's time apart, as an engine's log may, those without are taken for the device's time alone.
    """
    rows = [row for source in sources for row in source.rows]
    lone = [row for source in sources for row in source.lone]
    apart = _apart(rows)
    known = [source.request_ms for source in sources if source.request_ms is not None]
    request_ms = max(known) if known else _request_ms(rows, lone) if apart else 0.0
    rows += [msgspec.structs.replace(row, ms=row.ms - request_ms) for row in lone if row.ms > request_ms]
    fitted = fit(rows)
    seen, unseen = errors_by_kind(rows, fitted.errors), errors_by_kind(rows, fitted.unseen_errors)
    names = [Path(source.source).name for source in sources]
    devices = dict.fromkeys(source.device for source in sources if source.device)
    count = round(sum(1.0 + sum(times for times, _ in row.others) for row in rows))
    profile = Profile(
        name=name or names[0].split(".")[0],
        device=", ".join(devices),
        source=f"{count} passes of {' and '.join(names)}",
        errors={
            kind: FitError(points=of.points, fitted=round(of.mean, 4), unseen=round(unseen[kind].mean, 4))
            for kind, of in seen.items()
        },
        coefficients=fitted.coefficients,
        curve=fitted.curve,
        request_ms=round(request_ms, 3),
    )
    notes = [note for source in sources for note in source.notes]
    if lone and not known and not apart:
        notes.append("What HTTP and tokenizing add to a request: no prompt was computed beside decoding requests.")
    return FittedProfile(profile=profile, rows=tuple(rows), fit=fitted, unknown=(*notes, *_unknown(rows)))


def _apart(rows: Sequence[Measurement]) -> bool:
    """Return true if passes with prompts were seen without their clients' waiting."""
    return sum(bool(row.prefills) for row in rows) >= LEAST and sum(row.batch > 0 for row in rows) >= LEAST


def _request_ms(rows: Sequence[Measurement], lone: Sequence[Measurement]) -> float:
    """Return by how much clients waited longer for lone prompts than passes of that kind take."""
    if not lone:
        return 0.0
    lengths = sorted(row.prefills[0][0] for row in lone)
    short = [row for row in lone if row.prefills[0][0] <= lengths[int(SHORT * (len(lengths) - 1))]]
    form = rough_fit(rows)
    # An error is estimated / measured - 1.
    return max(0.0, statistics.median(-off * row.ms for row, off in zip(short, row_errors(form, short), strict=True)))


def _unknown(rows: Sequence[Measurement]) -> list[str]:
    """In sentences, where the measurements end."""
    shapes = [shape for row in rows for shape in (row.shape, *(shape for _, shape in row.others))]
    prompts = [(new, past) for prefills, *_ in shapes for new, past in prefills]
    steps = [shape for shape in shapes if shape[1]]
    remarks = [
        f"Beyond {max(shape[1] for shape in steps):,} decoding requests, contexts of "
        f"{max(max(longest, context // batch) for _, batch, context, longest in steps):,} tokens, and prompts of "
        f"{max(new + past for new, past in prompts):,}: the formula goes on, and nothing was measured."
    ]
    if not any(past for _, past in prompts):
        remarks.append("Prompts with a cached part: their attention is guessed from that of others.")
    if not any(prefills and batch for prefills, batch, *_ in shapes):
        remarks.append("Prompts beside decoding requests in one pass: they follow from the formula.")
    if all(row.host_ms is None for row in rows):
        remarks.append("The host's time apart from the device's: both are in what a pass takes.")
    return remarks
