"""``kvyard compare``: reports of several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.outputs import print_json, say_written, words_beside
from kvyard.cli.serving import Json
from kvyard.errors import KvyardError
from kvyard.files import STDOUT, check_outputs, write_whole


def compare(
    files: Annotated[list[Path], typer.Argument(help="Reports, as written by --report. The first is the baseline.")],
    slo: Annotated[
        str | None,
        typer.Option(help="Judge all runs by these limits instead of their own, such as 'ttft_p99<1s,session_p90<5m'."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.", rich_help_panel=OUTPUT)] = None,
    as_json: Json = False,
) -> None:
    """Compare the reports of several runs: which is best at what, and by how much."""
    from kvyard.lab.compare import MOST
    from kvyard.lab.compare import compare as put_side_by_side
    from kvyard.replay.report.files import read_report
    from kvyard.replay.report.slo import parse_limits

    limits = parse_limits(slo)
    check_outputs(html, STDOUT if as_json else None, reads=files)
    if html is not None and len(files) > MOST:
        raise KvyardError(
            f"--html shows at most {MOST} runs side by side, not {len(files)}: choose some, or leave it out"
        )
    reports = [read_report(path) for path in files]
    comparison = put_side_by_side(
        reports, [report.label or path.stem for report, path in zip(reports, files, strict=True)], limits
    )
    if html is not None:
        write_whole(html, comparison.page())
    if as_json:
        print_json(comparison.facts)
    else:
        with words_beside(html):
            comparison.show()
    say_written([html])
