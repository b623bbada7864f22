"""Ids of prompts of which only lengths are known: what is kept is shared, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.formats.growing import MOST_TOKENS, GrowingPrompts


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 300), st.integers(-5, 400), st.sampled_from([None, "x", "y"])),
        max_size=40,
    )
)
def test_prompts_share_what_they_keep(turns: list[tuple[int, int, int, str | None]]) -> None:
    """A model that holds every prompt as a list of tokens, each new one unlike all others."""
    size = 16
    prompts = GrowingPrompts(size)
    before: dict[int, list[int]] = {}
    commons: dict[str, list[int]] = {}
    fresh = iter(range(10**9))
    seen: list[tuple[list[int], list[int]]] = []
    for session, length, kept, common in turns:
        whole = min(max(0, kept), length) // size * size
        if session in before:
            front = before[session][:whole]
        elif common is not None:
            pool = commons.setdefault(common, [])
            pool.extend(next(fresh) for _ in range(whole - len(pool)))
            front = pool[:whole]
        else:
            front = []
        tokens = front + [next(fresh) for _ in range(length - len(front))]
        before[session] = tokens[: length // size * size]
        ids = list(prompts.ids(session, length, kept, common=common))
        assert len(ids) == -(-length // size)
        for other, other_ids in seen:
            for end in range(1, min(len(ids), len(other_ids)) + 1):
                same = tokens[: end * size] == other[: end * size] and end * size <= min(len(tokens), len(other))
                assert (ids[end - 1] == other_ids[end - 1]) == same
        seen.append((tokens, ids))


def test_a_session_of_long_prompts_costs_runs_and_not_blocks() -> None:
    prompts = GrowingPrompts()
    for turn in range(50):
        prompts.ids("a", 9_000_000 + turn * 64, 9_000_000 + turn * 64)
        prompts.ids(None, 64_000)
    (context,) = prompts._contexts.values()
    assert len(context.runs) <= 50


def test_prompts_that_are_too_long_are_refused() -> None:
    with pytest.raises(BadRow, match="at most 10000000"):
        GrowingPrompts().ids("a", MOST_TOKENS + 1)
