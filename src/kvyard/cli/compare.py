"""``kvyard compare``: reports of several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.serving import Json


def compare(
    files: Annotated[list[Path], typer.Argument(help="Reports, as written by --report; the first is the yardstick.")],
    html: Annotated[Path | None, typer.Option(help="Also draw them, in one page.")] = None,
    as_json: Json = False,
) -> None:
    """Put the reports of several runs side by side: who is best at what, and by how much."""
    import msgspec

    from kvyard.replay.report.compare import compare as put_side_by_side
    from kvyard.replay.report.compare import print_comparison
    from kvyard.replay.report.compare_page import write_comparison
    from kvyard.replay.report.files import read_report

    reports = [read_report(path) for path in files]
    found = put_side_by_side(reports, [report.label or path.stem for report, path in zip(reports, files)])
    if html is not None:
        write_comparison(found, reports, html)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print_comparison(found)
    if html is not None:
        typer.echo(f"page: {html}", err=True)
