"""A request as the block manager sees it: a chain of hashes, lengths, and what it holds.

Scheduling state (when it runs, what it samples) is the engine's; here is only what decides blocks.
"""

from collections.abc import Sequence

from kvyard.blocks.extent import DEFAULT_PRIORITY
from kvyard.blocks.hints import NO_HINTS, Hints, Retention
from kvyard.blocks.rule import NEVER
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import NO_FACTS, RequestFacts
from kvyard.errors import KvyardError
from kvyard.hashing import Chain, PairChain, TokenChain, TraceChain

PAIRS = 0
"""Key of the view in pairs: no block size."""


class RequestError(KvyardError, ValueError):
    """A call that makes no sense for this request; nothing was changed."""


class Request:
    """One sequence. ``num_computed_tokens`` and ``num_in_flight_tokens`` are the scheduler's to advance."""

    def __init__(
        self,
        request_id: str,
        chain: TokenChain | TraceChain,
        *,
        reads_cache: bool = True,
        hints: Hints = NO_HINTS,
        facts: RequestFacts = NO_FACTS,
    ) -> None:
        """``chain`` holds the prompt. ``reads_cache`` is false for requests that need every prompt token computed."""
        self.id = request_id
        self.chain = chain
        self.num_prompt_tokens = chain.num_tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.running = False
        """False while it waits for its first admission or after a preemption."""
        self.shared_prefix_boundary = 0
        """Position to which another group already has this text, beyond the hit; worth a checkpoint there."""
        self.reads_cache = reads_cache
        self.hints = hints
        self.retention = hints.retention
        self.facts = facts
        """Facts for eviction policies that learn."""
        # Below: the manager's own.
        self.tables: list[BlockTable] = []
        self.views: dict[int, Chain] = {}
        self.forget_limits()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, prompt and output."""
        return self.chain.num_tokens

    def grow(self, num_tokens: int) -> None:
        """Add ``num_tokens`` generated tokens of unknown ids. Raises ``TypeError`` for a chain of real tokens."""
        if not isinstance(self.chain, TraceChain):
            raise TypeError(f"request {self.id} has real tokens: append them")
        self.chain.grow(num_tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add sampled ``tokens``. Raises ``TypeError`` for a chain from a trace."""
        if not isinstance(self.chain, TokenChain):
            raise TypeError(f"request {self.id} comes from a trace and has no tokens to append to: grow it")
        self.chain.append(tokens)

    def view(self, block_size: int) -> Chain:
        """Return the chain at a group's block size."""
        chain = self.views.get(block_size)
        if chain is None:
            chain = self.views[block_size] = self.chain.coarser(block_size)
        return chain

    def pairs(self) -> Chain:
        """Return the chain in blocks of token pairs."""
        chain = self.views.get(PAIRS)
        if chain is None:
            chain = self.views[PAIRS] = PairChain(self.chain)
        return chain

    def forget_limits(self) -> None:
        """Discard the limits up to which no group must act for the request (see ``step``)."""
        self.quiet_until: int = NEVER
        self.fits_until: int = NEVER
        self.settled_until: int = NEVER
        self.registered_until: int = NEVER

    def priority_at(self, token: int) -> tuple[int, int | None]:
        """Return the retention priority and duration asked for at ``token``."""
        return wish_at(self.retention, token)

    def __repr__(self) -> str:
        return f"Request({self.id!r}, tokens={self.num_tokens}, computed={self.num_computed_tokens})"


def wish_at(wishes: Sequence[Retention], token: int) -> tuple[int, int | None]:
    """Return the priority that ``token`` is to be kept with, and for how long; the last matching wish wins."""
    for wish in reversed(wishes):
        if wish.start <= token and (wish.stop is None or token < wish.stop):
            return wish.priority, wish.duration
    return DEFAULT_PRIORITY, None
