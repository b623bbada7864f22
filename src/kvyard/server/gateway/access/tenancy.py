"""Tenancy: what a key's request may name and share, checked and written in its body."""

from collections.abc import Iterator
from posixpath import normpath
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import CHAT, COMPLETIONS
from kvyard.server.gateway.access.keys import AccessKey, not_for_key
from kvyard.server.http import Refusal

SALTED = frozenset(
    {
        *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"),
        *("/v1/embeddings", "/v1/rerank", "/v1/score"),
    }
)
"""Paths whose prompts engines compute, and so may cache."""
OPERATORS = frozenset({"load_lora_adapter", "unload_lora_adapter", "load_lora_adapter_from_tensors", "close_session"})
"""Ends of paths that change what all clients share."""
_encode = msgspec.json.encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class NamedModels(msgspec.Struct):
    """Fields by which engines choose weights: SGLang's name an adapter beside the model."""

    model: Any = None
    lora_path: Any = None
    lora_name: Any = None


class _OwnSalt(msgspec.Struct):
    cache_salt: str | None = None


_named = msgspec.json.Decoder(NamedModels).decode
_own_salt = msgspec.json.Decoder(_OwnSalt).decode


def check_models(key: AccessKey, body: bytes, query: bytes = b"", encoding: str = "") -> None:
    """Raise ``Refusal`` where a request names a model that isn't for ``key``, or may name one in a way that can't be read."""
    if not key.models:
        return
    if body and encoding.lower() not in ("", "identity"):
        raise _unreadable(f"is {encoding[:50]}")
    try:
        named = _named(body) if body else NamedModels()
    except (ValueError, *DECODE_ERRORS):
        raise _unreadable("is no JSON object in UTF-8") from None
    for name in (*_names(named), *_names_in(query)):
        if not key.allows(name):
            raise not_for_key(name)


def _names(named: NamedModels) -> Iterator[str]:
    for value in (named.model, named.lora_path, named.lora_name):
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str):
                yield name
            elif name is not None:
                raise _unreadable("names a model that is no text")


def _names_in(query: bytes) -> Iterator[str]:
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in NamedModels.__struct_fields__:
            yield value


def _unreadable(why: str) -> Refusal:
    return Refusal(415, f"this key is for some models alone, and the body {why}", fix="send a JSON object in UTF-8")


def check_unknown(path: str, known: frozenset[str], key: AccessKey | None, has_body: bool) -> str:
    """Return the path that an engine may make of ``path``. Raises ``Refusal`` if it is one that is known here, changes what
    all clients share, or computes prompts that ought to be salted.
    """
    plain = normpath("/" + path.lstrip("/"))
    if plain.rpartition("/")[2] in OPERATORS:
        raise Refusal(403, f"{path[:100]} isn't passed on: it changes what all clients share", fix="ask as an operator")
    if plain in known:
        raise Refusal(404, f"there is no {path[:100]}", fix=f"use {plain}")
    if key is not None and key.cache_salt is not None and has_body:
        raise Refusal(403, f"prompts of this key are salted, and {path[:100]} can't be", fix="use the OpenAI API")
    return plain


def salt_of(key: AccessKey, path: str, body: bytes) -> str | None:
    """Return the cache_salt that a request of ``key`` gets in place of its own; ``None`` where it keeps its own."""
    if key.cache_salt is None or path not in SALTED:
        return None
    try:
        given = _own_salt(body).cache_salt
    except (ValueError, *DECODE_ERRORS):
        given = None
    return key.salted(given)


def with_salt(body: bytes, salt: str) -> bytes:
    """Return ``body`` with ``salt`` as its cache_salt. Raises ``MsgspecError`` for what is no JSON object."""
    fields = _fields(body)
    fields["cache_salt"] = msgspec.Raw(_encode(salt))
    return _encode(fields)
