"""Anthropic's messages, as vLLM serves them: a request as the conversation that it is, its answer whole and in events.

Text alone: tools and images are refused, in one sentence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvyard.openai import ChatMessage, ChatRequest, HintFields, Json
from kvyard.server.http import Refusal, openai_error
from kvyard.server.mock.choice import MockChoice
from kvyard.server.mock.intake import MockIntake, Taken, refuse
from kvyard.server.mock.shapes import ReplyShape


class MessageTurn(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class CountTokens(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[MessageTurn]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None


class MessagesRequest(HintFields, kw_only=True):
    """``POST /v1/messages``."""

    model: str
    messages: list[MessageTurn]
    max_tokens: int
    system: str | list[Json] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Json] | None = None
    cache_salt: str | None = None
    metadata: Json | None = None


class TokenCount(msgspec.Struct, kw_only=True):
    """Number of tokens in a conversation."""

    input_tokens: int
    context_management: dict[str, int]


def conversation(body: MessagesRequest | CountTokens) -> list[ChatMessage]:
    """Return the turns of ``body``. Raises ``Refusal`` for what isn't text."""
    if body.tools:
        raise refuse("this mock answers with text here: leave tools out, or ask /v1/chat/completions", "tools")
    first = [] if body.system is None else [ChatMessage(role="system", content=_text(body.system, "system"))]
    return first + [
        ChatMessage(role=message.role, content=_text(message.content, f"messages[{index}].content"))
        for index, message in enumerate(body.messages)
    ]


def _text(content: str | list[Json], field: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(part, str) for part in texts):
        raise refuse("this mock takes text only", field)
    return "\n".join(str(part) for part in texts)


def take(intake: MockIntake, body: MessagesRequest, headers: Mapping[str, str]) -> Taken:
    """Return ``body`` as a chat. Raises ``Refusal``."""
    if body.max_tokens < 1:
        raise refuse("Value error, max_tokens must be positive", "max_tokens", 422)
    if not body.model:
        raise refuse("Value error, Model is required", "model", 422)
    hints = {name: getattr(body, name) for name in HintFields.__struct_fields__}
    chat = ChatRequest(
        **hints,
        model=body.model,
        messages=conversation(body),
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        cache_salt=body.cache_salt,
    )
    return intake.chat(chat, headers)


def as_anthropic(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    """Return status and body of a refusal. vLLM words those of bodies with the wrong types as it does everywhere."""
    status, problem = openai_error(refusal)
    return status, {"type": "error", "error": {"type": problem.error.type, "message": problem.error.message}}


class MessagesShape(ReplyShape):
    """``/v1/messages``."""

    prefix, end, named = "chatcmpl", b"", True

    def error(self, refusal: Refusal) -> tuple[int, Any]:
        return as_anthropic(refusal)

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        text = "".join(self._take(choices[0])[1])
        message = self._message([{"type": "text", "text": text}])
        message |= {name: value for name, value in self._reason(choices[0]).items() if value is not None}
        return {**message, "usage": self._took(choices)}

    def more(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        (choice,) = choices
        if choice.refused or choice.produced == self._shown[0]:
            return
        if not self._shown[0]:
            usage = {"input_tokens": len(self.taken.prompts[0]), "output_tokens": 0}
            begun = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": begun}
            yield {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        text = "".join(self._take(choice)[1])
        yield {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}, "index": 0}

    def last(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": self._reason(choices[0]), "usage": self._took(choices)}
        yield {"type": "message_stop"}

    def _message(self, content: list[Any]) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "content": content}
        return {**message, "model": self.taken.model}

    def _reason(self, choice: MockChoice) -> dict[str, Any]:
        answer = choice.answer
        if answer.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        by = answer.ended_by if isinstance(answer.ended_by, str) else None
        return {"stop_reason": "end_turn" if by is None else "stop_sequence", "stop_sequence": by}

    def _took(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        """Anthropic's tokens of a prompt are those that neither were in the cache nor are now."""
        asked, size = len(self.taken.prompts[0]), self.taken.block_size
        cached = self._cached(choices, 0)
        created = max(0, asked // size * size - cached)
        return {
            "input_tokens": asked - created - cached,
            "output_tokens": choices[0].produced,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }
