"""From a body to the token ids of its prompt, as the engine will see them: by a tokenizer here, or by asking an engine.

Only which model and which prompt are read of a body; all else is the engine's business. A field of another type than expected
isn't refused here: the engine says what is wrong with it, in its own words. Ids are needed for guesses only: a request whose
prompt can't be read is routed by load, and the engine gets it all the same.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import CHAT, COMPLETIONS
from kvyard.server.gateway.config import BYTES, ENGINE
from kvyard.server.gateway.templates import ChatTemplate, TemplateFailed
from kvyard.server.http import Refusal
from kvyard.server.tokens import Tokenizer, make_tokenizer, render
from kvyard.server.weight import LARGE, too_heavy

_NOT_TEXT = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"audio_url"', b'"image_embeds"')
"""Parts whose tokens don't identify them: engines distinguish their blocks by hashes that we don't have."""
_NULL = msgspec.Raw(b"null")
_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_tools = msgspec.json.Decoder(list[Any] | None).decode
LONG_TEXT = 20_000
"""Characters from which on a tokenizer works in a thread of its own, so that streams go on meanwhile."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
"""Of their own: lookups of names and beats to Redis mustn't wait behind a long text."""

AskEngine = Callable[[dict[str, Any]], Awaitable[list[int] | None]]
"""Sends a body to /tokenize of some engine of the pool; ``None`` where none answered."""


class PeekedBody(msgspec.Struct, kw_only=True):
    """A request that names a model."""

    model: str | None = None


class PeekedPrompt(PeekedBody, kw_only=True):
    """Fields that decide about a prompt, beside its text."""

    stream: bool | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    max_tokens: int | None = None
    priority: Any = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    user: Any = None

    @property
    def reads_cache(self) -> bool:
        """Return true if the engine uses its cache: one that returns prompt log probabilities computes all of it."""
        return self.prompt_logprobs is None


class PeekedCompletion(PeekedPrompt, kw_only=True):
    """``POST /v1/completions``; further fields go to the engine as they are."""

    prompt: msgspec.Raw = _NULL
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def reads_cache(self) -> bool:
        return self.prompt_logprobs is None and not (self.echo and self.logprobs is not None)


class PeekedChat(PeekedPrompt, kw_only=True):
    """``POST /v1/chat/completions``; further fields go to the engine as they are."""

    messages: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    chat_template: msgspec.Raw = _NULL
    chat_template_kwargs: msgspec.Raw = _NULL
    documents: msgspec.Raw = _NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None


class PeekedResponses(PeekedPrompt, kw_only=True):
    """``POST /v1/responses``; further fields go to the engine as they are."""

    input: msgspec.Raw = _NULL
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: msgspec.Raw = _NULL

    async def as_chat(self) -> PeekedChat | None:
        """Return the conversation that it is, where all of it is here and is text."""
        if self.previous_response_id is not None or self.tools != _NULL:
            return None
        given = await _decoded(self.input)
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat = await _chat(self, first, items, ("input_text", "output_text", "text"))
        if chat is not None:
            chat.add_special_tokens = True  # vLLM adds them here, and in no other conversation
        return chat


class PeekedContinuation(PeekedBody, kw_only=True):
    """``POST /v1/responses`` where its prompt doesn't matter."""

    previous_response_id: str | None = None


class PeekedMessages(PeekedPrompt, kw_only=True):
    """``POST /v1/messages``; further fields go to the engine as they are."""

    messages: msgspec.Raw = _NULL
    system: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL

    async def as_chat(self) -> PeekedChat | None:
        """Return the conversation that it is, where all of it is text."""
        if self.tools != _NULL:
            return None
        system = await _decoded(self.system)
        first = [] if system is None else [{"role": "system", "content": system}]
        return await _chat(self, first, await _decoded(self.messages), ("text",))


async def _decoded(raw: msgspec.Raw) -> Any:
    """Return the value of a field; other tasks have their turn after a long one."""
    value = msgspec.json.decode(raw)
    if len(memoryview(raw)) >= LARGE:
        await pause()
    return value


async def _chat(
    ask: PeekedPrompt, first: list[dict[str, Any]], items: Any, kinds: tuple[str, ...]
) -> PeekedChat | None:
    """Return ``items`` after ``first`` as a conversation; ``None`` if a part isn't one of ``kinds``, a tuple, since a client
    may send unhashable values.
    """
    messages_read: list[dict[str, Any]] = []
    for item in [*first, *items] if isinstance(items, list) else [None]:
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            return None
        content = item.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") in kinds]
            if len(parts) < len(content) or not all(isinstance(part.get("text"), str) for part in parts):
                return None
            content = "\n".join(part["text"] for part in parts)
        if not isinstance(content, str):
            return None
        messages_read.append({"role": item["role"], "content": content})
    messages = msgspec.json.encode(messages_read)
    if len(messages) >= LARGE:
        await pause()
    return PeekedChat(model=ask.model, cache_salt=ask.cache_salt, messages=msgspec.Raw(messages))


