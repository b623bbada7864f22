"""Prompts as people have them, text or token ids, made into token ids. Needs ``kvyard[tokenizers]`` for text only.

The tokenizer is a ``tokenizer.json``. Chat templates are not applied: what an engine caches is the text *after* its template,
so that is what has to be asked for.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvyard.errors import KvyardError

MAX_TOKEN = (1 << 32) - 1


@lru_cache(maxsize=16)
def tokenizer(path: str) -> Any:
    """The tokenizer in the file ``path``. Raises ``KvyardError`` where it can't be had."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise KvyardError("text needs a tokenizer: pip install 'kvyard[tokenizers]', or give token ids") from None
    if not Path(path).is_file():
        raise KvyardError(f"there is no tokenizer at {path}: give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise KvyardError(f"{path} is no tokenizer.json: {str(error)[:200]}") from None


def encode(path: str, text: str, special: bool = True) -> list[int]:
    """``text`` as token ids; ``special``: with what the tokenizer adds by itself, such as a first token."""
    ids: list[int] = tokenizer(path).encode(text, add_special_tokens=special).ids
    return ids


def parse_tokens(text: str, where: str) -> list[int]:
    """Token ids written as a JSON list, or with commas or spaces between. Raises ``KvyardError``, naming ``where``."""
    try:
        if text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            found = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise KvyardError(f"{where} has no token ids: write numbers with commas or spaces, or a JSON list") from None
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in found):
        raise KvyardError(f"{where} has something that is no token id: they are whole numbers from 0 to {MAX_TOKEN}")
    return list(found)


def gather(
    *,
    tokens: str | None = None,
    tokens_file: Path | None = None,
    text: str | None = None,
    text_file: Path | None = None,
    tokenizer_file: Path | None = None,
    special: bool = True,
) -> list[int]:
    """The prompt that was given in one of four ways. Raises ``KvyardError`` for none, several, or one that can't be read."""
    given = [way for way in (tokens, tokens_file, text, text_file) if way is not None]
    if len(given) != 1:
        raise KvyardError("give the prompt in one way: --tokens, --tokens-file, --text or --text-file")
    if tokens is not None:
        return parse_tokens(tokens, "--tokens")
    if tokens_file is not None:
        return parse_tokens(_read(tokens_file), str(tokens_file))
    if tokenizer_file is None:
        raise KvyardError("text needs --tokenizer, the path of the model's tokenizer.json; or give token ids")
    return encode(str(tokenizer_file), text if text is not None else _read(text_file), special)


def _read(path: Path | None) -> str:
    assert path is not None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise KvyardError(f"can't read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
