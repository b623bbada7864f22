"""Text for prompts of which only ids are known: about one common word per token, the same words for the same id.

The words are short, frequent and written with a space before, which byte-pair tokenizers trained on English keep as one token
each. How many tokens they are in the end is up to the tokenizer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

_COMMON = """
    the and for are but not you all any can her was one our out day get has him his how man new now old see two way who
    boy did its let put say she too use time year work back call came come each even find from give good hand have here
    high home into just know last life line long look
"""
WORDS = tuple(_COMMON.split())
MASK = len(WORDS) - 1
CACHED = 4096
"""Blocks of text that are remembered."""


class Words:
    """Text by id."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[object, int], str] = OrderedDict()

    def block(self, name: object, tokens: int) -> str:
        """``tokens`` words for what is named ``name``, each with a space before it."""
        key = (name, tokens)
        text = self._texts.get(key)
        if text is None:
            noise = hashlib.shake_128(repr(name).encode()).digest(tokens)
            text = "".join([" " + WORDS[byte & MASK] for byte in noise])
            self._texts[key] = text
            if len(self._texts) > CACHED:
                self._texts.popitem(last=False)
        else:
            self._texts.move_to_end(key)
        return text

    def prompt(self, ids: Sequence[int], block_size: int, tokens: int) -> str:
        """The text of a prompt."""
        whole, rest = divmod(tokens, block_size)
        parts = [self.block(ids[i], block_size) for i in range(whole)]
        if rest:
            parts.append(self.block(ids[whole], rest))
        return "".join(parts).lstrip()
