"""From a request to the token ids of its prompt, as the engine will see them: by a tokenizer here, or by asking an engine.

Only guesses depend on it: a prompt that can't be read is routed by load, and the engine gets it all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kvyard.server.gateway.asking import PeekedBody, PeekedChat, PeekedCompletion
from kvyard.server.gateway.config import BYTES, ENGINE
from kvyard.server.http import Refusal
from kvyard.server.tokens import Tokenizer, make_tokenizer, render

LONG_TEXT = 20_000
"""Characters from which on a tokenizer works in a thread of its own, so that streams go on meanwhile."""
_NOT_TEXT = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"audio_url"', b'"image_embeds"')
"""Parts whose tokens don't say what they are: engines set such blocks apart by hashes that we don't have."""
_NULL = b"null"
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
"""Of their own: lookups of names and beats to Redis mustn't wait behind somebody's book."""

AskEngine = Callable[[dict[str, Any]], Awaitable[list[int] | None]]
"""Sends a body to /tokenize of some engine of the pool; ``None`` where nobody answered."""


class Prompting:
    """Token ids for one pool."""

    def __init__(self, how: str, ask_engine: AskEngine) -> None:
        """``how`` is a tokenizer of ``config``. Raises ``KvyardError`` where a file can't be used."""
        self.how = how
        self.unread = 0
        """Prompts that nobody could read."""
        self._ask = ask_engine
        self._local: Tokenizer | None = None if how == ENGINE else make_tokenizer(None if how == BYTES else how)

    async def prompts(self, ask: PeekedBody) -> list[Sequence[int]]:
        """The prompts of a request, or none where they can't be read. Of further ones only the length is right, and of text not
        even that.
        """
        found: list[Sequence[int]] | None = None
        if isinstance(ask, PeekedCompletion):
            found = await self._of_completion(ask)
        elif isinstance(ask, PeekedChat):
            ids = await self._of_chat(ask)
            found = None if ids is None else [ids]
        else:
            return []
        if found is None:
            self.unread += 1
            return []
        return found

    async def _of_completion(self, ask: PeekedCompletion) -> list[Sequence[int]] | None:
        given = ask.prompt
        if isinstance(given, str):
            ids = await self._of_text(given, ask)
            return None if ids is None else [ids]
        if not isinstance(given, list) or not given:
            return None
        if type(given[0]) is int:
            return [given]
        if not all(isinstance(one, list | str) for one in given):
            return None
        first, *others = given
        ids = first if isinstance(first, list) else await self._of_text(first, ask)
        if ids is None:
            return None
        # The first decides where they go. How long other texts are is only guessed: asking for each would take as many hops.
        share = len(ids) / len(first) if first and isinstance(first, str) else 0.25
        return [ids, *(one if isinstance(one, list) else range(int(len(one) * share)) for one in others)]

    async def _of_text(self, text: str, ask: PeekedCompletion) -> list[int] | None:
        special = ask.add_special_tokens is not False
        if self._local is not None:
            return await self._encode(text, special)
        return await self._ask({"model": ask.model, "prompt": text, "add_special_tokens": special})

    async def _of_chat(self, ask: PeekedChat) -> list[int] | None:
        raw = bytes(ask.messages)
        if any(mark in raw for mark in _NOT_TEXT):
            return None
        if self.how != BYTES:
            body = {"model": ask.model, "messages": ask.messages}
            for name in ("tools", "chat_template", "chat_template_kwargs", "documents"):
                if bytes(getattr(ask, name)) != _NULL:
                    body[name] = getattr(ask, name)
            for name in ("add_generation_prompt", "continue_final_message"):
                if getattr(ask, name) is not None:
                    body[name] = getattr(ask, name)
            return await self._ask(body)
        try:
            messages = msgspec.json.decode(raw, type=list[dict[str, Any]])
            tools = msgspec.json.decode(ask.tools, type=list[Any] | None)
            text = render(messages, tools, ask.add_generation_prompt is not False)
        except (Refusal, msgspec.MsgspecError, LookupError, TypeError, AssertionError):
            return None
        return await self._encode(text, False)

    async def _encode(self, text: str, special: bool) -> list[int] | None:
        assert self._local is not None
        if self.how == BYTES or len(text) < LONG_TEXT:
            return self._local.encode(text, special)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, self._local.encode, text, special)
