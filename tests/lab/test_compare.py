"""Runs side by side: values, changes, who is best, and what makes it unfair."""

from __future__ import annotations

import re
from io import StringIO
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.replay.report.support import reported

from kvyard.errors import KvyardError
from kvyard.lab.compare import compare, differences, unique
from kvyard.lab.study import Result
from kvyard.lab.study.advice import CHOSEN_BY
from kvyard.replay.report.figures import waterfalls
from kvyard.replay.report.metrics import METRICS
from kvyard.replay.report.report import Waterfall


class Line(SimpleNamespace):
    """A line of the comparison's JSON."""


def lines(found: Result) -> dict[str, Line]:
    return {one["key"]: Line(**one) for one in found.facts["lines"]}


def line(key: str, *runs: object) -> Line:
    return lines(compare(list(runs)))[key]  # type: ignore[arg-type]


def test_values_changes_and_best() -> None:
    slow, fast = reported(policy="round-robin", blocks=2200), reported(policy="kv")
    ttft = line("ttft.mean", slow, fast)
    before, after = slow.latency["ttft"].mean, fast.latency["ttft"].mean
    assert ttft.values == [before, after]
    assert ttft.changes == [0.0, pytest.approx(after / before - 1)]
    assert ttft.best == [1] and after < before
    reuse = line("reuse.all", slow, fast)
    assert reuse.changes[1] == pytest.approx(fast.reuse["all"].value - slow.reuse["all"].value)
    assert line("regret", slow, fast).values == [None, fast.router.regret.value]
    assert line("regret", slow, fast).changes == [None, None]


def test_equally_good_runs_share_the_star() -> None:
    run = reported()
    assert all(one.best == [] for one in lines(compare([run, run])).values())

    def with_ttft(mean: float) -> object:
        return replace(run, latency=run.latency | {"ttft": replace(run.latency["ttft"], mean=mean)})

    assert line("ttft.mean", with_ttft(100.4), with_ttft(100.0), with_ttft(120.0)).best == [0, 1]
    assert line("ttft.mean", with_ttft(100.6), with_ttft(100.0), with_ttft(120.0)).best == [1]


def test_changes_in_words() -> None:
    ttft, reuse = METRICS["ttft_mean"], METRICS["reuse"]
    assert ttft.change_text(90.0, 100.0) == "-10.0%" and ttft.change_text(100.0001, 100.0) == "±0%"
    assert ttft.change_text(999.0, 100.0) == "+899.0%" and ttft.change_text(16_100.0, 100.0) == "×161"
    assert reuse.change_text(0.25, 0.2) == "+5.0 pt" and reuse.change_text(0.5, 0.01) == "+49.0 pt"
    assert ttft.change_text(None, 1.0) == ttft.change_text(1.0, None) == "" and ttft.text(None) == "–"


def test_differing_settings_are_listed() -> None:
    found = differences(
        [
            {"workers": [{"count": 4, "tiers": None}], "seed": 0, "same": [1, 2]},
            {"workers": [{"count": 8, "tiers": {"host": 5}}], "seed": 0, "same": [1, 2], "new": True},
        ]
    )
    assert found == {"workers.0.count": [4, 8], "workers.0.tiers": [None, {"host": 5}], "new": [None, True]}
    assert "router.policy" in compare([reported(), reported(policy="round-robin", blocks=2200)]).facts["settings"]


def test_unfair_comparisons_say_so() -> None:
    run = reported()
    assert compare([run, run]).notes == []
    others = {
        "had other requests to serve": reported(limit=100),
        "was made by kvyard 0.0.0": replace(run, made_by="0.0.0"),
        "interrupted": replace(run, complete=False),
        "did not finish": replace(run, requests={"all": 300, "finished": 299, "rejected": 1}),
    }
    for words, other in others.items():
        notes = compare([run, replace(other, label="other")]).notes
        assert len(notes) == 1 and words in notes[0] and "other" in notes[0]
    assert run.goodput is not None
    strict = replace(run, goodput=replace(run.goodput, slo_ms=replace(run.goodput.slo_ms, ttft=1.0)))
    assert "different SLOs" in compare([run, strict]).notes[0]


