"""Packed sequences equal the lists they were made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.events.mirror import restates
from kvyard.events.packed import PIECE, Packed, PackedEvents, pieces_of
from kvyard.events.types import Cleared, Event, Removed, Stored, Tier

EVENTS: list[Event] = [
    Stored(hashes=[1, b"\1" * 32], parent=None, tokens=[1, 2], block_size=1, extra_keys=[("a", 1), None], tier=Tier.G3),
    Removed(hashes=[(1 << 64) - 1], group=3, reason="full"),
    Cleared(tier=Tier.G2),
]


@given(st.lists(st.lists(st.integers(), max_size=3).map(lambda few: few * 500), max_size=6))
def test_any_parts_joined_are_their_list(parts: list[list[int]]) -> None:
    packed, whole = Packed[int](), list[int]()
    for number, part in enumerate(parts):
        packed.extend(Packed(part) if number % 2 else part)
        whole += part
    assert list(packed) == whole and len(packed) == len(whole)
    assert [value for piece in pieces_of(packed) for value in piece] == whole
    assert all(len(piece) <= PIECE for piece in pieces_of(packed))
    assert packed[1:2000:700] == whole[1:2000:700]
    for index in (0, -1, len(whole) // 2):
        if whole:
            assert packed[index] == whole[index]
    for index in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            packed[index]


def test_events_stay_what_they_are() -> None:
    packed = PackedEvents()
    packed.extend(EVENTS * PIECE)
    assert list(packed) == EVENTS * PIECE
    assert isinstance(packed[0], Stored) and packed[0].extra_keys == [("a", 1), None]


def test_a_clear_is_known_without_a_look_at_the_events() -> None:
    packed, other = PackedEvents(), PackedEvents()
    packed.extend(EVENTS * PIECE)
    assert not restates(packed) and not restates(list(packed))
    other.append(Cleared())
    packed.extend(other)
    assert restates(packed) and restates(list(packed))
