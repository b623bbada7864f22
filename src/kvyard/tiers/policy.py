"""Offload policies: which blocks go to the host, and when.

A policy is asked at the end of a pass, for the blocks a request has computed and the host doesn't have. ``POLICIES`` is the
registry. A policy knows neither links nor room: it only says what is wanted.
"""

from collections.abc import Callable
from typing import ClassVar

from kvyard.blocks import Request
from kvyard.blocks.spans import Spans, clip
from kvyard.events.tier import LOWER_TIERS
from kvyard.hashing import Chain
from kvyard.tiers.store import PageRange, TierStore


class WriteThrough:
    """Every full block of the prompt, as soon as it is computed. The default, and what vLLM's connector does."""

    ahead: ClassVar[bool] = False
    """True if it copies from the head of the free line instead of at the end of a pass."""
    moves: ClassVar[bool] = False
    """True if a load takes its pages out of the first tier: what is on the device isn't there as well."""
    unclean: ClassVar[str] = "wait"
    """Fate of a block that is needed before it has been copied, unless ``on_unclean`` is set."""
    horizon: ClassVar[float] = 0.0
    """Allocations, as large as the largest lately, for which blocks are copied ahead unless ``offload_ahead`` says how many."""

    def reach(self, request: Request) -> int:
        """Return the number of the request's tokens that are wanted, as far as they are computed."""
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        return computed if computed < prompt else prompt

    def limit(self, request: Request) -> int | None:
        """Return the most tokens that ``reach`` can return for this request; ``None`` if there is no limit."""
        return request.num_prompt_tokens

    def used(self, group: int, chain: Chain, first: int, last: int) -> None:
        """Note that a request has used pages ``first`` to ``last``: once per request and page, before ``choose``."""

    def choose(self, group: int, chain: Chain, missing: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ``missing`` intervals to store now."""
        return missing


class WriteThroughGenerated(WriteThrough):
    """Generated blocks too."""

    def reach(self, request: Request) -> int:
        return min(request.num_computed_tokens, request.num_tokens)

    def limit(self, request: Request) -> int | None:
        return None


class AfterHits(WriteThrough):
    """Stores blocks of the prompt once they have been used ``min_uses`` times, by as many requests.

    Uses are kept for as many pages as four stores hold, the least recently used evicted first.
    """

    def __init__(self, min_uses: int, num_pages: int, num_groups: int) -> None:
        self.min_uses = min_uses
        self._seen = TierStore(LOWER_TIERS[0], 4 * num_pages, num_groups)
        """Every use of a page is a copy of it in here."""

    def used(self, group: int, chain: Chain, first: int, last: int) -> None:
        seen = self._seen
        for low, high in self._with_uses(group, chain, first, last, self.min_uses - 1, fewer=True):
            seen.put(PageRange(group, chain, low, high))

    def choose(self, group: int, chain: Chain, missing: list[tuple[int, int]]) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        for low, high in missing:
            chosen += self._with_uses(group, chain, low, high, self.min_uses, fewer=False)
        return chosen

    def _with_uses(self, group: int, chain: Chain, first: int, last: int, uses: int, fewer: bool) -> Spans:
        """Return the intervals of pages ``first`` to ``last`` with at least, or at most, ``uses`` uses."""
        nodes, covered = self._seen.pool.maps[group].walk(chain.keys, last)
        spans = [
            (node.start, min(node.stop, covered))
            for node in nodes
            if (len(node.copies) <= uses if fewer else len(node.copies) >= uses)
        ]
        if fewer:
            spans.append((covered, last))
        return clip(spans, first, last)


class OnEviction(WriteThrough):
    """Stores nothing at the end of a pass: blocks are copied when they come near the head of the free list (``Cleaner``)."""

    ahead: ClassVar[bool] = True

    def reach(self, request: Request) -> int:
        return 0

    def limit(self, request: Request) -> int | None:
        return 0


class Lazy(OnEviction):
    """Blocks that the next allocations are likely to evict, if the host lacks them; none ever waits for a copy.

    After LMCache's eviction-aware offload (#4499, #4847), whose horizon is 2.5 steps.
    """

    unclean: ClassVar[str] = "drop"
    horizon: ClassVar[float] = 2.5


class Exclusive(OnEviction):
    """Blocks that the device evicts, and a load takes them out of the host again: each is in one of the two."""

    moves: ClassVar[bool] = True


POLICIES: dict[str, Callable[[int, int, int], WriteThrough]] = {
    "write_through": lambda uses, pages, groups: WriteThrough(),
    "write_through_generated": lambda uses, pages, groups: WriteThroughGenerated(),
    "after_hits": AfterHits,
    "on_eviction": lambda uses, pages, groups: OnEviction(),
    "lazy": lambda uses, pages, groups: Lazy(),
    "exclusive": lambda uses, pages, groups: Exclusive(),
}
"""Offload policies by name. A maker takes ``min_uses``, the pages of the first tier and the number of groups."""
AHEAD = ("on_eviction", "lazy", "exclusive")
"""Offload policies that copy from the head of the device's free line."""
SPILLS = ("on_landing", "on_eviction")
"""Trigger of a copy to the next tier: landings at once, or blocks that are evicted next."""