def test_names() -> None:
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a #2", "a #3"]
    with pytest.raises(KvyardError, match="two reports or more"):
        compare([reported()])


@pytest.mark.parametrize("width", [80, 120])
def test_many_runs_come_in_several_tables(width: int) -> None:
    out = StringIO()
    runs = [reported(policy="round-robin", blocks=2200), *[reported()] * 6]
    compare(runs).show(Console(file=out, width=width, color_system=None))
    text = out.getvalue()
    heads = [row for row in text.splitlines() if row.strip().startswith("round-robin") and "kv" in row]
    assert len(heads) == {80: 6, 120: 2}[width]
    assert all(f"kv #{number}" in text for number in range(2, 7)) and "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_waterfalls_side_by_side() -> None:
    slow, fast = reported(policy="round-robin", blocks=2200), reported(policy="kv")
    found = lines(compare([slow, fast]))
    for number, run in enumerate((slow, fast)):
        whole = run.reuse["all"].whole
        steps = {step.level: step for step in run.waterfall.steps}
        assert found["waterfall.delivered"].values[number] == run.reuse["all"].value
        for key, line_ in found.items():
            what, _, level = key.partition(".")
            if what == "waterfall":
                assert line_.values[number] == (steps[level].tokens / whole if level in steps else None)
            elif what == "lost":
                assert (line_.values[number] is None) == (level not in steps)
        lost = [line_.values[number] or 0.0 for key, line_ in found.items() if key.startswith("lost.")]
        assert min(lost) >= 0
        assert sum(lost) == pytest.approx(sum(step.ms or 0.0 for step in run.waterfall.steps))
    assert found["lost.routed"].values[0] > found["lost.routed"].values[1]
    assert found["waterfall.believed"].values[0] is None  # round-robin knows nothing


def test_bars_of_waterfalls_are_as_long_as_an_endless_cache() -> None:
    runs = [reported(policy="round-robin", blocks=2200), reported(policy="kv"), reported(host=3000)]
    figure = waterfalls([*runs, replace(runs[0], waterfall=Waterfall())], ["a", "b", "c", "without bounds"])
    assert [row["name"] for row in figure["rows"]] == ["a", "b", "c"]
    for row, run in zip(figure["rows"], runs, strict=False):
        tokens = [int(part["text"].split(", ")[1].split()[0].replace(",", "")) for part in row["parts"]]
        assert sum(tokens) == run.bounds["infinite"].part and tokens[0] == run.reuse["all"].part


def test_a_verdict_says_nothing_that_the_lines_do_not() -> None:
    found = compare([reported(policy="round-robin", blocks=2200), reported(policy="kv"), reported(host=3000)])
    metrics = {metric.key: metric for metric in METRICS.values()}
    shown = {metrics[line.key].text(value, unit=True) for line in lines(found).values() for value in line.values}
    titles = [sentence.partition(":")[0] for sentence in found.facts["verdict"]]
    assert titles == [metric.title for metric in CHOSEN_BY], "one line for each"
    figures = re.findall(r"(?:round-robin|kv|kv #2) ([0-9.,]*[0-9](?:%| m?s)?)", " ".join(found.facts["verdict"]))
    assert figures and set(figures) <= shown
    assert found.facts["runs"] == ["round-robin", "kv", "kv #2"]


def test_runs_that_miss_their_slo_are_named() -> None:
    good = reported()
    assert good.goodput is not None
    bad = replace(
        good, goodput=replace(good.goodput, slo_ms=replace(good.goodput.slo_ms, percentiles={"ttft_p99": 1e-3}))
    )
    found = compare([good, bad], ["good", "bad"])
    assert found.met is False and "SLO NOT met by" in found.verdict and "bad" in found.verdict
    assert "bad misses the SLO: " in "".join(found.advice) and found.verdict in found.page()
    assert compare([replace(good, goodput=None)] * 2).met is None
