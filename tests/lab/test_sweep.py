"""Sweeps: every point once, over processes, kept for the next time; the table and the page."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

import pytest
from tests.replay.report.browser import BINARY, Tab
from tests.replay.report.test_page import sound, titled
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.study import Study
from kvyard.lab.study.axes import axis, axis_title, number_of
from kvyard.lab.sweep import DRAWN, advice, sweep
from kvyard.replay import replay
from kvyard.replay.report.files import to_json
from kvyard.replay.report.metrics import METRICS
from kvyard.replay.traces.writing import write_trace

VARY = {"host_blocks": ["0", "1k", "4k"], "router": ["round-robin", "kv"]}
BASE = {"block_size": 16, "num_gpu_blocks": 500, "workers": 2}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "talks.jsonl"
    write_trace(sessions(100), path, "mooncake")
    return path


@pytest.fixture(scope="module")
def done(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    return sweep(trace, VARY, folder=tmp_path_factory.mktemp("sweep"), slo="ttft=300", trace_block_size=16, **BASE)


def test_a_point_is_a_replay(done: Study, trace: Path) -> None:
    assert len(done.done) == 6 and not done.failures and not done.missing and done.found == 0
    point, report = done.done[-1]
    same = replay(trace, host_blocks="4k", router="kv", slo="ttft=300", label=point.label, trace_block_size=16, **BASE)  # type: ignore[arg-type]
    assert to_json(report) == to_json(same.report)
    reuse = [one.reuse["all"].value for _, one in done.done]
    assert reuse[5] > reuse[1] > reuse[0]


def test_finished_points_are_not_run_again(done: Study, trace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (done.folder / "points").glob("*.json")}
    assert len(before) == 6
    wider = {"host_blocks": ["0", 1000, "4k", "8k"], "router": ["kv"]}
    ran: set[str] = set()
    again = sweep(
        trace,
        wider,
        folder=done.folder,
        slo="ttft=300",
        trace_block_size=16,
        progress=lambda key, through, now: ran.add(key),
        **BASE,
    )
    assert again.found == 3 and len(again.done) == 4
    assert ran == {again.grid.points[3].key}
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


def test_a_damaged_point_is_made_again(done: Study, trace: Path, tmp_path: Path) -> None:
    vary = {"router": ["kv"]}
    first = sweep(trace, vary, folder=tmp_path, trace_block_size=16, **BASE)
    kept = tmp_path / "points" / f"{first.grid.points[0].key}.json"
    text = kept.read_bytes()
    kept.write_bytes(text[:1000])
    again = sweep(trace, vary, folder=tmp_path, trace_block_size=16, **BASE)
    assert again.found == 0 and kept.read_bytes() == text


@pytest.mark.timeout(400)
def test_processes_give_the_same(done: Study, trace: Path, tmp_path: Path) -> None:
    counts: list[tuple[int, int]] = []
    vary = {"host_blocks": ["0", "4k"], "router": ["round-robin", "kv"]}
    spread = sweep(
        trace,
        vary,
        folder=tmp_path,
        slo="ttft=300",
        trace_block_size=16,
        jobs=2,
        counted=lambda total, through: counts.append((total, through)),
        **BASE,
    )
    assert counts == [(4, number) for number in range(5)]
    for point, report in spread.done:
        assert to_json(report) == to_json(done.reports[point.key])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_point_that_fails_leaves_the_others(trace: Path, tmp_path: Path, jobs: int) -> None:
    base = {**BASE}
    del base["num_gpu_blocks"]
    made = sweep(
        trace, {"num_gpu_blocks": [1, 500]}, folder=tmp_path, trace_block_size=16, jobs=jobs, router="kv", **base
    )
    assert [point.varied["num_gpu_blocks"] for point, _ in made.done] == ["500"]
    assert len(made.failed) == 1 and "none of the 100 requests fits" in made.failed[0][1]
    made.save()
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert "none of the 100" in rows[0]["error"] and not rows[1]["error"]
    assert "none of the 100" in (tmp_path / "sweep.html").read_text()


def test_an_interrupt_keeps_what_is_done(trace: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def told(key: str, through: int, now: int) -> None:
        if key not in seen:
            seen.append(key)
        if len(seen) == 2:
            raise KeyboardInterrupt

    vary = {"router": ["kv", "random", "round-robin"]}
    made = sweep(trace, vary, folder=tmp_path, trace_block_size=16, progress=told, **BASE)
    assert made.interrupted and len(made.done) == 1 and made.missing == 2
    made.save()
    assert len(list((tmp_path / "points").iterdir())) == 1
    again = sweep(trace, vary, folder=tmp_path, trace_block_size=16, **BASE)
    assert again.found == 1 and len(again.done) == 3


def test_files(done: Study) -> None:
    paths = done.save()
    assert [path.name for path in paths] == ["sweep.csv", "sweep.json", "sweep.html"]
    value = json.loads(paths[1].read_text())
    assert value["axes"] == VARY and len(value["points"]) == 6
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["router"] for row in rows] == ["round-robin", "kv"] * 3
    for row, one in zip(rows, value["points"], strict=False):
        assert float(row["ttft_mean_ms"]) == one["ttft_mean_ms"] > 0
        assert (done.folder / row["report"]).is_file()
        assert float(row["goodput_requests_per_s"]) > 0


def test_the_table(done: Study, capsys: pytest.CaptureFixture[str]) -> None:
    done.show()
    out = capsys.readouterr().out
    assert out.count("round-robin") == 3 and "TTFT" in out and "good/s" in out and "%" in out


def test_the_axis_is_what_people_ask_about() -> None:
    assert axis({"router": ["kv", "random"], "seed": ["1", "2", "3"], "host_bytes": ["1GiB", "2GiB"]}) == "host_bytes"
    assert axis({"router": ["kv", "random"], "seed": ["1", "2", "3"], "max_num_seqs": ["8", "16"]}) == "seed"
    assert axis({"router": ["kv", "random"], "host_blocks": ["5"]}) is None


def test_the_page_needs_no_network_and_escapes(done: Study) -> None:
    text = done.result().page()
    assert not re.search(r'(src|href)="(?!data:|#|runs/)|https?://|@import|url\((?!#)', text)
    done.trace, before = "</script><script>alert(1)</script>", done.trace
    assert "<script>alert" not in done.result().page()
    done.trace = before


def test_refused_before_anything_runs(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "never"
    for options, match in (
        ({"vary": {"router": ["kv", "best"]}}, "at the point router=best"),
        ({"vary": {}}, "varies something"),
        ({"vary": {"router": "kv"}}, "give a list of values"),
        ({"vary": {"router": ["kv"]}, "jobs": 0}, "jobs must be at least 1"),
        ({"vary": {"router": ["kv"]}, "slo": "ttft=fast"}, "SLO"),
        ({"vary": {"router": ["kv"]}, "hostblocks": 3}, "did you mean host_blocks"),
    ):
        with pytest.raises(KvyardError, match=match):
            sweep(trace, folder=folder, trace_block_size=16, **options)  # type: ignore[arg-type]
    with pytest.raises(KvyardError, match="no such file"):
        sweep(tmp_path / "no.jsonl", {"router": ["kv"]}, folder=folder)
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(KvyardError, match="can't make the folder"):
        sweep(trace, {"router": ["kv"]}, folder=tmp_path / "file", trace_block_size=16)


@pytest.mark.browser
@pytest.mark.timeout(400)
@pytest.mark.skipif(BINARY is None, reason="no chromium here")
class TestInABrowser:
    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (800, False)])
    def test_curves(self, tab: Tab, done: Study, width: int, dark: bool) -> None:
        done.save()
        tab.open(done.folder / "sweep.html", width, dark=dark)
        sound(tab, 8, width)
        assert all(len(titles) == 2 and titles[0] == "blocks of host memory per worker" for titles in titled(tab))
        lines = tab.ask("[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('path.series').length)")
        dots = tab.ask("[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('circle.dot').length)")
        assert lines == [3] + [2] * 7 and dots == [6] * 8, "the first has the SLO's line"
        tab.hover(".chart[data-figure='0'] svg", 0.9, 0.5)
        tip = tab.ask("document.getElementById('tip').textContent")
        assert "4,000" in tip and "round-robin" in tip and "kv" in tip
        if place := os.environ.get("KVYARD_PICTURES"):
            tab.picture(Path(place) / f"sweep-{width}{'-dark' if dark else ''}.png")

    def test_names_instead_of_numbers(self, tab: Tab, tmp_path: Path) -> None:
        made = sweep(CONVERSATION, {"router": ["kv", "random"]}, folder=tmp_path, workers=2, limit=30)
        made.save()
        tab.open(tmp_path / "sweep.html")
        sound(tab, 6, 1280)
        assert tab.ask("document.querySelectorAll('.chart rect.series').length") >= 10


def test_the_page_is_the_same_whatever_order_points_ran_in(done: Study) -> None:
    text, before = done.result().page(), done.reports
    done.reports = dict(reversed(before.items()))
    assert list(done.reports) != list(before)
    assert done.result().page() == text
    done.reports = before


def test_points_have_pages_that_lead_there_and_back(done: Study) -> None:
    done.save()
    text = (done.folder / "sweep.html").read_text()
    links = re.findall(r'<a href="(runs/[0-9a-f]+[.]html)">', text)
    assert len(links) == 6
    for link in links:
        assert '<a href="../sweep.html">All runs of the sweep</a>' in (done.folder / link).read_text()


def test_axes_are_in_the_unit_that_was_written() -> None:
    assert axis_title("host_bytes", ["0", "64GiB"]) == ("GiB of host memory per worker", 1e9 / 2**30)
    assert number_of("host_bytes", "64GiB") * 1e9 / 2**30 == pytest.approx(64)  # type: ignore[operator]
    assert axis_title("host_bytes", ["0", "64GB"]) == ("GB of host memory per worker", 1.0)
    assert axis_title("host_blocks", ["0", "64k"]) == ("blocks of host memory per worker", 1.0)


def test_columns_have_units(done: Study) -> None:
    text = done.result().page()
    heads = [head.replace("\u00a0", " ") for head in re.findall(r"<th>(.*?)</th>", text)]
    assert {"TTFT mean, ms", "TTFT p50, ms", "TTFT p99, ms", "ITL mean, ms", "E2E mean, ms"} <= set(heads)
    assert not {"TTFT", "p50", "p99", "ITL", "E2E"} & set(heads)


def test_charts_come_in_the_order_of_what_people_ask_first(done: Study) -> None:
    titles = {name: METRICS[name].label for name in DRAWN}
    text = done.result().page()
    places = [at for name in DRAWN if (at := text.find(f">{titles[name]}<")) >= 0]
    assert len(places) >= 5 and places == sorted(places)


def test_an_oracle_is_not_recommended(trace: Path, tmp_path: Path) -> None:
    made = sweep(trace, {"eviction": ["lru", "belady"]}, folder=tmp_path, trace_block_size=16, **BASE)
    said = advice(made)
    assert said.choice == "eviction=lru" and "eviction=belady knows the future" in said.sentences[-1]


def test_the_edge_of_the_grid(trace: Path, tmp_path: Path) -> None:
    base = {name: value for name, value in BASE.items() if name != "workers"}
    made = sweep(trace, {"workers": [1, 2, 3]}, folder=tmp_path, trace_block_size=16, **base)
    assert any(sentence.startswith("workers=3 is at the high end") for sentence in advice(made).sentences)
    two = sweep(trace, {"workers": [1, 3]}, folder=tmp_path, trace_block_size=16, **base)
    assert two.found == 2 and len(advice(two).sentences) == 1, "two values are a comparison, and no grid"


def test_the_cheapest_that_keeps_the_slo(trace: Path, tmp_path: Path) -> None:
    base = {name: value for name, value in BASE.items() if name != "workers"}
    made = sweep(trace, {"workers": [1, 2, 3]}, folder=tmp_path, slo="ttft_p99<1h", trace_block_size=16, **base)
    assert advice(made).choice == "workers=1" and "3 of 3 points keep ttft_p99" in advice(made).sentences[0]
    tight = sweep(trace, {"workers": [1, 2, 3]}, folder=tmp_path, slo="ttft=1us", trace_block_size=16, **base)
    assert (
        not advice(tight).choice
        and "No point of 3 meets the SLO (99% of requests within TTFT" in advice(tight).sentences[0]
    )


def test_cards_and_cost_are_shown_and_the_cheapest_in_money_is_chosen(tmp_path: Path) -> None:
    card = {"model": "llama-3.1-8b", "gpu": "h100", "limit": 30, "slo": "ttft_p99<1h"}
    made = sweep(CONVERSATION, {"tensor_parallel_size": [1, 2], "workers": [1, 2]}, folder=tmp_path, **card)
    rows = {(row["tensor_parallel_size"], row["workers"]): (row["cards"], row["cost"]) for row in made.result().rows}
    assert rows == {
        ("1", "1"): (1, pytest.approx(2.35)),
        ("1", "2"): (2, pytest.approx(4.70)),
        ("2", "1"): (2, pytest.approx(4.70)),
        ("2", "2"): (4, pytest.approx(9.40)),
    }
    result = made.result()
    assert result.met and advice(made).choice == "tensor_parallel_size=1, workers=1"
    text = result.page()
    assert "USD an hour" in text and "TTFT p99 and cost" in text and "SLO met" in text
