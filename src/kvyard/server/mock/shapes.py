"""The JSON of replies: chat and plain completions, whole and in chunks, with usage, log probabilities and tool calls.

A shape remembers of each choice how much of it was shown. It reads choices and changes nothing else.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from kvyard import __version__
from kvyard.clock import SECOND, WallClock
from kvyard.server.http import Refusal, openai_error
from kvyard.server.mock.choice import MockChoice
from kvyard.server.mock.intake import Taken
from kvyard.server.tokens import Tokenizer

_encode = msgspec.json.Encoder().encode
FINGERPRINT = f"kvyard-{__version__}"
_UNUSED = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
"""Fields of vLLM's answers that are null here, and there by default."""
_UNUSED_IN_CHAT = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
_UNUSED_IN_MESSAGES = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


class ReplyShape:
    """Common ground of both kinds."""

    prefix = object = chunk_object = ""
    end = b"data: [DONE]\n\n"
    """End of a stream."""
    named = False
    """True if chunks of a stream have an ``event:`` line with their type."""

    def __init__(self, taken: Taken, name: str, tokenizer: Tokenizer) -> None:
        """The reply to ``taken``, whose id ends in ``name``."""
        self.taken = taken
        self.tokenizer = tokenizer
        self.id = f"{self.prefix}-{name}"
        self._created = WallClock.since_epoch().now() // SECOND
        count = len(taken.prompts) * taken.n
        self._shown = [0] * count
        self._told = [False] * count
        """True for choices whose last chunk was sent."""
        self._length = [0] * count
        """Characters shown."""

    def frame(self, value: dict[str, Any]) -> bytes:
        """Return a chunk as it is written."""
        name = b"event: %b\n" % value["type"].encode() if self.named else b""
        return b"%bdata: %b\n\n" % (name, _encode(value))

    def error(self, refusal: Refusal) -> tuple[int, Any]:
        """Return status and body of a refusal by the engine."""
        return openai_error(refusal)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Return chunks before the first token."""
        return iter(())

    # -- whole ----------------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        """Return the reply in one piece."""
        reply = self._head(self.object)
        reply["choices"] = [self._choice(choice) for choice in choices]
        reply["system_fingerprint"] = FINGERPRINT
        reply["usage"] = self._usage(choices, -1)
        reply["usage"]["completion_tokens_details"] = None
        reply["usage"]["prompt_tokens_details"] |= {
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        } | self._created_cache(choices)
        return reply | _UNUSED | {"kv_transfer_params": choices[0].kept}

    def _choice(self, choice: MockChoice) -> dict[str, Any]:
        raise NotImplementedError

    # -- chunks ---------------------------------------------------------------------------------------------------------

    def more(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        """Yield chunks of what is new."""
        for choice in choices:
            index = choice.index
            over = choice.ended >= 0
            if self._told[index] or (choice.produced == self._shown[index] and not over):
                continue
            if choice.refused:
                self._told[index] = True
                continue
            for chunk in self._chunks(choice, over):
                message = self._head(self.chunk_object)
                message["choices"] = [chunk]
                if self.taken.usage_always:
                    message["usage"] = self._running_usage(choices)
                elif chunk["finish_reason"] is not None and not self.taken.include_usage:
                    message["system_fingerprint"] = FINGERPRINT
                if "delta" in chunk and "role" in chunk["delta"]:
                    message |= {
                        "prompt_text": None,
                        "prompt_token_ids": self.taken.prompts[0] if self.taken.token_ids else None,
                    }
                yield message
            self._told[index] = over

    def last(self, choices: Sequence[MockChoice]) -> Iterator[dict[str, Any]]:
        """Yield what follows the last chunk of the last choice."""
        if self.taken.include_usage:
            chunk = self._head(self.chunk_object)
            chunk["choices"] = []
            chunk["system_fingerprint"] = FINGERPRINT
            chunk["usage"] = self._usage(choices, 0)
            chunk["usage"]["prompt_tokens_details"] |= self._created_cache(choices)
            yield chunk

    def _chunks(self, choice: MockChoice, over: bool) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    # -- parts ----------------------------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.taken.model}

    def _usage(self, choices: Sequence[MockChoice], prompt: int) -> dict[str, Any]:
        """Return the request's usage. With several prompts vLLM reports the cached tokens of one, whose number is
        ``prompt``."""
        usage = self._running_usage(choices)
        usage.pop("completion_tokens_details", None)
        return usage | {"prompt_tokens_details": {"cached_tokens": self._cached(choices, prompt)}}

    def _running_usage(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        """Return the usage so far."""
        asked = sum(map(len, self.taken.prompts))
        given = sum(choice.produced for choice in choices)
        return {"prompt_tokens": asked, "total_tokens": asked + given, "completion_tokens": given}

    def _cached(self, choices: Sequence[MockChoice], prompt: int) -> int:
        first = range(0, len(choices), self.taken.n)[prompt]
        return choices[first].flow.cached_tokens([first])

    def _created_cache(self, choices: Sequence[MockChoice]) -> dict[str, int]:
        """Return tokens that are in the cache because of this request, if it is reported."""
        return {}

    def _take(self, choice: MockChoice) -> tuple[list[int], list[str]]:
        """Return the ids that weren't shown yet, and the text of each."""
        start, stop = self._shown[choice.index], choice.produced
        self._shown[choice.index] = stop
        answer = choice.answer
        return list(answer.ids[start:stop]), [answer.next_piece() for _ in range(start, stop)]

    def _ending(self, choice: MockChoice, over: bool) -> dict[str, Any]:
        """Return why a choice ended, if it has."""
        answer = choice.answer
        if not over:
            return {"finish_reason": None, "stop_reason": None}
        called = answer.tool is not None and answer.finish == "stop" and not self.taken.named_tool
        return {"finish_reason": "tool_calls" if called else answer.finish, "stop_reason": answer.ended_by}

    def _likelihoods(self, token: int, index: int) -> tuple[float, list[tuple[int, float]]]:
        """Return a log probability for ``token``, and for the most likely ones in its place, itself first. Made
        up, but steady.
        """
        draw = xxhash.xxh3_64_intdigest(f"{token} {index}".encode()) / 2**64
        own = -0.01 - draw * draw
        size = self.tokenizer.size
        others = [((token + 7 * step) % size, own - 0.5 * step) for step in range(1, self.taken.logprobs or 0)]
        return own, [(token, own), *others] if self.taken.logprobs else []


