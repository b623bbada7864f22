"""The ring against one that is walked point by point."""

from __future__ import annotations

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.index.bits import mask_of
from kvyard.router.policies.ring import HashRing


def walked(key: int, slots: set[int]) -> int:
    """Who comes first, by every place of everyone."""
    points = sorted((xxhash.xxh3_64_intdigest(b"%d:%d" % (slot, at)), slot) for slot in slots for at in range(64))
    start = xxhash.xxh3_64_intdigest(b"%d" % key)
    return next((slot for point, slot in points if point >= start), points[0][1])


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 120), min_size=1), st.lists(st.integers(-(1 << 62), 1 << 62), max_size=5))
def test_the_next_point_on_the_ring_is_taken(slots: set[int], keys: list[int]) -> None:
    ring = HashRing()
    for key in [*keys, *range(8)]:
        few = set(sorted(slots)[: 1 + len(slots) // 3])
        for some in (few, slots, few):  # a ring knows more workers than it is asked about
            assert ring.first(key, mask_of(some)) == walked(key, some)


def test_a_ring_of_many_finds_one_and_all() -> None:
    ring = HashRing()
    for key in range(40):
        assert ring.first(key, (1 << 70) - 1) == walked(key, set(range(70)))
        assert ring.first(key, 1 << 69) == 69
