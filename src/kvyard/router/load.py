"""A load: how much one worker has to do, as the router counts it."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True):
    """One worker's, at some moment."""

    prefill_tokens: int
    """Of requests whose prefill isn't done, net of their overlap."""
    blocks: int
    """Held by active requests, each block once."""
    requests: int
