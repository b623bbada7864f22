"""Where prompts have passes of their own, who decodes waits for them; the gaps between tokens must tell."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.driving import Row, drive, trace_job
from tests.replay.support import record_of

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.replay.gaps import Gaps
from kvyard.replay.jobs import FleetJob
from kvyard.replay.recorder import Recorder
from kvyard.replay.seen import Seen


@pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])
def test_gaps_add_up_to_the_time_between_first_and_last_token(backend):
    rows = [Row(at * 23_000_000, 300 + 100 * at, 20 + at, (at, 100 + at, 200 + at, 300 + at)) for at in range(12)]
    records = {
        f"r{at}": record_of(f"r{at}", row.arrival, tokens=row.length, wanted=row.output) for at, row in enumerate(rows)
    }
    recorder = Recorder(0, Seen(), Gaps(), 64)
    core = make_core(EngineConfig(backend=backend, block_size=64), watcher=recorder)
    drive(core, rows, make_job=lambda at, row, size: FleetJob(records[f"r{at}"], trace_job(at, row, size).chain))
    assert not core.scheduler.jobs.preemptions
    durations, counts = recorder.gaps.columns()
    assert counts.sum() == sum(row.output - 1 for row in rows)
    between = sum(record.ended - record.first_token for record in records.values())
    # Gaps are kept to the microsecond.
    assert float(np.dot(durations, counts)) == pytest.approx(between, abs=500 * int(counts.sum()))
