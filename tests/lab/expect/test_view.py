"""The sentence that an expectation ends with where no cause is large."""

from __future__ import annotations

import pytest

from kvyard.lab.expect.expectation import Expectation, Granularity, Step
from kvyard.lab.expect.view import verdict


@pytest.mark.parametrize(
    ("shared", "lost", "said"),
    [
        (0, (), "No prompt begins as an earlier one does, or the trace doesn't say what prompts consist of."),
        (100, (0, 0), "Nothing takes hits away."),
        (100, (5, 20), "Nothing takes a large part of the hits; the largest, step 1, takes 20% of what is shared."),
    ],
)
def test_no_large_cause(shared: int, lost: tuple[int, ...], said: str) -> None:
    steps = [Step(cause="pool", title=f"step {at}", lost=tokens, left=0) for at, tokens in enumerate(lost)]
    expectation = Expectation(
        traffic="t",
        requests=1,
        rejected=0,
        prompt_tokens=1000,
        shared=shared,
        owed=0,
        owed_device=0,
        owed_loaded=0,
        granularity=Granularity(block_size=16, smallest=None, groups=[], drafts=False),
        steps=steps,
    )
    assert verdict(expectation) == said
