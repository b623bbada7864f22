"""Trace formats by name: ours in the order they are tried, and those of other packages before them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvyard
from kvyard.errors import KvyardError
from kvyard.replay.traces import FORMATS, Format, Head, TraceRequest, open_trace
from kvyard.replay.traces import registry as formats_registry
from kvyard.replay.traces.reading import Reading
from kvyard.replay.traces.registry import OURS

LENGTHS = """
from kvyard.replay.traces import Format, TraceRequest


def read(reading):
    def row(number, record):
        came, asked, answered = map(int, record.split(b";"))
        return TraceRequest(reading.name(number), came, asked, answered)

    return reading.rows(row)


FORMAT = Format("lengths", "Three numbers.", lambda head: head.columns and head.columns[0].count(";") == 2, read)
"""


def test_formats_have_the_names_they_are_registered_by() -> None:
    assert all(FORMATS.get(name).name == name for name in OURS)
    with pytest.raises(KvyardError, match="unknown trace format 'x': choose one of azure, bailian"):
        FORMATS.get("x")


def test_a_program_can_add_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = type(FORMATS)("trace format", "kvyard.traces", OURS)
    monkeypatch.setattr(formats_registry, "FORMATS", formats)

    def recognise(head: Head) -> bool:
        return head.columns == ("arrival", "input", "output")

    def rows(reading: Reading) -> Iterator[TraceRequest]:
        return reading.rows(lambda number, record: TraceRequest(str(number), 0, len(record), 1))

    formats.register("mine", Format("mine", "A test.", recognise, rows))
    (tmp_path / "t.csv").write_text("arrival,input,output\n")
    trace = open_trace(tmp_path / "t.csv")
    assert (trace.format, [one.input_length for one in trace]) == ("mine", [21]), "it goes before the plain one"
    with pytest.raises(KvyardError, match="'mine' already"):
        formats.register("mine", Format("mine", "Another.", recognise, rows))


def test_one_from_an_installed_package_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "lengths_pack.py").write_text(LENGTHS)
    info = tmp_path / "lengths_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lengths-pack\nVersion: 1.0\n")
    points = "[kvyard.traces]\nlengths = lengths_pack:FORMAT\nbroken = lengths_pack:Nothing\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "some.txt").write_text("0;600;5\n1000;700;5\n2000;800;5\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(tmp_path), str(Path(kvyard.__file__).parents[1])])
        return subprocess.run(
            [sys.executable, "-m", "kvyard", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    assert "azure, plain, lengths, broken" in " ".join(run("replay", "--help").stdout.split())
    for choice in ([], ["--format", "lengths"]):
        done = run("replay", "some.txt", "-q", "--report", "r.json", *choice)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["trace"]["format"] == "lengths" and report["requests"]["finished"] == 3
    refused = run("replay", "some.txt", "--format", "broken")
    assert refused.returncode == 2 and "the trace format 'broken' of lengths-pack can't be loaded" in refused.stderr
