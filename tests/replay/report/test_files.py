"""Reports and requests as files: the same bytes for the same run, and refusals that say what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.replay.report.support import SLO, config, ran, reported, trace
from tests.replay.support import record_of

from kvyard.errors import KvyardError
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import files, make_report
from kvyard.replay.report.bounds import make_bounds
from kvyard.replay.report.files import from_json, read_report, to_json, write_report, write_requests


def fresh(seed: int = 0, plans: bool = True, **settings: int) -> bytes:
    made = replace(config(workers=3, **settings), seed=seed, plans=plans)
    fleet = Fleet(made)
    fleet.run(trace(150))
    report = make_report(fleet, slo=SLO, bounds=make_bounds(fleet, trace(150)))
    return to_json(report)


def test_the_same_run_gives_the_same_bytes() -> None:
    first = fresh()
    assert fresh() == first
    assert fresh(seed=1) != first


@pytest.mark.parametrize("settings", [{}, {"blocks": 2200, "host": 4000}, {"dp": 2}], ids=str)
def test_stepping_gives_the_same_bytes_but_for_the_setting(settings: dict[str, int]) -> None:
    assert fresh(plans=False, **settings) == fresh(**settings).replace(b'"plans":true', b'"plans":false')


@pytest.mark.parametrize("settings", [{"policy": "kv"}, {"policy": "kv", "blocks": 2200, "host": 4000}])
def test_a_written_report_can_be_read(settings: dict[str, object], tmp_path: Path) -> None:
    report = reported(**settings)  # type: ignore[arg-type]
    assert from_json(to_json(report)) == report
    assert to_json(from_json(to_json(report))) == to_json(report)
    write_report(report, tmp_path / "r.json")
    write_report(report, tmp_path / "r.json")  # over what was there
    assert read_report(tmp_path / "r.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert b"wall" not in to_json(report)


def test_keys_are_in_order() -> None:
    value = json.loads(to_json(reported()))
    assert list(value["latency"]) == sorted(value["latency"])
    assert list(value["config"]) == sorted(value["config"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "not a report of kvyard"),
        (b"[1, 2]", "not a report of kvyard"),
        (b"\xff\xfe", "not a report of kvyard"),
        (b"{}", "doesn't say so in its key 'kind'"),
        (b'{"kind": "kvyard report", "version": 99}', "version 99, and this kvyard reads version 1"),
        (b'{"kind": "kvyard report", "version": 1}', "not a whole report"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(KvyardError, match=message) as refusal:
        read_report(path)
    assert "x.json" in str(refusal.value)


def test_a_cut_report_is_refused() -> None:
    with pytest.raises(KvyardError, match="not a report"):
        from_json(to_json(reported())[:-100])


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"can't read .*no\.json"):
        read_report(tmp_path / "no.json")
    with pytest.raises(KvyardError, match="can't write"):
        write_report(reported(), tmp_path / "no" / "r.json")


def test_requests_as_jsonl(tmp_path: Path) -> None:
    records = list(ran().records.values())
    write_requests(records, tmp_path / "r.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [record.id for record in records]
    for row, record in zip(rows, records, strict=True):
        assert row["ttft_ms"] == (record.first_token - record.arrival) / 1e6
        assert row["e2e_ms"] == (record.ended - record.arrival) / 1e6
        assert (row["worker"], row["status"], row["miss"]) == (record.worker, "finished", record.miss)
        assert row["cached_tokens"] == record.cached and row["reason"] is None


def test_requests_as_parquet_say_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    records = list(ran().records.values())
    write_requests(records, tmp_path / "r.parquet")
    write_requests(records, tmp_path / "r.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "r.parquet").to_pylist() == rows


def test_requests_that_never_came_to_it_are_null(tmp_path: Path) -> None:

    write_requests([record_of("a", 5, tokens=10, wanted=3)], tmp_path / "r.jsonl")
    row = json.loads((tmp_path / "r.jsonl").read_text())
    assert row["status"] == "unfinished" and row["arrival_ns"] == 5
    for name in (
        "admitted_ns",
        "first_token_ns",
        "ended_ns",
        "ttft_ms",
        "itl_ms",
        "e2e_ms",
        "queue_ms",
        "worker",
        "miss",
    ):
        assert row[name] is None


def test_refusals_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvyardError, match=r"\.jsonl or \.parquet"):
        write_requests([], tmp_path / "r.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(KvyardError, match=r"pip install 'kvyard\[parquet\]'"):
        write_requests([], tmp_path / "r.parquet")


def test_zero_differs_from_missing() -> None:
    never = files.row(record_of("a", tokens=5, loading=-1))
    nothing = files.row(record_of("a", tokens=5, loaded=(7,), loading=0))
    assert (never["loading_ms"], nothing["loading_ms"]) == (None, 0.0)
    assert (never["host_tokens"], nothing["host_tokens"], nothing["storage_tokens"], nothing["remote_tokens"]) == (
        0,
        7,
        0,
        0,
    )
