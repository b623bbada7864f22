"""What the gateway reads of a request: which model, which prompt. All else is the engine's business and passes by unread.

A field of another type than expected isn't refused here: the engine says what is wrong with it, in its own words.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvyard.openai import CHAT, COMPLETIONS
from kvyard.server.http import Refusal


def _null() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class PeekedBody(msgspec.Struct, kw_only=True):
    """A request that names a model."""

    model: str | None = None


class PeekedCompletion(PeekedBody, kw_only=True):
    """``POST /v1/completions``; further fields go to the engine as they are."""

    prompt: Any = None
    stream: bool | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    max_tokens: int | None = None


class PeekedChat(PeekedBody, kw_only=True):
    """``POST /v1/chat/completions``; further fields go to the engine as they are."""

    messages: msgspec.Raw = msgspec.field(default_factory=_null)
    stream: bool | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=_null)
    chat_template: msgspec.Raw = msgspec.field(default_factory=_null)
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=_null)
    documents: msgspec.Raw = msgspec.field(default_factory=_null)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_KINDS: dict[str, type[PeekedBody]] = {COMPLETIONS: PeekedCompletion, CHAT: PeekedChat}
_DECODERS = {path: msgspec.json.Decoder(kind) for path, kind in _KINDS.items()}
_PLAIN = msgspec.json.Decoder(PeekedBody)


def read(path: str, body: bytes) -> PeekedBody:
    """What ``body`` asks for. Where only some fields are of the wrong type, the model's name alone is read.

    Raises ``Refusal`` for what isn't a JSON object or has no name of a model.
    """
    for decoder in (_DECODERS.get(path, _PLAIN), _PLAIN):
        try:
            found: PeekedBody = decoder.decode(body)
            return found
        except msgspec.ValidationError as error:
            mismatch = str(error)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
            raise Refusal(400, f"the body is not JSON: {str(error)[:200]}", fix="send a JSON object in UTF-8") from None
    text = mismatch.partition(" - at ")[0]
    field = "model" if "$.model" in mismatch else ""
    raise Refusal(400, f"{field or 'the body'}: {text}", field=field, fix="send a JSON object")