_TEMPLATE = (
    *("tools", "chat_template", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Further inputs of a chat template."""
_KINDS: dict[str, type[PeekedBody]] = {
    COMPLETIONS: PeekedCompletion,
    CHAT: PeekedChat,
    "/v1/responses": PeekedResponses,
    "/v1/messages": PeekedMessages,
}
_DECODERS = {path: msgspec.json.Decoder(kind) for path, kind in _KINDS.items()}
_PLAIN = msgspec.json.Decoder(PeekedBody)
_BRIEF = {"/v1/responses": msgspec.json.Decoder(PeekedContinuation)}


def read_body(path: str, body: bytes, prompts: bool = True) -> PeekedBody:
    """Read what ``body`` asks for; with ``prompts`` also its prompt. If some fields are of the wrong type, the model's name
    alone is read.

    Raises ``Refusal`` for a body that isn't a JSON object or has no name of a model.
    """
    decoders: Mapping[str, msgspec.json.Decoder[Any]] = _DECODERS if prompts else _BRIEF
    for decoder in (decoders.get(path, _PLAIN), _PLAIN):
        try:
            peeked: PeekedBody = decoder.decode(body)
            return peeked
        except msgspec.ValidationError as error:
            mismatch = str(error)
        except (ValueError, *DECODE_ERRORS) as error:
            raise not_json(error) from None
    text = mismatch.partition(" - at ")[0]
    field = "model" if "$.model" in mismatch else ""
    raise Refusal(400, f"{field or 'the body'}: {text}", field=field, fix="send a JSON object")


def not_json(error: Exception) -> Refusal:
    """Return the refusal of a body that can't be read."""
    return Refusal(400, f"the body is not JSON: {str(error)[:200]}", fix="send a JSON object in UTF-8")


def template_variables(ask: PeekedChat) -> dict[str, Any]:
    """Return the variables of a chat template beside the conversation, as vLLM puts them together: /tokenize has no other
    way to pass them. Raises ``MsgspecError`` if they are no object.
    """
    variables = msgspec.json.decode(ask.chat_template_kwargs, type=dict[str, Any] | None) or {}
    if ask.documents != _NULL:
        variables["documents"] = ask.documents
    if ask.reasoning_effort is not None:
        variables.setdefault("enable_thinking", ask.reasoning_effort != "none")
        variables["reasoning_effort"] = ask.reasoning_effort
    return variables


def truncated(prompts: list[Sequence[int]], most: int, side: str | None) -> list[Sequence[int]] | None:
    """Return the rest of prompts of which the engine takes ``most`` tokens, the last ones unless ``side`` is right;
    ``None`` if that depends on the engine's limit.
    """
    if most < 0:
        return None
    return [prompt[:most] if side == "right" else prompt[max(0, len(prompt) - most) :] for prompt in prompts]


class RawPrompt(msgspec.Struct, frozen=True):
    """A single prompt before it is made into tokens: a text, or ids as JSON."""

    text: str | None = None
    special: bool = False
    """True if the tokenizer's special tokens are added."""
    ids: bytes | None = None


_RAW = ("prompt", "messages", "system", "input", "tools", "documents", "chat_template", "chat_template_kwargs")
"""Fields whose values are built where a prompt is read."""


def _is_flat(raw: bytes) -> bool:
    return raw[:1] == b"[" and raw[1:2].isdigit() and raw.find(b"[", 1) < 0


class Prompting:
    """Token ids for one pool."""

    def __init__(self, how: str, ask_engine: AskEngine) -> None:
        """``how`` is a tokenizer of ``config``. Raises ``KvyardError`` where a file can't be used."""
        self.how = how
        self.unread = 0
        """Prompts that couldn't be read."""
        self._ask = ask_engine
        folder = Path(how) if how not in (ENGINE, BYTES) and Path(how).is_dir() else None
        file = None if how == BYTES else how if folder is None else str(folder / "tokenizer.json")
        self.local: Tokenizer | None = None if how == ENGINE else make_tokenizer(file)
        """Tokenizer in this process."""
        self.template = None if folder is None else ChatTemplate.of(folder)
        """Chat template in this process; ``None``: engines are asked."""

    async def heavy(self, ask: PeekedBody) -> bool:
        """Return true if a prompt has more values than may be read at once; it isn't read then."""
        for name in _RAW:
            raw = getattr(ask, name, None)
            if isinstance(raw, msgspec.Raw) and len(memoryview(raw)) >= LARGE and await too_heavy(bytes(raw)):
                return True
        return False

    async def source(self, ask: PeekedBody) -> RawPrompt | None:
        """Return the one prompt of a request, if it can be read here; ``None`` where ``prompts`` has to be asked."""
        if isinstance(ask, PeekedResponses | PeekedMessages):
            chat = await ask.as_chat()
            if chat is None:
                return None
            ask = chat
        if not isinstance(ask, PeekedPrompt) or ask.truncate_prompt_tokens is not None:
            return None
        if isinstance(ask, PeekedChat):
            text = self._rendered(ask) if self.how == BYTES else self._by_template(ask)
            if text is not None and len(text) >= LARGE:
                await pause()
            return None if text is None else RawPrompt(text, self.how != BYTES and bool(ask.add_special_tokens))
        if not isinstance(ask, PeekedCompletion):
            return None
        raw = bytes(ask.prompt)
        if raw[:1] == b'"' and self.local is not None:
            return RawPrompt(await _decoded(ask.prompt), ask.add_special_tokens is not False)
        return RawPrompt(ids=raw) if _is_flat(raw) else None

    def flat(self, ask: PeekedBody) -> bool:
        """True if the prompt is one list of numbers, which is read piece by piece however long it is."""
        return isinstance(ask, PeekedCompletion) and ask.truncate_prompt_tokens is None and _is_flat(bytes(ask.prompt))

    async def prompts(self, ask: PeekedBody) -> list[Sequence[int]]:
        """Return the prompts of a request, or none if they can't be read. Of further ones only the length is right, and of
        text not even that.
        """
        ids_of: list[Sequence[int]] | None = None
        if isinstance(ask, PeekedResponses | PeekedMessages):
            chat = await ask.as_chat()
            if chat is None:
                self.unread += 1
                return []
            ask = chat
        if isinstance(ask, PeekedCompletion):
            ids_of = await self._of_completion(ask)
        elif isinstance(ask, PeekedChat):
            ids = await self._of_chat(ask)
            ids_of = None if ids is None else [ids]
        else:
            return []
        if ids_of is not None and ask.truncate_prompt_tokens is not None:
            ids_of = truncated(ids_of, ask.truncate_prompt_tokens, ask.truncation_side)
        if ids_of is None:
            self.unread += 1
            return []
        return ids_of

    async def _of_completion(self, ask: PeekedCompletion) -> list[Sequence[int]] | None:
        given = await _decoded(ask.prompt)
        if isinstance(given, str):
            ids = await self._of_text(given, ask)
            return None if ids is None else [ids]
        if not isinstance(given, list) or not given:
            return None
        if type(given[0]) is int:
            return [given]
        if not all(isinstance(item, list | str) for item in given):
            return None
        first, *others = given
        ids = first if isinstance(first, list) else await self._of_text(first, ask)
        if ids is None:
            return None
        # The first decides where they go. How long other texts are is only guessed: asking for each would take as many hops.
        share = len(ids) / len(first) if first and isinstance(first, str) else 0.25
        return [ids, *(other if isinstance(other, list) else range(int(len(other) * share)) for other in others)]

    async def _of_text(self, text: str, ask: PeekedCompletion) -> list[int] | None:
        special = ask.add_special_tokens is not False
        if self.local is not None:
            return await self._encode(text, special)
        return await self._ask({"model": ask.model, "prompt": text, "add_special_tokens": special})

    async def _of_chat(self, ask: PeekedChat) -> list[int] | None:
        if self.how != BYTES:
            raw = bytes(ask.messages)
            if any(mark in raw for mark in _NOT_TEXT):
                return None
            body: dict[str, Any] = {"model": ask.model, "messages": ask.messages}
            body |= {name: value for name in _TEMPLATE if (value := getattr(ask, name)) not in (None, _NULL)}
            try:
                if variables := template_variables(ask):
                    body["chat_template_kwargs"] = variables
            except DECODE_ERRORS:
                return None  # the engine will refuse it
            return await self._ask(body)
        text = self._rendered(ask)
        return None if text is None else await self._encode(text, False)

    def _by_template(self, ask: PeekedChat) -> str | None:
        """Return a conversation by the model's own template; ``None`` where an engine has to be asked."""
        if self.template is None or ask.chat_template != _NULL or ask.continue_final_message:
            return None
        try:
            messages = _messages(ask.messages)
            tools = None if ask.tools == _NULL else _tools(ask.tools)
            more = template_variables(ask)
            if ask.documents != _NULL:
                more["documents"] = msgspec.json.decode(ask.documents)
            return self.template.render(messages, tools, ask.add_generation_prompt is not False, more)
        except (TemplateFailed, *DECODE_ERRORS):
            return None

    async def by_engine(self, ask: PeekedBody) -> list[int] | None:
        """Return the ids of a conversation as an engine makes them; ``None`` for what is none, or where no engine answered."""
        return await self._of_chat(ask) if isinstance(ask, PeekedChat) else None

    def _rendered(self, ask: PeekedChat) -> str | None:
        """Return a conversation as the mock writes it; ``None`` if that can't be done."""
        try:
            messages = _messages(ask.messages)
            tools = None if ask.tools == _NULL else _tools(ask.tools)
            return render(messages, tools, ask.add_generation_prompt is not False, bool(ask.continue_final_message))
        except (Refusal, LookupError, TypeError, AssertionError, *DECODE_ERRORS):
            return None

    async def _encode(self, text: str, special: bool) -> list[int] | None:
        assert self.local is not None
        if self.how == BYTES or len(text) < LONG_TEXT:
            return self.local.encode(text, special)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, self.local.encode, text, special)
