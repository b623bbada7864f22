"""An engine as the gateway knows it: its address, its state, and what it has in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from kvyard.events.types import Tier
from kvyard.index import Holder
from kvyard.openai import ListedModel
from kvyard.router import Decision
from kvyard.server.dashboard.view import PromptSources, prompt_sources
from kvyard.server.gateway.config import GatewayEngine, check_url
from kvyard.server.gateway.connections import EngineAddress
from kvyard.server.gateway.promises import EngineStreams, PromiseTally, RecentPhantoms, StreamMarks

if TYPE_CHECKING:
    from kvyard.server.gateway.pool import EnginePool

EngineState = Literal["starting", "ready", "suspect", "down"]


class PromptTally:
    """Tokens of routed prompts by source, as seen by decisions, since the start."""

    __slots__ = ("computed", "elsewhere", "tiers")

    def __init__(self) -> None:
        self.tiers = [0] * len(Tier)
        self.elsewhere = self.computed = 0

    def add(self, decision: Decision, block_size: int) -> None:
        """Count one decision."""
        elsewhere = decision.regret * block_size
        computed = decision.num_tokens - elsewhere
        for level, blocks in enumerate(decision.tiers):
            self.tiers[level] += blocks * block_size
            computed -= blocks * block_size
        self.elsewhere += elsewhere
        self.computed += max(0, computed)

    def prompts(self) -> PromptSources:
        """Return prompt tokens by source, for the dashboard."""
        return prompt_sources(self.tiers, self.computed, self.elsewhere)


class Engine:
    """One upstream. Changed only on the gateway's loop."""

    def __init__(self, config: GatewayEngine) -> None:
        """Raises ``KvyardError`` for a URL that isn't one."""
        self.config = config
        self.name = config.called
        self.url = check_url(config.url, "an engine's url")
        self.address = EngineAddress.of(self.url)
        self.holders = [Holder(self.name, rank) for rank in range(config.dp_size)]
        self.state: EngineState = "starting"
        self.reason = "nothing received yet"
        self.draining = False
        self.pool: EnginePool | None = None
        self.models: dict[str, str | None] = {}
        """Names that it answers to, with the base model of those that are adapters."""
        self.listed: dict[str, ListedModel] = {}
        """Models as the engine lists them."""
        self.longest: int | None = None
        """Tokens of prompt and answer together, if it reports a limit."""
        self.in_flight = 0
        self.misses = 0
        """Looks in a row that failed."""
        self.strikes = 0
        """Requests in a row that it failed and others answered."""
        self.shunned_until = 0
        self.look = asyncio.Event()
        """Set to have it looked at soon."""
        self.doubt: asyncio.Future[None] | None = None
        """Done after the next look, where another process may have taken the engine's place since the last one."""
        self.heard_for: str | None = None
        """The model for which its events are listened to."""
        self.asked_for_events = False
        """True if it was asked for its event endpoints."""
        self.tells_sleep = True
        """False once it didn't answer whether it sleeps."""
        self.streams_error = ""
        """Why its events aren't listened to, where they should be."""
        self.requests = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.downs = 0
        self.tally = PromptTally()
        self.promises = PromiseTally()
        self.phantoms = RecentPhantoms()
        self.streams = EngineStreams(self.name)

    def marks(self) -> StreamMarks:
        """Return the positions of its event streams, as far as they are followed here."""
        return self.streams.marks(None if self.pool is None else self.pool.indexer)

    def distrust(self, reason: str) -> None:
        """Make the index ignore the engine's events until a stream states its contents anew."""
        if self.pool is not None and self.pool.indexer is not None:
            self.pool.indexer.distrust(self.name, reason)

    def settle(self) -> None:
        """End the doubt about the engine's identity: it was checked, or can't be."""
        doubt, self.doubt = self.doubt, None
        if doubt is not None and not doubt.done():
            doubt.set_result(None)

    @property
    def announces(self) -> bool:
        """Return true if its events reach an index."""
        return self.config.events is not None or (self.pool is not None and self.pool.remote is not None)

    def learned(self, config: GatewayEngine) -> None:
        """Apply settings that the engine reported after it was added."""
        self.config = config
        if not self.pool:
            self.holders = [Holder(self.name, rank) for rank in range(config.dp_size)]

    @property
    def model(self) -> str:
        """The model of its pool; empty if it is in none."""
        return "" if self.pool is None else self.pool.model

    @property
    def up(self) -> bool:
        """Return true if it may get requests, drained or not."""
        return self.state in ("ready", "suspect")

    def serves(self, name: str) -> bool:
        """Return true if it answers to this name. One whose list isn't known yet serves the model it was configured with."""
        return name in self.models if self.models else name == self.config.model
