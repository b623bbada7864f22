"""What does routing by cache buy, and what does host memory buy on top? An answer in under a minute, without a GPU.

    make demo        or        python examples/demo.py [--limit 2000] [--out build/demo]

Replays the Mooncake conversation trace (12,031 requests of a chat service over an hour) through eight workers, three times:
requests dealt out in turn, routed to where their prompt is cached, and the same with host memory below each device. Prints
the three side by side and writes pages with the details.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvyard.errors import KvyardError
from kvyard.lab.compare import compare
from kvyard.lab.jobs import LocalExecutor, Task
from kvyard.replay.report import Report
from kvyard.replay.report.files import read_report
from kvyard.replay.report.page import write_html
from kvyard.replay.run import read_slo
from kvyard.replay.settings import make_config

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz"
REQUESTS = 12_031
SLO = "ttft=500,itl=20"
RUNS = {
    "round-robin": {"router": "round-robin"},
    "kv": {"router": "kv"},
    "kv + host": {"router": "kv", "host_bytes": "256GiB"},
}
"""By label: what is different between the runs."""
INTRO = """Eight workers, each with 16,384 blocks of 64 tokens on its device; a token takes 128 KiB, as in Llama 3.1
8B. Passes take as long as in NVIDIA Dynamo's mocker. "kv + host" adds 256 GiB of host memory per worker, over
a link of 32 GB/s each way.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="The Mooncake conversation trace through eight workers, three ways.")
    parser.add_argument("--limit", type=int, help="replay only so many requests")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where pages go (default: build/demo)")
    parser.add_argument("--jobs", type=int, default=min(len(RUNS), os.cpu_count() or 1), help="runs at a time")
    asked = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    part = f"the first {asked.limit:,} of its {REQUESTS:,}" if asked.limit else f"all {REQUESTS:,}"
    console.print(f"[bold]The Mooncake conversation trace[/bold], {part} requests, replayed three times.\n")
    console.print(INTRO)
    started = time.monotonic()
    reports = replay_all(asked.out, asked.limit, asked.jobs, console)
    seconds = time.monotonic() - started
    found = compare(reports)
    found.show(console)
    print_answer(reports, console)
    (asked.out / "comparison.html").write_text(found.page())
    for name, report in zip(file_names(), reports, strict=False):
        write_html(report, asked.out / f"{name}.html")
    simulated = sum(report.duration_s for report in reports)
    console.print(f"{simulated / 60:,.0f} minutes of eight workers, simulated in {seconds:.0f} s.")
    console.print(f"Side by side: {asked.out / 'comparison.html'}")
    console.print(f"Each run:     {', '.join(str(asked.out / f'{name}.html') for name in file_names())}")


def file_names() -> list[str]:
    return [label.replace(" + ", "-") for label in RUNS]


def replay_all(out: Path, limit: int | None, jobs: int, console: Console) -> list[Report]:
    """The reports of ``RUNS``, made side by side in processes of their own."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.json" for name in file_names()]
    tasks = [
        Task(str(TRACE), {}, make_config({"limit": limit, **settings}), read_slo(SLO), label, str(path), label)
        for (label, settings), path in zip(RUNS.items(), paths, strict=True)
    ]
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=40),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {label: progress.add_task(label, total=limit or REQUESTS, at="", start=False) for label in RUNS}

        def told(label: str, through: int, now: int) -> None:
            progress.start_task(bars[label])
            progress.update(bars[label], completed=through, at=f"{now / 60e9:.0f} min simulated")

        def ended(label: str, why: str | None) -> None:
            progress.stop_task(bars[label])
            if why is not None:
                raise KvyardError(f"{label}: {why}")

        # The longest first, so that it isn't waited for at the end.
        LocalExecutor(jobs).run(tasks[::-1], ended, told)
    return [read_report(path) for path in paths]


def print_answer(reports: list[Report], console: Console) -> None:
    """The comparison in sentences."""
    plain, routed, with_host = reports
    console.print()
    for before, after, what in (
        (plain, routed, "Routing by cache"),
        (routed, with_host, "Host memory on top"),
    ):
        old, new = before.latency["ttft"].mean, after.latency["ttft"].mean
        console.print(
            f"[bold]{what}[/bold]: reuse goes from {before.reuse['all'].value:.1%} to {after.reuse['all'].value:.1%} of prompt "
            f"tokens, mean time to first token from {old:.0f} to {new:.0f} ms ({new / old - 1:+.0%}).",
            highlight=False,
        )
    console.print()


if __name__ == "__main__":
    main()
