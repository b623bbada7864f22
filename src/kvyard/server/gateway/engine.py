"""An engine as the gateway sees it: where it is, what it serves, how it has been lately. It sends nothing itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from kvyard.index import Holder
from kvyard.server.gateway.config import EngineConfig, check_url
from kvyard.server.gateway.tally import Tally

if TYPE_CHECKING:
    from kvyard.server.gateway.pool import Pool

State = Literal["starting", "ready", "suspect", "down"]


class Engine:
    """One upstream. Changed only on the gateway's loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ``KvyardError`` for a URL that isn't one."""
        self.config = config
        self.name = config.called
        self.url = check_url(config.url, "an engine's url")
        self.addresses: dict[str, Any] = {}
        """By path, its URL as the client library wants it: parsing one costs more than finding it."""
        self.holders = [Holder(self.name, rank) for rank in range(config.dp_size)]
        self.state: State = "starting"
        self.reason = "nothing heard yet"
        self.draining = False
        self.pool: Pool | None = None
        self.models: dict[str, str | None] = {}
        """Names that it answers to, with the base model of those that are adapters."""
        self.in_flight = 0
        self.misses = 0
        """Looks in a row that failed."""
        self.strikes = 0
        """Requests in a row that it failed and others answered."""
        self.shunned_until = 0
        self.look = asyncio.Event()
        """Set where somebody wants it looked at soon."""
        self.heard_for: str | None = None
        """The model for which its events are listened to."""
        self.streams_error = ""
        """Why its events aren't listened to, where they should be."""
        self.requests = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.downs = 0
        self.tally = Tally()

    @property
    def up(self) -> bool:
        """Whether it may get requests, drained or not."""
        return self.state in ("ready", "suspect")

    def serves(self, name: str) -> bool:
        """Whether it answers to this name. One whose list isn't known yet serves the model it was configured with."""
        return name in self.models if self.models else name == self.config.model
