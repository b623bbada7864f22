"""Tokens of prompts: tokenizers (a ``tokenizer.json``, or bytes), text that grows token by token, ids as people write them.

No model's own chat template is applied: ``render`` is one for all, in the way of ChatML. Text needs ``kvyard[tokenizers]``.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvyard.errors import KvyardError
from kvyard.server.http import Refusal

MAX_TOKEN = (1 << 32) - 1


class Tokenizer(Protocol):
    """Text to ids and back."""

    size: int
    """Ids that stand for something are below this."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of ``text``; ``special``: with what the tokenizer adds by itself."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""

    def word(self, token: int) -> str:
        """Return the text of one id by itself."""

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """Return per id what it adds to the text; empty where a character isn't whole yet. Joined they are the text."""


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
        for index, token in enumerate(ids):
            yield decoder.decode(_bytes(token), final=index == last)


def _bytes(token: int) -> bytes:
    return bytes((token,)) if 0 <= token < 256 else f"<|token_{token}|>".encode()


class FileTokenizer:
    """One of Hugging Face's fast tokenizers."""

    def __init__(self, path: str) -> None:
        """Raises ``KvyardError`` if it can't be had."""
        self._inner = load_tokenizer(path)
        self.size = int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def described(self) -> dict[str, Any]:
        """The content of its file."""
        description: dict[str, Any] = json.loads(self._inner.to_str())
        return description

    def splits(self, text: str, position: int) -> bool:
        """Return true if the tokenizer's word splitting ends a word at ``position``."""
        rule = self._inner.pre_tokenizer
        return rule is not None and any(stop == position for _, (_, stop) in rule.pre_tokenize_str(text))

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
        for index in range(len(ids)):
            before, now = self.decode(ids[start:read]), self.decode(ids[start : index + 1])
            if index == last or (len(now) > len(before) and not now.endswith("�")):
                yield now[len(before) :]
                start, read = read, index + 1
            else:
                yield ""


def make_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer in ``path``, or bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, ask: bool = True, go_on: bool = False
) -> str:
    """Return a conversation as one text; ``ask``: with the beginning of the answer; ``go_on``: so that the last message goes
    on. Raises ``Refusal`` for what isn't text.
    """
    parts: list[str] = []
    if tools:
        parts.append(f"<|im_start|>tools\n{msgspec.json.encode(tools).decode()}<|im_end|>\n")
    for number, message in enumerate(messages):
        text = _text(message.get("content"), number)
        calls = message.get("tool_calls")
        if calls:
            text += msgspec.json.encode(calls).decode()
        role = "system" if message["role"] == "developer" else message["role"]  # as vLLM takes it
        parts += (f"<|im_start|>{role}\n", text, "<|im_end|>\n")  # not as one: a long text is copied once, by the join
    if go_on:
        return "".join(parts).removesuffix("<|im_end|>\n")
    if ask:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    texts: list[str] = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            field = f"messages[{index}].content[{number}]"
            raise Refusal(400, f"{field}: this model takes parts of type text only", fix="leave it out")
        texts.append(part["text"])
    return "\n".join(texts)


@lru_cache(maxsize=16)
def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in the file ``path``. Raises ``KvyardError`` if it can't be had."""
    try:
        import tokenizers
    except ImportError:
        raise KvyardError("text needs a tokenizer: pip install 'kvyard[tokenizers]', or give token ids") from None
    if not Path(path).is_file():
        raise KvyardError(f"there is no tokenizer at {path}: give the path of a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise KvyardError(f"{path} is no tokenizer.json: {str(error)[:200]}") from None


def parse_tokens(text: str, where: str) -> list[int]:
    """Return token ids written as a JSON list, or with commas or spaces between. Raises ``KvyardError``, naming ``where``."""
    try:
        if text.lstrip().startswith("["):
            ids = json.loads(text)
        else:
            ids = [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        raise KvyardError(f"{where} has no token ids: write numbers with commas or spaces, or a JSON list") from None
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in ids):
        raise KvyardError(f"{where} has something that is no token id: they are whole numbers from 0 to {MAX_TOKEN}")
    return list(ids)


def gather_prompt(
    *,
    tokens: str | None = None,
    tokens_file: Path | None = None,
    text: str | None = None,
    text_file: Path | None = None,
    tokenizer_file: Path | None = None,
    special: bool = True,
) -> list[int]:
    """Return the prompt that was given in one of four ways. Raises ``KvyardError`` for none, several, or one that can't be
    read.
    """
    given = [way for way in (tokens, tokens_file, text, text_file) if way is not None]
    if len(given) != 1:
        raise KvyardError("give the prompt in one way: --tokens, --tokens-file, --text or --text-file")
    if tokens is not None:
        return parse_tokens(tokens, "--tokens")
    if tokens_file is not None:
        return parse_tokens(_read(tokens_file), str(tokens_file))
    if tokenizer_file is None:
        raise KvyardError("text needs --tokenizer, the path of the model's tokenizer.json; or give token ids")
    return FileTokenizer(str(tokenizer_file)).encode(text if text is not None else _read(text_file), special)


def _read(path: Path | None) -> str:
    assert path is not None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise KvyardError(f"can't read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
