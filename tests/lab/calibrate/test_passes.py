"""Passes from files: lines of them or an engine's log, with the host's time apart where the log has it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from benchmarks.h200_engine import DATA

from kvyard.engine.timing.fitting import fit
from kvyard.engine.timing.measurements import Measurement, Measurements
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.calibration import fit_profile
from kvyard.lab.calibrate.passes import read_passes

MS = 1_000_000


def log(path: Path, *passes: list[object]) -> Path:
    path.write_bytes(lzma.compress(json.dumps({"requests": [], "device": "Card", "passes": passes}).encode()))
    return path


def test_a_log_has_the_host_apart_and_no_idle_time(tmp_path: Path) -> None:
    found = read_passes(
        log(
            tmp_path / "log.json.xz",
            [0, 20 * MS, 0, 0, [[512, 0], [0, 7]], 0, 0, 18.5, 0],
            [20 * MS + 100_000, 28 * MS, 0, 0, [], 3, 900, 7.0, 400],
            [28 * MS + 100_000, 36 * MS, 0, 0, [[5, 16]], 3, 903, None, 401],
            [90 * MS, 96 * MS, 0, 0, [], 1, 300, 5.0, 300],  # it had nothing to do before
        )
    )
    assert found.device == "Card"
    assert [row.kind for row in found.rows] == ["prefill", "decode", "mixed", "decode"]
    assert [row.ms for row in found.rows] == pytest.approx([18.5, 7.0, 7.9, 5.0])
    assert [row.host_ms for row in found.rows] == [pytest.approx(1.6), pytest.approx(1.0), None, pytest.approx(1.0)]
    assert found.rows[0].shape == (((512, 0),), 0, 0, 0)
    assert found.rows[2].shape == (((5, 16),), 3, 903, 401)


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([], "its passes are empty"),
        ([[0, 1]], "can't be read as a log of passes"),
        ([[0, 0, 0, 0, [], 1, 9, None, 9]], "pass 0 takes no time or computes nothing"),
        ([[0, 9, 0, 0, [], 0, 0, None, 0]], "pass 0 takes no time or computes nothing"),
    ],
)
def test_logs_without_passes(tmp_path: Path, passes: list[list[object]], words: str) -> None:
    with pytest.raises(KvyardError, match=words):
        read_passes(log(tmp_path / "log.json.xz", *passes))


def test_host_time_is_found_again(tmp_path: Path) -> None:
    """Of an engine whose host takes 0.3 ms, 5 µs a request and 0.4 ms where prompts are computed."""
    passes, now = [], 0
    for at in range(520):
        batch, new = 1 + (37 * at) % 90, (300 + 11 * (at % 60)) if at % 5 == 0 else 0
        context = batch * (200 + 13 * (at % 50))
        device = 5.0 + 2.5e-5 * context + 0.02 * new
        host = 0.3 + 0.005 * (batch + bool(new)) + 0.4 * bool(new)
        if at % 40 == 7:
            host += 9.0  # the host stalled
        end = now + round((device + host - 0.05) * MS)
        passes.append([now, end, 0, 0, [[new, 0]] if new else [], batch, context, device, context // batch])
        now = end + 50_000
    of = fit(read_passes(log(tmp_path / "log.json.xz", *passes)).rows).coefficients
    assert (of.host, of.host_sequence, of.host_prompts) == (
        pytest.approx(0.3, abs=0.02),
        pytest.approx(0.005, rel=0.05),
        pytest.approx(0.4, abs=0.02),
    )


def test_host_time_beside_passes_timed_in_windows() -> None:
    """One file has the host's time of each pass, the other one times several passes as one."""
    single, several = [], []
    for at in range(40):
        batch, new = 1 + at % 8, 200 + 10 * at if at % 3 == 0 else 0
        prefills, context = ((new, 0),) if new else (), 300 * batch
        device, host = 5.0 + 2.5e-5 * context + 0.02 * new, 0.3 + 0.01 * (batch + bool(new))
        kind = "mixed" if new else "decode"
        single.append(Measurement(kind, prefills, batch, context, 300, device, host))
        step = 5.0 + 2.5e-5 * context
        rest = ((3.0, ((), batch, context, 300)),)
        several.append(Measurement(kind, prefills, batch, context, 300, device + 3 * step, others=rest))
        # and a window whose host time is known as a whole
        hosts = host + 3 * (0.3 + 0.01 * batch)
        several.append(Measurement(kind, prefills, batch, context, 300, device + 3 * step, hosts, others=rest))
    found = fit_profile([Measurements("a", None, tuple(single)), Measurements("b", None, tuple(several))])
    of = found.profile.coefficients
    assert (of.host, of.host_sequence) == (pytest.approx(0.3, abs=0.01), pytest.approx(0.01, rel=0.05))


def test_contexts_that_differ_are_read() -> None:
    rows = read_passes(DATA / "sweep.jsonl").rows
    assert len(rows) == 167
    assert rows[-1].kind == "decode"
    assert rows[-1].longest > rows[-1].context / rows[-1].batch
