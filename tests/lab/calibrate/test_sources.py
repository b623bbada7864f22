"""What a measured run shows of passes, and what it leaves open."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.lab.calibrate.test_windows import answered

from kvyard.lab.calibrate.sources import EVEN, run_passes
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun


def notes(*requests: MeasuredRequest, budget: int | None = 100, **settings: Any) -> tuple[str, ...]:
    run = MeasuredRun(name="r", format="f", requests=list(requests), settings=settings, notes=["first"])
    return run_passes(run, "r", budget).notes


def test_what_is_not_known_is_said() -> None:
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
