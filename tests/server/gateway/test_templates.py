"""Chat templates that are applied here."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs kvyard[tokenizers]")
pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")

import tokenizers

from kvyard import openai
from kvyard.errors import KvyardError
from kvyard.hashing import PLAIN
from kvyard.index import Identity
from kvyard.server.gateway.prompting import Prompting, read_body
from kvyard.server.gateway.reading import PromptReader
from kvyard.server.gateway.templates import ChatTemplate, TemplateFailed
from kvyard.server.indexer.names import LocalNames
from kvyard.server.tokens import FileTokenizer

IDENTITY = Identity(4, LocalNames())
TEXT = (
    "{{ bos_token }}{%- for message in messages %}\n{% if message.role == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{%- endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
HELLO = [{"role": "user", "content": "Is 12 more than ten, or é?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a byte-level tokenizer and a template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cache of the model is the model's"] * 50, trainer)
    path = tmp_path_factory.mktemp("model")
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template": TEXT}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_templates_are_given_what_engines_give_them() -> None:
    made = ChatTemplate({"default": TEXT}, {"bos_token": "<s>"})
    assert made.render(HELLO, None, True, {}) == (
        "<s><|im_start|>user\nIs 12 more than ten, or é?<|im_end|><|im_start|>assistant\n"
    ), "as transformers 5.19 writes it"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb<|im_end|>" in made.render(parts, None, False, {})
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rom"}'}}
    called = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    found = made.render(called, [{"é": 1}], False, {"enable_thinking": False})
    assert "Rom" in found and '[{"é": 1}]' in found and found.endswith("<think></think>")
    for bad in ([{"role": "bad", "content": ""}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(TemplateFailed):
            made.render(bad, None, True, {})
    by_parts = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": by_parts}, {}).render(HELLO, None, True, {}).startswith("[Is 12")
    with pytest.raises(KvyardError, match="can't be read"):
        ChatTemplate({"default": "{% for %}"}, {})


def test_the_template_of_a_model_folder(tmp_path: Path) -> None:
    assert ChatTemplate.of(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    made = ChatTemplate.of(tmp_path)
    assert made is not None and made.render([], None, True, {}) == "plain" and made.render([], [1], True, {}) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    made = ChatTemplate.of(tmp_path)
    assert made is not None and made.render([], None, True, {}) == "file"
    config.write_text("{")
    with pytest.raises(KvyardError, match="tokenizer_config"):
        ChatTemplate.of(tmp_path)


def read(reader: PromptReader, **body: Any) -> tuple[list[int], int]:
    async def scenario() -> tuple[list[int], int]:
        asked = read_body(openai.CHAT, json.dumps(body).encode())
        found = await reader.read(asked, PLAIN, lambda _: False)
        await asyncio.gather(*reader._checking)
        return list(found.keys), found.tokens

    return asyncio.run(scenario())


def test_engines_are_asked_now_and_then_and_always_where_they_differ(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = FileTokenizer(str(folder / "tokenizer.json"))
    template = ChatTemplate.of(folder)
    assert template is not None
    asked: list[dict[str, Any]] = []
    differs = False

    async def engine(body: dict[str, Any]) -> list[int] | None:
        asked.append(body)
        text = template.render(HELLO, None, True, {})
        return [*tokenizer.encode(text, False), *([5] if differs else [])]

    reader = PromptReader(Prompting(str(folder), engine), IDENTITY, 1 << 20)
    expected = tokenizer.encode(template.render(HELLO, None, True, {}), False)
    for _ in range(20):
        assert read(reader, messages=HELLO) == (IDENTITY.keys(expected), len(expected))
    assert len(asked) == 4 and reader.differed == 0, "the first ones, and then one in many"
    # What the folder doesn't say is the engine's to say.
    read(reader, messages=HELLO, chat_template="other")
    read(reader, messages=HELLO, continue_final_message=True)
    assert len(asked) == 6
    differs = True
    reader = PromptReader(Prompting(str(folder), engine), IDENTITY, 1 << 20)
    with caplog.at_level(logging.WARNING):
        read(reader, messages=HELLO)
    assert "engines are asked from now on" in caplog.text and reader.differed == 1
    asked.clear()
    assert read(reader, messages=HELLO)[1] == len(expected) + 1 and len(asked) == 1


def test_text_needs_no_engine(folder: Path) -> None:
    async def nobody(body: dict[str, Any]) -> list[int] | None:
        raise AssertionError("no engine is asked")

    prompting = Prompting(str(folder), nobody)
    found = asyncio.run(prompting.prompts(read_body(openai.COMPLETIONS, b'{"prompt":"the cache"}')))
    assert found == [FileTokenizer(str(folder / "tokenizer.json")).encode("the cache")]
    with pytest.raises(KvyardError, match="no tokenizer at"):
        Prompting(str(folder.parent), nobody)
