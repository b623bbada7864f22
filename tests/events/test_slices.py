"""Slices of events say what the whole said."""

from __future__ import annotations

import random

import pytest
from tests.index.support import Bench, hashes_of

from kvyard.events.slices import blocks_of, slices
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.index.stream import in_slices


def stream(rng: random.Random) -> list[Event]:
    text = [rng.randrange(1000) for _ in range(400)]
    names = hashes_of(text, 4)
    extras: list[tuple[object, ...] | None] = [None] * len(names)
    extras[50] = (("an image", 2),)
    return [
        Stored(hashes=names, parent=None, tokens=text, block_size=4, extra_keys=extras, salt="s", lora_name="l"),
        Stored(hashes=names[:30], parent=None, tokens=None, block_size=0, tier=Tier.G2),
        Removed(hashes=names[40:90]),
        Cleared(tier=Tier.G2),
        Stored(hashes=names[10:45], parent=names[9], tokens=text[40:180], block_size=4, tier=Tier.G2),
        Stored(hashes=names[60:90], parent=names[59], tokens=text[240:300], block_size=4, tier=Tier.G2),  # too few
    ]


@pytest.mark.parametrize("most", [1, 7, 64, 1000])
def test_slices_have_the_effect_of_the_whole(most: int) -> None:
    events = stream(random.Random(3))
    parts = list(slices(events, most))
    assert sum(map(blocks_of, parts)) == blocks_of(events)
    assert all(blocks_of(part) <= 2 * most for part in parts)
    whole, sliced = Bench(4), Bench(4)
    whole.say(*events)
    update = Update(
        stream="a", topic="", seq=0, epoch=0, origin=Origin.LIVE, state=State.FRESH, events=events, dialect="map"
    )
    states = []
    for part in in_slices(update, most):
        sliced.indexer.apply(part, 5)
        states.append(sliced.indexer.streams["a", ""].state)
    assert states == [State.CATCHING_UP] * (len(parts) - 1) + [State.FRESH]
    assert rows(whole) == rows(sliced) and rows(whole)
    sliced.indexer.check_integrity()


def rows(bench: Bench) -> dict[str, set[int]]:
    backend, places = bench.indexer.backend, bench.indexer.places
    return {
        f"{places[number].tier} {places[number].group}": {key for run in backend.held(number) for key in run}
        for numbers in places.of.values()
        for number in numbers
    }
