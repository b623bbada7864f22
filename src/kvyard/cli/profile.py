"""``kvyard profile``: timing profiles from your own measurements, and how far to trust them."""

from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.fits import show_fit, show_worst
from kvyard.cli.outputs import print_json, print_table, say_written, words_beside
from kvyard.engine.timing.fitting import errors_by_kind, row_errors
from kvyard.engine.timing.measurements import Measurements
from kvyard.engine.timing.profile import Profile, load_profile, pass_ms, shipped
from kvyard.files import STDOUT, check_outputs, write_whole
from kvyard.lab.calibrate.calibration import fit_profile
from kvyard.lab.calibrate.passes import read_passes

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fit timing to measurements, and inspect the fit.")

NEW = (16, 128, 512, 2048, 8192, 32768)
PAST = (0, 2048, 8192, 32768)
BATCH = (1, 8, 32, 128, 512)
CONTEXT = (256, 1024, 4096, 16384)


@app.command()
def fit(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Measured passes: JSON lines, or an engine's log.", show_default=False),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; by default the first file's.")] = None,
) -> None:
    """Fit a profile to measured passes and print its error, also on passes left out of the fit.

    A line of FILE is {"kind": "prefill", "new": 512, "past": 2048, "ms": 17.3}, {"kind": "decode", "batch": 32, "ctx": 4096,
    "ms": 9.1}, or {"kind": "mixed", "prefills": [[512, 0]], "batch": 32, "ctx": 4096, "ms": 20.9}. Other kinds are skipped. An
    engine's log is {"passes": [...]}. kvyard calibrate --from does the same, and reads other files too.
    """
    check_outputs(output, reads=files)
    show_fit(fit_profile([read_passes(file) for file in files], name), output)


@app.command()
def show(
    profile: Annotated[str, typer.Argument(help="A profile file, or the name of one that ships with kvyard.")],
    data: Annotated[Path | None, typer.Argument(metavar="[DATA]", help="Measured passes to compare it with.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write plots of the profile (and of DATA) to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the profile as JSON.")] = False,
) -> None:
    """Print the pass times of a profile, beside measurements if there are any."""
    check_outputs(html, STDOUT if as_json else None, reads=[profile, *([] if data is None else [data])])
    chosen = _find(profile)
    measured = None if data is None else read_passes(data)
    if html is not None:
        from kvyard.replay.report.profile_page import page

        write_whole(html, page(chosen, measured))
    if as_json:
        print_json(chosen)
    else:
        with words_beside(html):
            typer.echo(", ".join(filter(None, (chosen.name, chosen.source, chosen.device))))
            _estimates(chosen)
            if measured is not None:
                _compare(chosen, measured)
    say_written([html])


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
    errors = row_errors(profile.form, data.rows)
    typer.echo(f"\nagainst {data.source}")
    rows: list[tuple[str, ...]] = [("", "points", "mean error", "median", "largest")]
    for kind, of in errors_by_kind(data.rows, errors).items():
        rows.append((kind, str(of.points), *(f"{share:.1%}" for share in (of.mean, of.median, of.largest))))
    print_table(rows)
    show_worst(data.rows, errors)
