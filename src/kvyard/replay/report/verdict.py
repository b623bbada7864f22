"""A comparison in plain words: which run is better for what, and by how much. Only what its lines say."""

from collections.abc import Sequence

from kvyard.replay.report.comparison import NOISE, ComparedLine, change_text, value_text

ASKED = {
    "ttft.mean": "time to first token (mean)",
    "ttft.p99": "time to first token (p99)",
    "itl.mean": "time between tokens (mean)",
    "itl.p99": "time between tokens (p99)",
    "e2e.mean": "end-to-end latency (mean)",
    "requests_per_s": "requests per second",
    "goodput": "requests within the SLO",
    "reuse.all": "reuse",
}
"""What people choose by, in order. A difference within the comparison's noise is none."""


def verdict(runs: Sequence[str], compared: Sequence[ComparedLine]) -> list[str]:
    """A sentence per run that is better than the yardstick in something, or worse in all; and what is the same for all."""
    lines = {line.key: line for line in compared if line.key in ASKED}
    first = runs[0]
    said: list[str] = []
    for number in range(1, len(runs)):
        better, worse = (
            [key for key in ASKED if key in lines and _beats(lines[key], number) == sign] for sign in (1, -1)
        )
        run = runs[number]
        if better:
            text = f"{run} is better than {first} in {_listed(better, lines, number)}"
            said.append(
                f"{text}, and worse in {_listed(worse, lines, number)}." if worse else f"{text}, and worse in nothing."
            )
        elif worse:
            said.append(f"{run} is worse than {first} in {_listed(worse, lines, number)}, and better in nothing.")
        else:
            said.append(f"{run} and {first} are within 0.5% of each other in all that people choose by.")
    if len(runs) > 2 and (chosen := _winners(runs, lines)):
        said.append(chosen)
    return said


def _beats(line: ComparedLine, number: int) -> int:
    """1 where a run is better than the first, -1 where it is worse, 0 where they are as good as equal or one isn't known."""
    own, first = line.values[number], line.values[0]
    if own is None or first is None or abs(own - first) <= NOISE * max(abs(own), abs(first)):
        return 0
    return 1 if (own < first) == (line.better == "low") else -1


def _listed(keys: Sequence[str], lines: dict[str, ComparedLine], number: int) -> str:
    pieces = []
    for key in keys:
        line = lines[key]
        unit = " ms" if line.unit == "ms" else ""
        pieces.append(f"{ASKED[key]}: {value_text(line, number)}{unit} ({change_text(line, number)})")
    return pieces[0] if len(pieces) == 1 else f"{', '.join(pieces[:-1])} and {pieces[-1]}"


def _winners(runs: Sequence[str], lines: dict[str, ComparedLine]) -> str:
    """Who is best at what, where there are more than two."""
    by: dict[str, list[str]] = {}
    for key, line in lines.items():
        if len(line.best) == 1:
            by.setdefault(runs[line.best[0]], []).append(ASKED[key])
    if not by:
        return ""
    if len(by) == 1:
        run, wins = next(iter(by.items()))
        return f"{run} is the best of all in {', '.join(wins)}."
    each = [f"{run} in {', '.join(wins)}" for run, wins in by.items()]
    return f"Best of all: {'; '.join(each)}."
