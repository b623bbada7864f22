"""Input and output of a router. Plain values."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvyard.engine.role import Role
from kvyard.index import Holder


class Prompt(Protocol):
    """A request as a router reads it while it chooses; none of it is kept. A ``RouteRequest``, or a job of a replay."""

    @property
    def id(self) -> object: ...
    @property
    def keys(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def expected_output(self) -> int | None: ...


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """A prompt that wants a worker."""

    id: object
    """The caller's name, unique among requests in flight. Hashable."""
    keys: Sequence[int]
    """The index's names of the prompt's full blocks. Anything with a length and items will do; it must not change."""
    num_tokens: int
    session: str | None = None
    """Conversation that it belongs to, for ``affinity``."""
    expected_output: int | None = None
    """Tokens, for ``reserve_output``."""


class Choice(NamedTuple):
    """A policy's answer."""

    slot: int
    """The chosen worker's."""
    cost: float = 0.0
    """By the policy's own measure; 0 if it has none."""
    tied: int = 1
    """Number of equally good workers."""
    why: str = ""
    """A word of ``kvyard.router.explain.REASONS``."""


class Hold(NamedTuple):
    """A worker without room that a request rather waits for than goes to another."""

    worker: Holder
    ns: int
    """Nanoseconds that the request waits at most."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One worker, as a decision saw it. Counts are blocks unless noted."""

    worker: Holder
    role: Role = "both"
    """Part of a request that it computes."""
    cost: float
    tiers: tuple[int, ...] = ()
    """Blocks of the prompt's prefix, by tier: in the worker's device memory, predictions included, and the addition of each
    lower tier beyond the closer ones."""
    predicted: int = 0
    """Device blocks that no event announced yet."""
    prefill_tokens: int = 0
    """Tokens that requests before this one have still to prefill there."""
    active_blocks: int = 0
    """Held by requests before this one."""
    shared_blocks: int = 0
    """Blocks of this prompt, among those."""
    active_requests: int = 0

    @property
    def device(self) -> int:
        """The first of ``tiers``."""
        return self.tiers[0] if self.tiers else 0


class Decision(Candidate, frozen=True, kw_only=True, gc=False):
    """Chosen worker of a request, its cost, and what a better match would have saved. The chosen worker's figures are those
    of a candidate, before this request; the cost is by the policy's own measure, and 0 if it has none.
    """

    id: object
    policy: str
    why: str
    """A word of ``kvyard.router.explain.REASONS``."""
    tied: int = 1
    """Number of equally good workers."""
    num_tokens: int
    new_tokens: int = 0
    """Booked tokens: the prompt's tokens less its credit."""
    blocks: int
    """Full blocks of the prompt."""
    best: int = 0
    """The longest prefix that any worker has that could have been chosen, from all tiers."""
    best_worker: Holder | None = None
    regret: int = 0
    """Tokens by which that is longer than the chosen worker's."""
    candidates: tuple[Candidate, ...] = ()
    """Everyone, where the caller asked for it."""

    @property
    def overlap(self) -> int:
        """The prefix that the chosen worker has, from all tiers."""
        return sum(self.tiers)
