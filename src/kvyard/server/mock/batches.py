"""Several prompts in one request: conversations of ``/v1/chat/completions/batch``, and texts of ``/v1/embeddings``."""

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from kvyard.openai import BatchChatRequest, ChatRequest, CompletionRequest, EmbeddingRequest
from kvyard.server.mock.choice import MockChoice
from kvyard.server.mock.intake import MockIntake, Taken, refuse
from kvyard.server.mock.shapes import ChatShape, ReplyShape
from kvyard.server.tokens import Tokenizer

WIDTH = 64
"""Numbers of an embedding by default."""
WIDEST = 4096


def take_batch(intake: MockIntake, body: BatchChatRequest, headers: Mapping[str, str]) -> Taken:
    """Return conversations that are answered by themselves, one choice each. Raises ``Refusal``."""
    if body.n is not None and body.n != 1:
        raise refuse("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n")
    fields = {
        name: getattr(body, name)
        for name in ChatRequest.__struct_fields__
        if name in BatchChatRequest.__struct_fields__
    }
    # vLLM answers in one piece, whatever is asked, and passes over tools.
    fields |= {"stream": None, "stream_options": None, "tools": None, "tool_choice": None}
    takens = [intake.chat(ChatRequest(**{**fields, "messages": messages}), headers) for messages in body.messages]
    most = intake.worker.config.max_choices
    if len(takens) > most:
        raise refuse(f"{len(takens)} choices are more than the {most} that one request may have")
    longest = max(taken.wish.max_tokens for taken in takens)
    wish = msgspec.structs.replace(takens[0].wish, max_tokens=longest)
    return msgspec.structs.replace(takens[0], prompts=[taken.prompts[0] for taken in takens], wish=wish)


class BatchShape(ChatShape):
    """``/v1/chat/completions/batch``."""

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        body = super().whole(choices)
        body["usage"]["prompt_tokens_details"] = None
        body["prompt_token_ids"] = None
        return body


def take_texts(intake: MockIntake, body: EmbeddingRequest, headers: Mapping[str, str]) -> Taken:
    """Return texts of which each is computed like a prompt. Raises ``Refusal``."""
    if body.dimensions is not None and not 1 <= body.dimensions <= WIDEST:
        raise refuse(f"dimensions must be from 1 to {WIDEST}, got {body.dimensions}.", "dimensions")
    hidden = CompletionRequest(model=body.model, prompt=body.input, max_tokens=1, cache_salt=body.cache_salt)
    return intake.completion(hidden, headers)


class EmbeddingShape(ReplyShape):
    """``/v1/embeddings``: numbers that are the same for the same text, and mean nothing."""

    prefix, object = "embd", "list"

    def __init__(self, taken: Taken, name: str, tokenizer: Tokenizer, asked: EmbeddingRequest) -> None:
        super().__init__(taken, name, tokenizer)
        self._asked = asked

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        reply = self._head(self.object)
        reply["data"] = [
            {"index": index, "object": "embedding", "embedding": self._numbers(prompt)}
            for index, prompt in enumerate(self.taken.prompts)
        ]
        asked = sum(map(len, self.taken.prompts))
        reply["usage"] = {
            "prompt_tokens": asked,
            "total_tokens": asked,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
        return reply

    def _numbers(self, prompt: Sequence[int]) -> list[float] | str:
        """Return a vector of length 1."""
        key, width = repr(list(prompt)).encode(), self._asked.dimensions or WIDTH
        drawn = [xxhash.xxh3_64_intdigest(key, index) / 2**63 - 1 for index in range(width)]
        length = sum(number * number for number in drawn) ** 0.5
        numbers = [number / length for number in drawn]
        return (
            numbers
            if self._asked.encoding_format == "float"
            else b64encode(struct.pack(f"<{width}f", *numbers)).decode()
        )
