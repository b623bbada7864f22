"""Sources: the worker from which a chosen worker may pull missing blocks of a prompt.

The rule is llm-d's (its ``p2p-source-producer``): a worker that has about as much of the prompt as the best one and enough more
than the chosen one; of these, here, the one with the least work. It reads the index, as routing does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvyard.events.types import Tier
from kvyard.index import Holder, Roster
from kvyard.index.bits import bits
from kvyard.index.runs import RunIndexer
from kvyard.router.worker import WorkerLoad


class PullSource(NamedTuple):
    """Holder of a prefix, and its length."""

    holder: Holder
    tokens: int


class PeerSources:
    """Chooses among the workers of one fleet."""

    def __init__(self, index: RunIndexer, tier: Tier, min_lead: int, tolerance: int) -> None:
        """Only what is in ``tier`` counts. A source has ``min_lead`` tokens more than the worker that pulls, and at most
        ``tolerance`` blocks less than the best.
        """
        self._index = index
        self._tier = tier
        self._min_lead = min_lead
        self._tolerance = tolerance
        self._holders: tuple[Holder, ...] = ()
        self._roster: Roster | None = None

    def changed(self, holders: Sequence[Holder]) -> None:
        """Receive the workers as they are from now on."""
        self._holders = tuple(holders)
        self._roster = self._index.roster(self._holders, (self._tier,))

    def choose(
        self, keys: Sequence[int], num_tokens: int, target: Holder, has: int, load_of: Callable[[Holder], WorkerLoad]
    ) -> PullSource | None:
        """Return the source for a prompt that goes to ``target``, which ``has`` that number of its blocks; ``None`` if a
        pull isn't worth it. Data-parallel ranks of one worker are no peers.
        """
        if self._roster is None:
            return None
        reaches = self._index.reaches(self._roster, keys, num_tokens)
        if not reaches:
            return None
        size = self._index.identity.block_size
        peers = [
            (blocks, self._holders[slot])
            for blocks, members in reaches[0]
            if (blocks - has) * size >= self._min_lead
            for slot in bits(members)
            if self._holders[slot].name != target.name
        ]
        if not peers:
            return None
        best = max([blocks for blocks, _ in peers])
        blocks, holder = min(
            [(blocks, holder) for blocks, holder in peers if blocks >= best - self._tolerance],
            key=lambda source: (*_weight(load_of(source[1])), -source[0], source[1]),
        )
        return PullSource(holder, blocks * size)


def _weight(load: WorkerLoad) -> tuple[int, int]:
    return load.prefill_tokens, load.requests
