"""Uses: reports to an eviction policy that learns when a request releases cached blocks.

The block manager reports uses of the device, and the offload engine those of lower tiers. Policies that don't learn receive no
reports, and none are made for them.
"""

from typing import NamedTuple

NEVER_AGAIN = 1 << 60
"""The number of the request that uses something next, if none does."""


class RequestFacts(NamedTuple):
    """Facts about a request besides its tokens, for eviction policies that use them. All of them may be missing."""

    category: str = ""
    """The kind of request, if the client names it."""
    turn: int = 0
    """Position in its conversation, from 1 on; 0 if unknown."""
    number: int = -1
    """Its place in the trace that is replayed."""
    next_uses: tuple[tuple[int, int], ...] = ()
    """The trace's future, for the oracle: (tokens, number) in order. The part of the prompt before ``tokens``, and behind
    those of the entry before, is next used by that request; the part after the last entry by none."""
    tenant: str = ""
    """The tenant that is charged for its blocks (``kvyard.blocks.ledger``)."""


NO_FACTS = RequestFacts()


class Use:
    """One request's use of the blocks that it held or matched."""

    __slots__ = ("facts", "request", "time", "tokens", "turn")

    def __init__(self, request: str, tokens: int, facts: RequestFacts = NO_FACTS) -> None:
        self.request = request
        """Id of the request. Another report of the same request is no further use."""
        self.tokens = tokens
        """Length by then, prompt and output."""
        self.facts = facts
        self.time = 0
        """Time of the use; set by the policy."""
        self.turn = facts.turn
        """Assumed turn; a policy may derive it where it is unknown."""
