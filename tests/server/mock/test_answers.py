"""Answers: steady, as long as asked, cut at stop strings, and JSON where a schema asks for it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvyard.server.mock.answers import AnswerWish, compose, json_text
from kvyard.server.tokens import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()


def answer(tokenizer: Tokenizer = BYTES, prompt: tuple[int, ...] = (1, 2, 3), name: str = "", **wish: Any) -> Any:
    return compose(prompt, AnswerWish(**{"max_tokens": 500, **wish}), tokenizer, mean=64, seed=0, name=name)


def text_of(made: Any) -> str:
    return "".join(made.next_piece() for _ in made.ids)


def test_answers_are_steady_and_as_long_as_asked() -> None:
    one, again, other = answer(), answer(), answer(name="x")
    assert list(one.ids) == list(again.ids) != list(other.ids)
    assert one.finish == "stop" and len(one.ids) < 500
    lengths = [len(answer(name=str(n), max_tokens=100_000).ids) for n in range(300)]
    assert 50 < sum(lengths) / 300 < 80 and len(set(lengths)) > 50
    cut = answer(max_tokens=5)
    assert len(cut.ids) == 5 and cut.finish == "length" and list(cut.ids) == list(one.ids[:5])
    assert len(answer(ignore_eos=True).ids) == 500 and answer(ignore_eos=True).finish == "length"
    assert len(answer(min_tokens=400).ids) >= 400
    assert list(answer(prompt=(1 << 33, 2)).ids)  # an id that is too large for four bytes


@given(at=st.integers(0, 60), length=st.integers(1, 8))
def test_a_stop_string_is_never_shown(at: int, length: int) -> None:
    full = text_of(answer(ignore_eos=True, max_tokens=80))
    word = full[at : at + length]
    made = answer(ignore_eos=True, max_tokens=80, stop=(word,))
    assert text_of(made) == full[: full.index(word)] and made.finish == "stop" and made.ended_by == word
    assert len(made.ids) == full.index(word) + length


@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "properties", "items", "enum", "anyOf", "$ref", "const", "minItems", "minimum"]
                )
                | st.text(max_size=3),
                inner | st.sampled_from(["object", "array", "string", "integer", "#/properties/a", "#"]),
                max_size=4,
            )
        ),
        max_leaves=15,
    )
)
def test_any_schema_gives_json(schema: object) -> None:
    json.loads(json_text(schema, Random(0)))


def test_a_schema_that_refers_to_itself_comes_to_an_end() -> None:
    assert json.loads(json_text({"$ref": "#/a", "a": {"$ref": "#/a"}}, Random(0))) is None
    made = json.loads(json_text({"$ref": "#/a", "a": {"const": 5}}, Random(0)))
    assert made == 5
