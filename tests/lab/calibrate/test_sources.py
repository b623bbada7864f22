"""Passes in a measured run, and what it leaves open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from benchmarks.h200_engine import DATA
from tests.lab.calibrate.test_windows import answered

from kvyard.errors import KvyardError
from kvyard.lab.calibrate.held_out import held_out_begins, replay_held_out
from kvyard.lab.calibrate.sources import EVEN, read_source, run_passes
from kvyard.lab.calibrate.windows import out_of_step
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun


def notes(*requests: MeasuredRequest, budget: int | None = 100, **settings: Any) -> tuple[str, ...]:
    run = MeasuredRun(name="r", format="f", requests=list(requests), settings=settings, notes=["first"])
    return run_passes(run, "r", budget).notes


def test_unknown_figures_are_reported() -> None:
    whole = answered(0, 10, [20, 30, 40, 50, 60], cached=0)
    assert notes(whole) == ("first",)
    # Half of the times between its tokens are enough, less aren't; an answer of one token has none.
    half = msgspec.structs.replace(whole, gaps=(whole.gaps or [])[:2])
    assert notes(half, answered(70, 10, [80], cached=0)) == ("first",)
    assert notes(msgspec.structs.replace(whole, gaps=(whole.gaps or [])[:1])) == ("first", EVEN)
    (_, cached) = notes(msgspec.structs.replace(whole, cached=None))
    assert cached.startswith("What was cached of prompts")
    (_, budget) = notes(whole, budget=None)
    assert budget.startswith("How long prompts were cut")
    assert notes(whole, budget=None, max_num_batched_tokens=8) == ("first",)


def test_a_run_of_several_ranks_is_refused() -> None:
    whole = answered(0, 10, [20, 30, 40, 50, 60], cached=0)
    with pytest.raises(KvyardError, match=r"r is a run of 2 data-parallel ranks.*calibrate from a run of one rank"):
        notes(whole, data_parallel_size=2)
    assert notes(whole, data_parallel_size=1) == ("first",)


def decoding(steps: list[int], jitter: int = 0) -> list[MeasuredRequest]:
    """Thirty requests, one after the other, on engines whose passes take ``steps``: each decodes 100 tokens."""
    made = []
    for number in range(30):
        step = steps[number % len(steps)]
        first = (number * 50 // step + 1) * step
        times = [first + at * step + (at * 7 % (jitter + 1)) for at in range(100)]
        made.append(answered(number * 50, 10, times, cached=0))
    return made


def test_answers_that_are_out_of_step_are_of_several_engines() -> None:
    assert out_of_step(decoding([10])) is None
    assert out_of_step(decoding([10], jitter=6)) is None
    apart = out_of_step(decoding([10, 13]))
    assert apart is not None and apart > 0.2
    with pytest.raises(KvyardError, match="several engines or ranks, or of speculative decoding"):
        notes(*decoding([10, 13]))
    ends_alone = [msgspec.structs.replace(one, gaps=None) for one in decoding([10, 13])]
    assert out_of_step(ends_alone) is None


@pytest.mark.parametrize("run", ["A", "B"])
def test_the_error_stated_is_that_of_held_out_time_replayed(run: str) -> None:
    source = read_source(DATA / f"run{run}.json.xz")
    assert source.early is not None and source.run is not None
    assert 0 < len(source.early.rows) < len(source.measurements.rows)
    found = replay_held_out([source], {"async_scheduling": False})
    assert found is not None and found.requests == 100
    assert list(found.errors) == ["ttft", "tpot", "e2e"]
    assert abs(found.errors["tpot"]) < 0.05 and abs(found.errors["ttft"]) < 0.05
    # An engine that decides ahead makes prompts wait a pass longer: the error says that this one doesn't.
    ahead = replay_held_out([source], {"async_scheduling": True})
    assert ahead is not None and ahead.errors["ttft"] > found.errors["ttft"] + 0.005


def test_passes_alone_have_no_held_out_time() -> None:
    source = read_source(DATA / "sweep.jsonl")
    assert source.run is None and replay_held_out([source], {}) is None


def test_few_requests_have_no_held_out_time() -> None:
    assert held_out_begins(decoding([10])[:20]) is None
    requests = decoding([10])
    begins = held_out_begins(requests)
    assert begins is not None and sum(one.ended > begins for one in requests) == 10