class TextShape(ReplyShape):
    """``/v1/completions``."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _choice(self, choice: MockChoice) -> dict[str, Any]:
        return {**next(self._chunks(choice, True)), "prompt_logprobs": None, "routed_experts": None}

    def _chunks(self, choice: MockChoice, over: bool) -> Iterator[dict[str, Any]]:
        taken = self.taken
        index = choice.index
        prompt = taken.prompts[index // taken.n]
        first = self._shown[index] == 0
        start = self._shown[index]
        ids, texts = self._take(choice)
        head: list[int] = list(prompt) if taken.echo and first else []
        heads = list(self.tokenizer.pieces(head)) if head else []
        choice_chunk: dict[str, Any] = {"index": index, "text": "".join(heads) + "".join(texts), "logprobs": None}
        if taken.logprobs is not None:
            choice_chunk["logprobs"] = self._logprobs(index, head, heads, ids, texts, start)
        choice_chunk |= self._ending(choice, over)
        choice_chunk["token_ids"] = ids if taken.token_ids else None
        shows = first and (taken.token_ids or (taken.echo and taken.stream))
        choice_chunk["prompt_token_ids"] = list(prompt) if shows else None
        yield choice_chunk

    def _logprobs(
        self,
        choice: int,
        head: Sequence[int],
        heads: Sequence[str],
        ids: Sequence[int],
        texts: Sequence[str],
        start: int,
    ) -> dict[str, Any]:
        word = self.tokenizer.word
        tokens: list[str] = []
        likely: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for number, (token, text) in enumerate(zip((*head, *ids), (*heads, *texts), strict=False)):
            own, top = self._likelihoods(token, start + number)
            first = bool(head) and number == 0
            tokens.append(word(token))
            likely.append(None if first else own)
            tops.append(None if first else {word(token): value for token, value in reversed(top)})
            offsets.append(self._length[choice])
            self._length[choice] += len(text)
        return {"text_offset": offsets, "token_logprobs": likely, "tokens": tokens, "top_logprobs": tops}


class ChatShape(ReplyShape):
    """``/v1/chat/completions``."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, choice: MockChoice) -> dict[str, Any]:
        ids, texts = self._take(choice)
        text = "".join(texts)
        message: dict[str, Any] = {"role": self.taken.role, "content": text, **_UNUSED_IN_MESSAGES}
        if choice.answer.tool is not None:
            message["content"] = None
            message["tool_calls"] = [self._call(choice, text)]
        reply: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._content(ids, 0),
            **self._ending(choice, True),
            "token_ids": ids if self.taken.token_ids else None,
            "routed_experts": None,
        }
        return reply

    def whole(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        body = super().whole(choices) | _UNUSED_IN_CHAT
        if self.taken.token_ids:
            body["prompt_token_ids"] = list(self.taken.prompts[0])
        return body

    def _chunks(self, choice: MockChoice, over: bool) -> Iterator[dict[str, Any]]:
        start = self._shown[choice.index]
        if not start:
            yield self._chunk(choice, {"role": self.taken.role, "content": ""})
        ids, texts = self._take(choice)
        text = "".join(texts)
        delta: dict[str, Any] = {"content": text}
        if choice.answer.tool is not None:
            delta = {
                "tool_calls": [self._call(choice, text) if not start else {"index": 0, "function": {"arguments": text}}]
            }
        chunk = self._chunk(choice, delta)
        chunk |= {"logprobs": self._content(ids, start), "token_ids": ids if self.taken.token_ids else None}
        if over:
            chunk |= self._ending(choice, over)
        yield chunk

    def _running_usage(self, choices: Sequence[MockChoice]) -> dict[str, Any]:
        return super()._running_usage(choices) | {"completion_tokens_details": None}

    def _created_cache(self, choices: Sequence[MockChoice]) -> dict[str, int]:
        size = self.taken.block_size
        return {"created_cache_tokens": max(0, len(self.taken.prompts[0]) // size * size - self._cached(choices, 0))}

    def _chunk(self, choice: MockChoice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _call(self, choice: MockChoice, arguments: str) -> dict[str, Any]:
        number = xxhash.xxh3_64_hexdigest(f"{self.id} {choice.index}".encode())
        return {
            "id": f"chatcmpl-tool-{number}",
            "type": "function",
            "index": 0,
            "function": {"name": choice.answer.tool, "arguments": arguments},
        }

    def _content(self, ids: Sequence[int], start: int) -> dict[str, Any] | None:
        if self.taken.logprobs is None:
            return None
        content = []
        for number, token in enumerate(ids):
            own, top = self._likelihoods(token, start + number)
            content.append({**self._one(token, own), "top_logprobs": [self._one(*likely) for likely in top]})
        return {"content": content}

    def _one(self, token: int, likely: float) -> dict[str, Any]:
        text = self.tokenizer.word(token)
        return {"token": text, "logprob": likely, "bytes": list(text.encode("utf-8", "replace"))}
