"""Prompts that come to a worker from another one, and where from: values that the parts of a hand-over share."""

from typing import Any

import msgspec

from kvyard.engine.job import Job
from kvyard.tiers.network import Flow

ROOM = "room "
"""Prefix of the name of a prompt that has no other than the number of SGLang's room."""


class PromptAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a computed prompt, in the words of a request."""

    host: str
    port: int
    key: str
    """The prompt's name there."""
    engine_id: str = ""
    """Of one life of an engine; empty where the request doesn't say."""

    @classmethod
    def of(cls, params: dict[str, Any]) -> "PromptAddress | None":
        """Return the address in vLLM's ``kv_transfer_params``; ``None`` if something is missing, in which case vLLM transfers
        nothing.
        """
        values: list[Any] = [params.get(f"remote_{name}") for name in ("host", "port", "request_id", "engine_id")]
        host, port, key, engine = values
        if not (isinstance(host, str) and isinstance(key, str) and isinstance(engine, str)):
            return None
        try:
            number = int(port)
        except (TypeError, ValueError):
            return None
        return cls(host=host, port=number, key=key, engine_id=engine) if params.get("remote_block_ids") else None


class TransferWish(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-over fields of a request."""

    keep: str | None = None
    """Its prompt is for another worker, and is kept under this name; empty for a name of the worker's choice."""
    fetch: PromptAddress | None = None
    """Its prompt was computed elsewhere, or is being."""
    awaited: bool = False
    """True if that may not be known there yet: both parts were sent at once."""


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that has a prompt."""

    label: str
    number: int | None = None
    """Among the workers of this process; ``None`` for another's."""


class IncomingPrompt(msgspec.Struct, eq=False, kw_only=True):
    """Prompt in flight to a worker."""

    source: PromptSource
    address: PromptAddress
    target: int
    """The number of the worker that it is for."""
    job: Job | None = None
    rank: int = 0
    tokens: int = 0
    """Tokens that the worker lacked when it was last asked."""
    blocks: int = 0
    """Blocks that those fill."""
    flow: Flow | None = None
    """Its transfer, where it needed one and there is room for it."""
