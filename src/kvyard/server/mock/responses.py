"""OpenAI's responses: a request as the conversation that it is, its answer whole and in events, and those that are kept.

Text alone: tools, images and work in the background are refused, in one sentence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from kvyard.openai import ChatMessage, ChatRequest, HintFields, Json, ResponsesRequest
from kvyard.server.mock.choice import MockChoice
from kvyard.server.mock.intake import MockIntake, Taken, refuse
from kvyard.server.mock.shapes import ReplyShape
from kvyard.server.tokens import Tokenizer

MOST = 1024
"""Responses that a worker keeps, the last ones."""
_TEXT = ("input_text", "output_text", "text")


class KeptResponse(msgspec.Struct):
    """A response, and the conversation up to and with it."""

    value: dict[str, Any]
    messages: list[ChatMessage]


class ResponseStore(msgspec.Struct, eq=False):
    """The responses of one worker, by id. Others don't know them, as with vLLM."""

    _kept: dict[str, KeptResponse] = {}

    def keep(self, id_: str, kept: KeptResponse) -> None:
        self._kept.pop(id_, None)
        self._kept[id_] = kept
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]

    def find(self, id_: str) -> KeptResponse | None:
        return self._kept.get(id_)


class TakenResponse(msgspec.Struct):
    """A request for a response that was understood."""

    asked: ResponsesRequest
    messages: list[ChatMessage]
    taken: Taken


def take(
    intake: MockIntake, body: ResponsesRequest, before: Sequence[ChatMessage], headers: Mapping[str, str]
) -> TakenResponse:
    """Return ``body`` as a conversation that goes on from ``before``. Raises ``Refusal``."""
    if body.background:
        if body.store is False:
            raise refuse("background can only be used when `store` is true", "background")
        raise refuse("this mock does nothing in the background: leave background out", "background")
    if body.tools:
        raise refuse("this mock answers with text here: leave tools out, or ask /v1/chat/completions", "tools")
    items: list[Json] = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    conversation = [*before, *(_message(item, index) for index, item in enumerate(items))]
    first = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    hints = {name: getattr(body, name) for name in HintFields.__struct_fields__}
    chat = ChatRequest(
        **hints,
        model=body.model,
        messages=[*first, *conversation],
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        cache_salt=body.cache_salt,
        add_special_tokens=True,  # unlike in a chat, as vLLM has it
    )
    return TakenResponse(body, conversation, intake.chat(chat, headers))


def _message(item: Json, index: int) -> ChatMessage:
    role, content = item.get("role"), item.get("content")
    if item.get("type", "message") != "message" or not isinstance(role, str):
        raise refuse("this mock takes messages only", f"input[{index}]")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") in _TEXT]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise refuse("this mock takes text only", f"input[{index}].content")
        content = "\n".join(str(text) for text in texts)
    if not isinstance(content, str):
        raise refuse("Input should be a valid string", f"input[{index}].content", 422)
    return ChatMessage(role=role, content=content)


class ResponseShape(ReplyShape):
    """``/v1/responses``."""

    prefix, end, named = "resp", b"", True

    def __init__(self, response: TakenResponse, name: str, tokenizer: Tokenizer, store: ResponseStore) -> None:
        super().__init__(response.taken, name, tokenizer)
        given = response.asked.request_id
        self.id = given if given is not None else f"resp_{name}"
        self._found = response
        self._store = store
        self._item = f"msg_{xxhash.xxh3_64_hexdigest(self.id.encode())}"
        self._text = ""
        self._number = 0

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        self._text = "".join(self._take(choices[0])[1])
        return self._ended(choices)

    def opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", [], None, None))

    def more(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        (choice,) = choices
        if choice.refused or choice.produced == self._shown[0]:
            return
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        if not self._shown[0]:
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", item=item, output_index=0)
            yield self._part_event("response.content_part.added", part=part)
        delta = "".join(self._take(choice)[1])
        self._text += delta
        yield self._part_event("response.output_text.delta", delta=delta, logprobs=[])

    def last(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        yield self._part_event("response.output_text.done", text=self._text, logprobs=[])
        yield self._part_event("response.content_part.done", part=self._part())
        item = self._message("completed", [self._part()])
        yield self._event("response.output_item.done", item=item, output_index=0)
        yield self._event("response.completed", response=self._ended(choices))

    def _ended(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        """Return the whole response, which is kept if it may be."""
        full = choices[0].answer.finish == "length"
        cached = self._cached(choices, 0)
        asked, given, size = len(self.taken.prompts[0]), choices[0].produced, self.taken.block_size
        usage = {
            "input_tokens": asked,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": max(0, asked // size * size - cached),
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": given,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": asked + given,
        }
        why = {"reason": "max_output_tokens"} if full else None
        output = [self._message("completed", [self._part()])]
        value = self._response("incomplete" if full else "completed", output, why, usage)
        if self._found.asked.store is not False:
            answer = ChatMessage(role="assistant", content=self._text)
            self._store.keep(self.id, KeptResponse(value, [*self._found.messages, answer]))
        return value

    def _response(self, status: str, output: list[Any], why: Any, usage: Any) -> dict[str, Any]:
        asked = self._found.asked
        return {
            "id": self.id,
            "created_at": self._created,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "metadata": asked.metadata,
            "model": self.taken.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "background": False,
            "max_output_tokens": self.taken.wish.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": asked.previous_response_id,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": asked.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        message = {"id": self._item, "content": content, "role": "assistant", "status": status, "type": "message"}
        return {**message, "phase": None}

    def _part(self) -> dict[str, Any]:
        return {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, content_index=0, item_id=self._item, output_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {**more, "sequence_number": self._number - 1, "type": kind}
