"""Prefix of one prompt in all tiers, and the needs of a load. Answers questions; changes nothing."""

from kvyard.blocks import Hit, Request
from kvyard.blocks.spans import Spans, intersect, unite, without
from kvyard.integers import ceil_div
from kvyard.tiers.pulls import PeerPages
from kvyard.tiers.state import OffloadState
from kvyard.tiers.store import PageRange


class Need:
    """Pages that one group needs for a load."""

    __slots__ = ("high", "low", "piece")

    def __init__(self, low: int, high: int, piece: PageRange) -> None:
        """Blocks ``low`` to ``high`` go to the device, out of the pages of ``piece``."""
        self.low = low
        self.high = high
        self.piece = piece


class GroupPages:
    """Locations of one group's pages of the prompt, as intervals."""

    __slots__ = ("coming", "local", "tiers")

    def __init__(self, local: Spans, coming: Spans, tiers: list[Spans]) -> None:
        self.local = local
        self.coming = coming
        """On the way to the first tier."""
        self.tiers = tiers
        """Closest first, and last what a peer has, if there is one to pull from."""


class PrefixLookup:
    """One request's question, after ``hit`` was found on the device."""

    def __init__(
        self, state: OffloadState, request: Request, hit: Hit, limit: int, peer: PeerPages | None = None
    ) -> None:
        """``limit`` is how many tokens a load may bring at most, ``peer`` what another worker has."""
        self.layout = layout = state.layout
        self.request = request
        self.hit = hit
        self.limit = limit
        self.peer = peer
        self.own = len(state.tiers)
        """Number of tiers of the worker itself; the peer's comes after them."""
        self.depth = self.own if peer is None else self.own + 1
        """Number of tiers that are searched, closest first."""
        # A hit that ends inside a block can't be continued by a load: load it all, if that goes further.
        self.local = hit if all(hit.tokens % size == 0 for size in layout.block_sizes) else None
        self.groups: list[GroupPages] = []
        local, chunk = self.local, layout.chunk
        for group, size in enumerate(layout.page_tokens):
            keys = layout.chain(request, group).keys
            here: Spans = ()
            if local is not None and local.tokens >= size:
                here = ((ceil_div(local.groups[group].low, chunk), local.tokens // size),)
                here = here if here[0][0] < here[0][1] else ()
            coming = state.first.on_the_way(group, keys, len(keys))
            resident = [tier.store.resident(group, keys, len(keys)) for tier in state.tiers]
            if peer is not None:
                resident.append(peer.resident(group, keys, len(keys)))
            self.groups.append(GroupPages(here, coming, resident))

    def goes_on(self) -> bool:
        """Return true if each group has pages after the hit in some tier. If not, full attention can't use any of them."""
        hit = self.hit.tokens
        for pages, size in zip(self.groups, self.layout.page_tokens):
            last = pages.coming[-1][1] if pages.coming else 0
            for spans in pages.tiers[: self.depth]:
                if spans and spans[-1][1] > last:
                    last = spans[-1][1]
            if last * size <= hit:
                return False
        return True

    def everywhere(self) -> list[list[tuple[int, int]]]:
        """Return, per group, what any tier has or the first is receiving."""
        return [unite(pages.local, pages.coming, *pages.tiers[: self.depth]) for pages in self.groups]

    def above(self, level: int) -> list[list[tuple[int, int]]]:
        """Return, per group, what the device and the tiers closer than ``level`` have."""
        return [unite(pages.local, *pages.tiers[:level]) for pages in self.groups]

    def longest(self, spans: list[list[tuple[int, int]]]) -> int:
        """Return the tokens of the prompt that all groups can use of ``spans``."""
        chain = self.request.chain
        return self.layout.agreement.longest(spans, self.limit, len(chain.keys) * chain.block_size)

    def needs(self, tokens: int, spans: list[list[tuple[int, int]]]) -> list[Need]:
        """Return the groups' needs to resume after ``tokens``; none if that is no more than the hit, or if some group's
        rule asks for more than there is in ``spans``.
        """
        pages: list[Need] = []
        if tokens <= self.hit.tokens:
            return pages
        layout, chunk = self.layout, self.layout.chunk
        for index, group in enumerate(layout.manager.groups):
            adopted = self.local.groups[index].blocks if self.local is not None else 0
            low = max(group.rule.stale(tokens) // group.block_size, adopted)
            high = tokens // group.block_size
            if low < high:
                first, last = low // chunk, ceil_div(high, chunk)
                if without(first, last, spans[index]):
                    return []
                pages.append(Need(low, high, PageRange(index, layout.chain(self.request, index), first, last)))
        return pages

    def only_from(self, level: int, needs: list[Need]) -> list[PageRange]:
        """Return the part of ``needs`` that tier ``level`` has and no closer one does."""
        pieces: list[PageRange] = []
        for need in needs:
            piece = need.piece
            tiers = self.groups[piece.group].tiers
            missing = without(piece.start, piece.stop, unite(*tiers[:level]))
            for low, high in intersect(missing, tiers[level]):
                pieces.append(PageRange(piece.group, piece.chain, low, high))
        return pieces

    def held_by(self, level: int, needs: list[Need]) -> list[PageRange]:
        """Return the part of ``needs`` that tier ``level`` has."""
        pieces = [need.piece for need in needs]
        return [
            PageRange(piece.group, piece.chain, low, high)
            for piece in pieces
            for low, high in intersect([(piece.start, piece.stop)], self.groups[piece.group].tiers[level])
        ]
