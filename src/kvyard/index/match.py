"""What the index answers: per worker how long a prefix it could use, from where, and how sure that is. Plain values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvyard.events.transport import State
from kvyard.events.types import Tier
from kvyard.index.places import Holder

DEFAULT_WEIGHTS: Mapping[Tier, float] = {Tier.G1: 1.0, Tier.G2: 0.75, Tier.G3: 0.25, Tier.G4: 0.25}
"""What a block on each tier is worth against computing it: Dynamo's credits. A tier that isn't listed earns nothing."""


class TierMatch(msgspec.Struct, frozen=True):
    """What one tier adds to the match. Tiers are taken closest first, each going on where the closer ones end."""

    blocks: int
    """Blocks of the index beyond what closer tiers reach."""
    tokens: int
    reach: int
    """Tokens of the longest usable prefix from this tier and all closer ones."""


class WorkerMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer."""

    worker: Holder
    blocks: int = 0
    tokens: int = 0
    """The longest prefix it could use, from all tiers that count."""
    score: float = 0.0
    """Blocks, weighted by tier and confidence."""
    tiers: dict[Tier, TierMatch] = msgspec.field(default_factory=dict)
    limited_by: int | None = None
    """The attention group that ended the match, where one did before the prompt did."""
    state: State = State.FRESH
    """The worst state of any stream that speaks for it."""
    confidence: float = 1.0
    age: int = 0
    """Nanoseconds since the quietest of its streams was heard."""
    reason: str = ""
    """Why it earns nothing, where something other than its cache is the cause."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Every known worker's answer for one prompt."""

    blocks: int
    """Full blocks of the prompt."""
    tokens: int
    workers: dict[Holder, WorkerMatch]

    def best(self) -> WorkerMatch | None:
        """The highest score, the first by name where several have it; ``None`` where nobody has any."""
        found = max(self.workers.values(), key=lambda match: match.score, default=None)
        if found is None or found.score <= 0:
            return None
        return min((m for m in self.workers.values() if m.score == found.score), key=lambda match: match.worker)


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """How much a stream's word is worth in each state. A stale stream's is worth nothing, always (I12)."""

    catching_up: float = 0.0
    """From 0 to 1. While something is missing rows may be wrong either way, so nothing unless asked for."""

    def of(self, state: State) -> float:
        """The confidence in what a stream in ``state`` said."""
        return 1.0 if state == State.FRESH else self.catching_up if state == State.CATCHING_UP else 0.0
