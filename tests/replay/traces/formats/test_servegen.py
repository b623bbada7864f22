"""ServeGen's clients: what is drawn has the rates, the variation and the lengths that the files say."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from tests.replay.traces.support import SAMPLES

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces import TraceRequest, open_trace

CLIENTS = SAMPLES / "servegen"


def client(folder: Path, rows: str, lengths: str = "{100: 0.25, 300: 0.75}", number: int = 0, **more: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_text(rows)
    tables = {"input_tokens": lengths, "output_tokens": "{7: 1.0}", **more}
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps({"0": tables}))
    return folder


def drawn(path: Path) -> list[TraceRequest]:
    return list(open_trace(path))


def test_the_sample_is_recognised_and_always_the_same() -> None:
    trace = open_trace(CLIENTS)
    found = list(trace)
    assert trace.format == "servegen" and list(trace) == found
    rates = [float(row[1]) * 600 for file in CLIENTS.glob("*.csv") for row in csv.reader(file.read_text().splitlines())]
    assert 0.5 * sum(rates) < len(found) < 1.6 * sum(rates)
    assert [one.arrival for one in found] == sorted(one.arrival for one in found)
    assert found[0].arrival == 0 and found[0].ids is None


@pytest.mark.parametrize(
    ("family", "shape", "variation"),
    [("Gamma", 4.0, 0.5), ("Weibull", 0.5, 2.236), ("", 0.0, 1.0), ("Gamma", 0.25, 2.0)],
)
def test_gaps_have_the_rate_and_the_variation_of_their_law(
    tmp_path: Path, family: str, shape: float, variation: float
) -> None:
    rows = "".join(f"{at * 600},5.0,1,{family},{shape},123\n" for at in range(20))
    found = drawn(client(tmp_path / "c", rows))
    assert len(found) == pytest.approx(20 * 600 * 5, rel=0.04)
    gaps = [(b.arrival - a.arrival) / SECOND for a, b in pairwise(found)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.08)
    assert fmean(one.input_length == 300 for one in found) == pytest.approx(0.75, abs=0.01)
    assert {one.output_length for one in found} == {7}


def test_windows_without_requests_and_clients_side_by_side(tmp_path: Path) -> None:
    folder = client(tmp_path / "c", "0,0,0,,0,0\n600,1.0,1,Gamma,1,1\n1200,0,0,,0,0\n")
    client(folder, "0,1.0,1,Gamma,1,1\n600,0,0,,0,0\n", "{5: 1.0}", number=10)
    found = drawn(folder)
    late = [one for one in found if one.input_length != 5]
    assert min(one.arrival for one in late) > 590 * SECOND and max(one.arrival for one in late) < 1200 * SECOND
    assert max(one.arrival for one in found if one.input_length == 5) < 600 * SECOND


def test_parts_of_a_multimodal_prompt_are_added(tmp_path: Path) -> None:
    folder = client(
        tmp_path / "c",
        "0,1.0,1,,0,0\n",
        text_tokens="{10: 1.0}",
        image_tokens="{100: 1.0}",
        image_count="{2: 1.0}",
        audio_tokens="{0: 1.0}",
        audio_count="{0: 1.0}",
    )
    path = folder / "chunk-0-dataset.json"
    tables = json.loads(path.read_text())
    del tables["0"]["input_tokens"]
    path.write_text(json.dumps(tables))
    assert {one.input_length for one in drawn(folder)} == {210}


@pytest.mark.parametrize(
    ("rows", "lengths", "why"),
    [
        ("0,1\n", "{5: 1.0}", "line 1 isn't start,rate"),
        ("0,-1,0,Gamma,1,1\n", "{5: 1.0}", "can't be"),
        ("0,1,0,Cauchy,1,1\n", "{5: 1.0}", "can't be"),
        ("0,1,0,Gamma,0,1\n", "{5: 1.0}", "shape"),
        ("600,1,0,,0,0\n0,1,0,,0,0\n", "{5: 1.0}", "order of time"),
        ("0,1,0,,0,0\n", "none", "no table of probabilities"),
        ("0,1,0,,0,0\n", "{}", "has no tables"),
    ],
)
def test_malformed_clients_are_refused(tmp_path: Path, rows: str, lengths: str, why: str) -> None:
    with pytest.raises(KvyardError, match=why):
        drawn(client(tmp_path / "c", rows, lengths))


def test_a_table_without_its_file_and_a_directory_without_clients(tmp_path: Path) -> None:
    folder = client(tmp_path / "c", "0,1,0,,0,0\n")
    (folder / "chunk-0-dataset.json").unlink()
    with pytest.raises(KvyardError, match=r"chunk-0-dataset\.json: no such file"):
        list(open_trace(folder, "servegen"))
    with pytest.raises(KvyardError, match="no file in it"):
        list(open_trace(tmp_path, "servegen"))
