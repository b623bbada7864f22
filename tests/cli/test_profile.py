"""``kvyard profile``: fitting, showing, plotting, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code

from kvyard.engine.timing import make_timing
from kvyard.engine.timing.profile import load_profile, shipped

DATA = Path(__file__).parents[1] / "engine" / "timing" / "data" / "h200.jsonl"


run = partial(exit_code, "profile")


def test_fit_prints_errors_and_writes_a_profile_that_an_engine_takes(capsys, tmp_path):
    path = tmp_path / "mine.json"
    assert run("fit", str(DATA), "-o", str(path), "--name", "mine") == 0
    out = capsys.readouterr().out
    assert "mine: 64 passes of h200.jsonl, NVIDIA H200" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("prefill", "decode", "all"))}
    assert [row[1] for row in rows.values()] == ["31", "33", "64"]
    assert float(rows["all"][-1].rstrip("%")) < 5
    worst = out.split("worst points\n")[1].split("\n\n")[0].splitlines()
    assert len(worst) == 5
    assert worst[0].startswith("128 new after 8192")
    profile = load_profile(path=path)
    assert profile.errors["all"].points == 64
    model = make_timing({"kind": "profile", "path": str(path)}, 0)
    assert model.pass_ns((), 32, 32 * 4096, 4096) / 1e6 == pytest.approx(9.0925, rel=0.03)


def test_fit_without_output_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("fit", str(DATA)) == 0
    assert list(tmp_path.iterdir()) == []


def test_show(capsys):
    assert run("show", "h200-llama3-8b") == 0
    out = capsys.readouterr().out
    assert "prefill, ms" in out
    assert "decode, ms" in out
    assert "against" not in out
    assert run("show", "h200-llama3-8b", str(DATA)) == 0
    out = capsys.readouterr().out
    assert f"against {DATA}" in out
    assert "worst points" in out


def test_show_a_file_as_json(capsys, tmp_path):
    path = tmp_path / "mine.json"
    assert run("show", "h200-llama3-8b", "--json") == 0
    path.write_text(capsys.readouterr().out)
    assert load_profile(path=path) == load_profile(name="h200-llama3-8b")
    assert run("show", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "h200-llama3-8b"


def test_plots_are_one_page_with_every_measured_point(tmp_path):
    path = tmp_path / "plots.html"
    assert run("show", "h200-llama3-8b", str(DATA), "--html", str(path)) == 0
    page = path.read_text()
    assert page.count("measured") >= 9  # four pasts and five contexts
    assert "<script src=" not in page  # nothing is fetched
    assert "past 8192" in page
    assert "context 65536" in page
    assert run("show", "h200-llama3-8b", "--html", str(path)) == 0
    assert "past 8192, measured" not in path.read_text()


def test_list(capsys):
    assert run("list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == shipped()


def test_refusals(capsys, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind": "decode", "batch": 1, "ctx": 9, "ms": 1}\n{"kind": "prefill", "new": 1, "ms": 2}\n')
    few = tmp_path / "few.jsonl"
    few.write_text('{"kind": "decode", "batch": 1, "ctx": 9, "ms": 1}\n' * 5)
    for argv, words in (
        (("fit", str(tmp_path / "none.jsonl")), "none.jsonl: no such file"),
        (("fit", str(bad)), "bad.jsonl: line 2: past must be a whole number"),
        (("fit", str(few)), "at least 4 passes with prompts and 4 with decode steps, got 0 and 5"),
        (("fit", str(DATA), "-o", str(tmp_path / "no" / "such.json")), "such.json: there is no directory"),
        (("show", "tpu"), "unknown profile 'tpu': choose one of h200-llama3-8b"),
        (("show", str(bad)), "not a profile"),
        (("show", "missing.json"), "missing.json: can't be read"),
        (("show", "h200-llama3-8b", "--html", str(tmp_path / "no" / "such.html")), "such.html: there is no directory"),
    ):
        assert run(*argv) == 2
        err = capsys.readouterr().err
        assert "Error: " in err
        assert words in err
