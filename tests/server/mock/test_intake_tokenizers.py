"""Tokenizers by themselves, and over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.mock.support import Served

from kvyard.errors import KvyardError
from kvyard.server.tokens import ByteTokenizer, FileTokenizer, make_tokenizer, render

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
    pytest.importorskip("httptools", reason="needs kvyard[server]")
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
