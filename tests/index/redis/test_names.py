"""Names on a server that are made of models' names."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvyard.index.redis.names import TAKEN, joined

names = st.text(st.sampled_from(":%a/é\x00 "), min_size=1, max_size=4) | st.sampled_from(sorted(TAKEN)) | st.text()


def test_usual_names_stay_as_they_are() -> None:
    assert joined("Qwen/Qwen3-32B", "default") == "Qwen/Qwen3-32B:default"


@given(st.lists(names, min_size=1, max_size=3), st.lists(names, min_size=1, max_size=3))
def test_no_two_lists_make_one_name(one: list[str], two: list[str]) -> None:
    assert (joined(*one) == joined(*two)) is (one == two)


def test_no_model_has_the_name_of_a_key_beside_it() -> None:
    """Such as those of epochs that are void, and of gateways that share their load."""
    parts = ["a", "default", *TAKEN, "a:void", "share1:a"]
    made = {joined(*two) for two in itertools.product(parts, repeat=2)}
    made |= {joined(*three) for three in itertools.product(parts, repeat=3)}
    shared = {f"share1:{name}" for name in made}
    beside = {f"{name}:{suffix}" for name in made | shared for suffix in TAKEN}
    assert not made & beside and not made & shared and not shared & beside
