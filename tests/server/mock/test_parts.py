"""Tokenizers, answers and settings by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.mock.support import ENGINE, Served

from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.server.mock.answers import AnswerWish, compose, json_text
from kvyard.server.mock.config import MockConfig
from kvyard.server.tokens import ByteTokenizer, FileTokenizer, Tokenizer, make_tokenizer, render

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real tokenizer: byte-level BPE, trained here."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the people and the words of the world are here"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@given(text=st.text(max_size=60))
def test_bytes_come_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text == "".join(BYTES.pieces(ids))


@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_pieces_are_the_text_of_any_ids(ids: list[int]) -> None:
    assert "".join(BYTES.pieces(ids)) == BYTES.decode(ids)


def test_a_tokenizer_file(file: Path) -> None:
    made = FileTokenizer(str(file))
    for text in ("the people are here", "naïve 日本語 🙂🙂 the end", "", "🙂"):
        ids = made.encode(text)
        assert made.decode(ids) == text == "".join(made.pieces(ids))
    assert isinstance(make_tokenizer(None), ByteTokenizer)
    with pytest.raises(KvyardError, match="no tokenizer"):
        make_tokenizer("/nowhere/tokenizer.json")


def test_a_tokenizer_file_over_http(file: Path) -> None:
    pytest.importorskip("starlette", reason="needs kvyard[server]")
    with Served(tokenizer=str(file)) as served:
        made = FileTokenizer(str(file))
        found = served.post("/tokenize", prompt="the people", return_token_strs=True)
        assert found["tokens"] == made.encode("the people") and found["count"] < 10
        assert "".join(found["token_strs"]) == "the people"
        assert served.post("/detokenize", tokens=found["tokens"]) == {"prompt": "the people"}
        messages = [{"role": "user", "content": "hi"}]
        ids = served.post("/tokenize", messages=messages)["tokens"]
        reply = served.post("/v1/chat/completions", messages=messages, max_tokens=30, return_token_ids=True)
        assert reply["prompt_token_ids"] == ids and reply["usage"]["completion_tokens"] <= 30
        (choice,) = reply["choices"]
        assert choice["message"]["content"] == made.decode(choice["token_ids"])
        text = served.post("/v1/chat/completions", messages=messages, max_tokens=30, stream=True)
        deltas = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(one["choices"][0]["delta"]["content"] for one in deltas) == choice["message"]["content"]
        served.post("/tokenize", 400)
        served.post("/tokenize", 400, prompt="x", messages=messages)
        served.post("/detokenize", 400, tokens=[-1])
        served.post("/detokenize", 404, tokens=[1], model="other")


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


def test_a_conversation_grows_at_its_end() -> None:
    """Or no turn would ever hit the one before it."""
    first = [{"role": "user", "content": "Hi"}]
    said = render(first) + "Hello" + "<|im_end|>\n"
    after = [
        *first,
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
    ]
    assert render(after).startswith(said)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"workers": 0}, "workers"),
        ({"speed": 0}, "speed"),
        ({"replay_endpoint": "tcp://*:5558"}, "events endpoint"),
        ({"events_endpoint": "ipc:///tmp/x", "dp_size": 2}, "rank 1"),
        ({"events_endpoint": "nonsense"}, "not an endpoint"),
        ({"events_endpoint": "tcp://*:65534", "workers": 3}, "port"),
        ({"events_endpoint": "tcp://h:1", "events_connect": True, "workers": 2}, "{worker}"),
        ({"tool_call_rate": 2}, "tool_call_rate"),
    ],
)
def test_what_no_fleet_can_be(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(KvyardError, match=words):
        MockConfig(engine=EngineConfig(**ENGINE), **given_).check()


def test_workers_and_ranks_have_ports_of_their_own() -> None:
    config = MockConfig(engine=EngineConfig(**ENGINE), workers=3, dp_size=2, events_endpoint="tcp://*:5557")
    assert [config.endpoint_of("tcp://*:5557", worker) for worker in range(3)] == [
        "tcp://*:5557",
        "tcp://*:5559",
        "tcp://*:5561",
    ]
    assert config.endpoint_of("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
