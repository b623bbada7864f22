"""Display and output of a fitted profile, for ``kvyard profile fit`` and ``kvyard calibrate``."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from kvyard.cli.outputs import print_table, say_written, words_beside
from kvyard.engine.timing.fitting import errors_by_kind
from kvyard.engine.timing.measurements import Measurement
from kvyard.files import write_whole
from kvyard.lab.calibrate.calibration import FittedProfile
from kvyard.lab.calibrate.held_out import HeldOut

WORST = 5


def show_fit(fitted: FittedProfile, output: Path | None, held_out: HeldOut | None = None) -> None:
    """Print how far off the fit is, then write the profile to ``output`` if there is one. Raises ``KvyardError``."""
    profile = fitted.profile
    if held_out is not None:
        errors = {name: round(abs(error), 4) for name, error in held_out.errors.items()}
        profile = msgspec.structs.replace(profile, held_out=errors)
    with words_beside(output):
        typer.echo(f"{profile.name}: {profile.source}{f', {profile.device}' if profile.device else ''}")
        unseen = errors_by_kind(fitted.rows, fitted.fit.unseen_errors)
        rows: list[tuple[str, ...]] = [("", "points", "mean error", "median", "largest", "mean, unseen")]
        for kind, of in errors_by_kind(fitted.rows, fitted.fit.errors).items():
            shares = (of.mean, of.median, of.largest, unseen[kind].mean)
            rows.append((kind, str(of.points), *(f"{share:.1%}" for share in shares)))
        print_table(rows)
        show_worst(fitted.rows, fitted.fit.unseen_errors)
        typer.echo(f"\n{_held_out_words(held_out)}")
        if profile.request_ms:
            typer.echo(
                f"\nHTTP, tokenizing and the client add {profile.request_ms:.1f} ms to a request, outside of passes."
            )
        typer.echo("\nNot seen, and so not known")
        for note in fitted.unknown:
            typer.echo(f"- {note}")
    if output is not None:
        write_whole(output, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    say_written([output])


def _held_out_words(held_out: HeldOut | None) -> str:
    if held_out is None:
        return "Errors are of single passes. How far off whole runs are isn't known: that takes requests beside the passes."
    errors = ", ".join(f"{name.upper()} {error:+.1%}" for name, error in held_out.errors.items())
    return f"Held-out time, replayed with a fit that hasn't seen it: mean {errors} ({held_out.requests:,} requests)."


def show_worst(rows: Sequence[Measurement], errors: Sequence[float]) -> None:
    """Print the passes that are furthest off."""
    typer.echo("\nworst points")
    worst = sorted(zip(rows, errors, strict=True), key=lambda pair: -abs(pair[1]))[:WORST]
    print_table([(_words(row), f"{row.ms + (row.host_ms or 0):.2f} ms", f"{error:+.1%}") for row, error in worst])


def _words(row: Measurement) -> str:
    more = round(sum(times for times, _ in row.others))
    return f"{row}; and {more} more" if more else str(row)
