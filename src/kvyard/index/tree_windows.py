"""Stores and removals of a stream that names no attention groups, divided among the groups that its worker is known to have.

SGLang announces the pages of its radix tree, which are those of full attention. Of its window layers' pages it keeps those that
the window reaches at the end of every run that a request inserts, and announces nothing of the others. So a run is stored
whole for full attention, and its end for windows. Where a run branches off, the window before it is there, too: the request
computed it again and inserted that part first. If a prompt's pages are all cached but not its window, no
event announces the new window pages: ``computed`` is called instead. Window pages that SGLang evicts before the others are not
noticed.

A window that ends with a whole page, as where runs branch off, has a page more than others: the last token's window is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from kvyard.events.types import Removed, Stored, Tier
from kvyard.hashing import Key
from kvyard.index.bridge import Bridge
from kvyard.index.catalog import GroupLayout
from kvyard.integers import ceil_div


class TreeWindows:
    """Groups of one worker: full attention, and sliding windows beside it."""

    def __init__(self, layout: GroupLayout, bridge: Bridge, holds: Callable[[Tier, int, Key], bool]) -> None:
        """``holds``: whether a tier has a block of a group."""
        self._bridge = bridge
        self._holds = holds
        self.full: list[int] = []
        self.windows: list[tuple[int, int]] = []
        """Groups of windows, and the blocks that a window reaches."""
        for group, spec in zip(layout.groups, layout.specs, strict=True):
            assert group is not None
            if spec.window is None:
                self.full.append(group)
            else:
                self.windows.append((group, ceil_div(spec.window, spec.block_size)))

    def stores(self, event: Stored) -> Iterator[Stored]:
        """Yield the stores of ``event`` in each group. Blocks that a window has already are left out."""
        for group in self.full:
            yield msgspec.structs.replace(event, group=group)
        for group, reach in self.windows:
            holds = partial(self._holds, event.tier, group)
            before = self._before(event.parent, reach + 1)
            branches = not all(map(holds, before[-reach:]))
            hashes = [key for key in before if branches and not holds(key)]
            hashes += [key for key in event.hashes[-reach:] if not holds(key)]
            if hashes:
                yield Stored(hashes=hashes, parent=None, tokens=None, block_size=0, group=group, tier=event.tier)

    def removals(self, event: Removed) -> Iterator[Removed]:
        """Yield the removals of ``event`` in each group."""
        for group in self.full:
            yield msgspec.structs.replace(event, group=group)
        for group, _ in self.windows:
            hashes = [key for key in event.hashes if self._holds(event.tier, group, key)]
            if hashes:
                yield msgspec.structs.replace(event, hashes=hashes, group=group)

    def _before(self, before: Key | None, reach: int) -> list[Key]:
        """Return the last ``reach`` blocks up to ``before``, which is one of them."""
        hashes: list[Key] = []
        while len(hashes) < reach and before is not None:
            known = self._bridge.find(before)
            if known is None:
                break
            span, index = known
            low = max(0, index + 1 - (reach - len(hashes)))
            hashes[:0] = span.hashes[low : index + 1]
            before = span.parent.hashes[-1] if not low and span.parent is not None else None
        return hashes


def computed(keys: Sequence[int], whole: bool, reach: int, has: Callable[[int], bool]) -> Sequence[int]:
    """Return blocks with window pages at the end of a prompt that was computed, of ``keys``, its last blocks, of which there
    should be two more than a window reaches. ``whole``: it ends with a block. ``has``: whether a block is known to have window
    pages.
    """
    if all(map(has, keys[-reach:])):
        return keys[-reach - 1 :] if whole else ()  # it was announced
    if whole:
        # The block with the last token was computed, since it always is; what was there before it was inserted first.
        return [*keys[:-1][-reach - 1 :], keys[-1]]
    return keys[-reach - 1 :]


def tree_windows(
    layout: GroupLayout, block_size: int, bridge: Bridge, holds: Callable[[Tier, int, Key], bool]
) -> TreeWindows | None:
    """Return the division of events that name no group among those of ``layout``; ``None`` unless that is full attention
    with sliding windows, in blocks that are made of the index's, which have ``block_size`` tokens.
    """
    if len(layout.groups) < 2:
        return None
    specs = layout.specs
    if not all(spec.is_full or spec.attention.is_window for spec in specs) or not any(spec.is_full for spec in specs):
        return None
    if any(spec.block_size % block_size for spec in specs):
        return None
    return TreeWindows(layout, bridge, holds)
