"""Ownership: the blocks that a session's hints concern, and the effect of hints on them.

A block is a session's own as long as no request of another session has used it, whether it computed or found it. Its owner,
one session or several, is noted when a request frees the block, so that a lookup costs nothing.

- *The session is over*: its own blocks on the path of the request with that hint are evicted first, those of the session that
  ended earliest before all others. Blocks that another session has used stay where they are, so a shared prefix survives the
  end of any conversation that began with it. Whatever request uses a block afterwards makes it ordinary again.
- *It comes back within a time*: all blocks of the request are the last to go until then, shared ones too, which are needed as
  much. After that they are ordinary, or, if they are its own and it is asked for, the first to go. The session's next request
  ends that for its own blocks. For a shared one of several times the longest counts, and it starts over whenever a request
  frees the block: what is used more often than that stays, as it would by age.
"""

from collections.abc import Iterable

from kvyard.blocks.eviction import EvictionOrder
from kvyard.blocks.extent import DEFAULT_PRIORITY, KEPT, KEPT_THEN_FIRST, OVER, Extent
from kvyard.blocks.hints import Hints

SHARED = "\0shared"
"""Owner of blocks that several sessions have used. No session has this name: ``Hints`` refuses it."""


def claim(order: EvictionOrder, extents: Iterable[Extent], session: str, hints: Hints) -> None:
    """A request of ``session`` is about to give back ``extents``, or gave them back before: note whose they are, with
    their ``hints``. Those that are free stand in ``order``; what the hints leave as it was keeps its place there.
    """
    order.expire()  # what is over by now is read as that
    for extent in extents:
        before = extent.priority, extent.expires
        priority, expires = _claimed(extent, session, hints)
        if extent.refs:
            extent.priority, extent.expires = priority, expires
        elif priority >= KEPT_THEN_FIRST or (priority, expires) != before:
            order.remove(extent)
            extent.priority, extent.expires = priority, expires
            order.push(extent)


def end_session(order: EvictionOrder, session: str) -> int:
    """``session`` is over, which no request announced: all of its own blocks in ``order`` are the first to go. Returns how
    many.

    Takes time by the number of extents in the order.
    """
    if session == SHARED:
        return 0
    own = [extent for extent in order if extent.owner == session and extent.priority != OVER]
    for extent in own:
        order.remove(extent)
        extent.priority, extent.expires = OVER, None
        order.push(extent)
    return sum(len(extent.ids) for extent in own)


def _claimed(extent: Extent, session: str, hints: Hints) -> tuple[int, int | None]:
    """Return the priority of ``extent``, and how long it lasts, after a request of ``session``, which is noted as its user."""
    if extent.owner != session:
        extent.owner = SHARED if extent.owner else session
    own = extent.owner == session
    priority, expires = extent.priority, extent.expires
    if priority == OVER or (own and priority >= KEPT_THEN_FIRST):
        priority, expires = DEFAULT_PRIORITY, None
    elif priority == KEPT_THEN_FIRST:
        priority = KEPT  # more than one session uses it now
    if hints.session_end:
        return (OVER, None) if own else (priority, expires)
    if hints.ttl is not None:
        if priority == KEPT and expires is not None:
            return KEPT, max(expires, hints.ttl)
        return KEPT_THEN_FIRST if own and hints.ttl_then == "first" else KEPT, hints.ttl
    return priority, expires
