"""Tokenizers of mock and gateway: a given ``tokenizer.json``, or bytes. And text that grows token by token.

Neither applies a model's own chat template: ``render`` is one for all, in the way of ChatML.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvyard.server import prompt as prompts
from kvyard.server.http import Refusal


class Tokenizer(Protocol):
    """Text to ids and back."""

    size: int
    """Ids that stand for something are below this."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of ``text``; ``special``: with what the tokenizer adds by itself."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""

    def word(self, token: int) -> str:
        """What one id stands for by itself."""

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """Per id what it adds to the text; empty where a character isn't whole yet. Joined they are the text."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token. Ids from 256 on, which prompts of ids may have, are written as ``<|token_300|>``."""

    size = 256

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(_bytes, ids)).decode("utf-8", "replace")

    def word(self, token: int) -> str:
        return _bytes(token).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        for at, token in enumerate(ids):
            yield decoder.decode(_bytes(token), final=at == last)


def _bytes(token: int) -> bytes:
    return bytes((token,)) if 0 <= token < 256 else f"<|token_{token}|>".encode()


class FileTokenizer:
    """One of Hugging Face's fast tokenizers."""

    def __init__(self, path: str) -> None:
        """Raises ``KvyardError`` where it can't be had."""
        self._inner = prompts.tokenizer(path)
        self.size = int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([token for token in ids if token < 1 << 32])
        return text

    def word(self, token: int) -> str:
        return self.decode([token]) if 0 <= token < self.size else ""

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        # What a token adds depends on those before it. So a few are decoded again each time, from where text last was whole.
        start = read = 0
        last = len(ids) - 1
        for at in range(len(ids)):
            before, now = self.decode(ids[start:read]), self.decode(ids[start : at + 1])
            if at == last or (len(now) > len(before) and not now.endswith("�")):
                yield now[len(before) :]
                start, read = read, at + 1
            else:
                yield ""


def make_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer in ``path``, or bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, ask: bool = True) -> str:
    """A conversation as one text; ``ask``: with the beginning of the answer. Raises ``Refusal`` for what isn't text."""
    parts: list[str] = []
    if tools:
        import msgspec

        parts.append(f"<|im_start|>tools\n{msgspec.json.encode(tools).decode()}<|im_end|>\n")
    for at, message in enumerate(messages):
        text = _text(message.get("content"), at)
        calls = message.get("tool_calls")
        if calls:
            import msgspec

            text += msgspec.json.encode(calls).decode()
        parts.append(f"<|im_start|>{message['role']}\n{text}<|im_end|>\n")
    if ask:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _text(content: object, at: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    texts: list[str] = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            field = f"messages[{at}].content[{number}]"
            raise Refusal(400, f"{field}: this model takes parts of type text only", field=field, fix="leave it out")
        texts.append(part["text"])
    return "\n".join(texts)
