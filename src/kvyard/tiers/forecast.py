"""Forecast of a load's duration: waiting, pulls and fetches that come first, and the copy to the device.

It asks the links themselves, on copies, so it is exact as long as nothing else is submitted. Other requests will submit
more, which can't be known: a forecast may be too short, hardly too long.
"""

from collections.abc import Callable, Iterable, Sequence

from kvyard.blocks.spans import overlaps
from kvyard.tiers.copies import Copy
from kvyard.tiers.links import Direction
from kvyard.tiers.prefix_lookup import Need, PrefixLookup
from kvyard.tiers.state import OffloadState
from kvyard.tiers.store import PageRange, PendingPages, total_pages


def load_time(
    state: OffloadState,
    loading: Sequence[PendingPages],
    lookup: PrefixLookup,
    depth: int,
    needs: Sequence[Need],
    now: int,
) -> Callable[[], int]:
    """Return a function that forecasts the nanoseconds from ``now`` until ``needs`` are on the device, with tiers down to
    ``depth``. ``loading`` is in flight to the device for other requests. Call it before anything changes.
    """

    def forecast() -> int:
        lookup.depth = depth
        layout, tiers = state.layout, state.tiers
        done_at = now
        pieces = [need.piece for need in needs]
        if any(piece.group < len(loading) and _overlap(piece, loading[piece.group]) for piece in pieces):
            done_at = max(done_at, _landing(state, 0, Direction.IN, pieces))
        coming = [piece for piece in pieces if overlaps(piece.start, piece.stop, lookup.groups[piece.group].coming)]
        if coming:
            done_at = max(done_at, _landing(state, 0, Direction.OUT, coming))
            if len(tiers) > 1:
                done_at = max(done_at, _landing(state, 1, Direction.IN, coming))
        if depth > lookup.own and state.peers is not None:
            pulled = total_pages(lookup.only_from(lookup.own, list(needs))) * layout.chunk
            if pulled:
                done_at = state.peers.foresee(lookup.request, pulled * layout.block_bytes, done_at)
        for level in range(min(depth, lookup.own) - 1, 0, -1):
            fetched = lookup.only_from(level, list(needs))
            blocks = total_pages(fetched) * layout.chunk
            if not blocks:
                continue
            landing = _landing(state, level, Direction.IN, fetched)
            if landing:  # for this request or another: it isn't fetched twice
                done_at = max(done_at, landing)
            else:
                done_at = tiers[level].link.foresee(
                    done_at, Direction.IN, blocks * layout.block_bytes, state.name, blocks
                )
        blocks = sum([need.high - need.low for need in needs])
        return tiers[0].link.foresee(done_at, Direction.IN, blocks * layout.block_bytes, state.name, blocks) - now

    return forecast


def _overlap(piece: PageRange, pending: PendingPages) -> bool:
    return overlaps(piece.start, piece.stop, pending.spans(piece.chain.keys, piece.stop))


def _landing(state: OffloadState, level: int, direction: Direction, pieces: Iterable[PageRange]) -> int:
    """Return when the last copy lands that brings any of ``pieces`` that way over the link of tier ``level``; 0 if
    none does.
    """
    tier = state.tiers[level]
    last = 0
    for transfer, copy in tier.in_flight.items():
        if copy.direction == direction and any(_same(piece, mine) for piece in pieces for mine in _all_pieces(copy)):
            last = max(last, tier.link.foresee_landing(transfer))
    return last


def _all_pieces(copy: Copy) -> list[PageRange]:
    return [piece for part in (copy, *copy.rest) for piece in part.pieces]


def _same(left: PageRange, right: PageRange) -> bool:
    """Return true if the two have a page in common."""
    first = max(left.start, right.start)
    return (
        left.group == right.group
        and first < min(left.stop, right.stop)
        and left.chain.keys[first] == right.chain.keys[first]
    )
