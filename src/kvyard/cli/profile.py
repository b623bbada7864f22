"""``kvyard profile``: timing profiles from your own measurements, and how far to trust them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvyard.cli.tables import print_table
from kvyard.engine.timing.fitting import Measurement, Measurements, errors_by_kind, read_measurements
from kvyard.engine.timing.fitting import fit as fit_rows
from kvyard.engine.timing.profile import FitError, Profile, load_profile, pass_ms, shipped
from kvyard.files import write_whole

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fit timing to measurements, and look at the fit.")

WORST = 5
NEW = (16, 128, 512, 2048, 8192, 32768)
PAST = (0, 2048, 8192, 32768)
BATCH = (1, 8, 32, 128, 512)
CONTEXT = (256, 1024, 4096, 16384)

DataFile = Annotated[Path, typer.Argument(metavar="FILE", help="Measured passes, as JSON lines.", show_default=False)]


@app.command()
def fit(
    file: DataFile,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name; by default the file's.")] = None,
) -> None:
    """Fit a profile to measured passes and say how far off it is, also on passes that it hasn't seen.

    A line of FILE is {"kind": "prefill", "new": 512, "past": 2048, "ms": 17.3}, {"kind": "decode", "batch": 32, "ctx": 4096,
    "ms": 9.1}, or {"kind": "mixed", "prefills": [[512, 0]], "batch": 32, "ctx": 4096, "ms": 20.9}. Other kinds are left out.
    """
    data = read_measurements(file)
    found = fit_rows(data.rows)
    seen, unseen = errors_by_kind(data.rows, found.errors), errors_by_kind(data.rows, found.unseen_errors)
    profile = Profile(
        name=name or file.name.split(".")[0],
        device=data.device or "",
        source=f"{len(data.rows)} passes of {file.name}",
        errors={
            kind: FitError(points=of.points, fitted=round(of.mean, 4), unseen=round(unseen[kind].mean, 4))
            for kind, of in seen.items()
        },
        coefficients=found.coefficients,
        curve=found.curve,
    )
    typer.echo(f"{profile.name}: {profile.source}{f', {profile.device}' if profile.device else ''}")
    rows: list[tuple[str, ...]] = [("", "points", "mean error", "median", "largest", "mean, unseen")]
    for kind, of in seen.items():
        shares = (of.mean, of.median, of.largest, unseen[kind].mean)
        rows.append((kind, str(of.points), *(f"{share:.1%}" for share in shares)))
    print_table(rows)
    _worst(data.rows, found.unseen_errors)
    if output is not None:
        write_whole(output, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
        typer.echo(f"written to {output}", err=True)


@app.command()
def show(
    profile: Annotated[str, typer.Argument(help="A profile file, or the name of one that ships with kvyard.")],
    data: Annotated[Path | None, typer.Argument(metavar="[DATA]", help="Measured passes to compare it with.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write plots of the profile (and of DATA) to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the profile as JSON.")] = False,
) -> None:
    """Show what a profile says passes take, and how that compares with measurements."""
    chosen = _find(profile)
    measured = None if data is None else read_measurements(data)
    if html is not None:
        from kvyard.replay.report.profile_page import page

        write_whole(html, page(chosen, measured))
        typer.echo(f"plots written to {html}", err=True)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(chosen), indent=2).decode())
        return
    typer.echo(", ".join(filter(None, (chosen.name, chosen.source, chosen.device))))
    _estimates(chosen)
    if measured is not None:
        _compare(chosen, measured)


@app.command("list")
def list_profiles() -> None:
    """Name the profiles that ship with kvyard."""
    rows = [("name", "device", "from", "mean error", "unseen")]
    for name in shipped():
        of = load_profile(name=name)
        whole = of.errors["all"]
        rows.append((name, of.device, of.source, f"{whole.fitted:.1%}", f"{whole.unseen:.1%}"))
    print_table(rows)


def _find(profile: str) -> Profile:
    if profile in shipped():
        return load_profile(name=profile)
    if not Path(profile).exists() and "/" not in profile and not profile.endswith(".json"):
        return load_profile(name=profile)  # refuses, and names those there are
    return load_profile(path=profile)


def _estimates(profile: Profile) -> None:
    of = profile.form
    typer.echo("\nprefill, ms: new tokens across, past tokens down")
    rows = [("", *map(str, NEW))]
    rows += [(str(past), *(f"{pass_ms(of, [(new, past)], 0, 0):.2f}" for new in NEW)) for past in PAST]
    print_table(rows)
    typer.echo("\ndecode, ms a step: batch across, context of each down")
    rows = [("", *map(str, BATCH))]
    rows += [(str(ctx), *(f"{pass_ms(of, (), batch, batch * ctx):.2f}" for batch in BATCH)) for ctx in CONTEXT]
    print_table(rows)


def _compare(profile: Profile, data: Measurements) -> None:
    errors = [pass_ms(profile.form, *row.shape) / row.ms - 1.0 for row in data.rows]
    typer.echo(f"\nagainst {data.source}")
    rows: list[tuple[str, ...]] = [("", "points", "mean error", "median", "largest")]
    for kind, of in errors_by_kind(data.rows, errors).items():
        rows.append((kind, str(of.points), *(f"{share:.1%}" for share in (of.mean, of.median, of.largest))))
    print_table(rows)
    _worst(data.rows, errors)


def _worst(rows: Sequence[Measurement], errors: Sequence[float]) -> None:
    typer.echo("\nworst points")
    worst = sorted(zip(rows, errors), key=lambda pair: -abs(pair[1]))[:WORST]
    print_table([(str(row), f"{row.ms:.2f} ms", f"{error:+.1%}") for row, error in worst])
