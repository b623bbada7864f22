"""Uses: what an eviction order that learns is told when a request lets go of cached blocks.

Who is asked to tell is the block manager and, for lower tiers, the offload engine. An order of vLLM's kind is told nothing, and
none of this is made then.
"""

from typing import NamedTuple

NEVER_AGAIN = 1 << 60
"""The number of the request that uses something next, where none does."""


class RequestFacts(NamedTuple):
    """What is known of a request beside its tokens, for orders that make something of it. All of it may be missing."""

    category: str = ""
    """The kind of request, where the client says."""
    turn: int = 0
    """Which request of its conversation it is, from 1 on; 0 if unknown."""
    number: int = -1
    """Its place in the trace that is replayed."""
    next_uses: tuple[tuple[int, int], ...] = ()
    """The trace's future, for the oracle: (tokens, number) in order. What of the prompt lies before so many tokens, and behind
    those of the entry before, is next used by that request; what follows the last entry by none."""


NO_FACTS = RequestFacts()


class Use:
    """One request's use of the blocks that it held or matched."""

    __slots__ = ("facts", "request", "time", "tokens", "turn")

    def __init__(self, request: str, tokens: int, facts: RequestFacts = NO_FACTS) -> None:
        self.request = request
        """Its id. Being told of the same request again is no further use."""
        self.tokens = tokens
        """How long it was by then, prompt and output."""
        self.facts = facts
        self.time = 0
        """When; the order notes it."""
        self.turn = facts.turn
        """Which turn it is taken for; an order may work it out where it is unknown."""
