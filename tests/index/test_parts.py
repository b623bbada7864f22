"""Blocks of ours that engine blocks cover only in part, or several of at once."""

from __future__ import annotations

from tests.index.support import Bench, nameless, removed, stored

from kvyard.events.types import Tier

TEXT = list(range(1000, 1128))


def test_d3_events_not_aligned_to_our_blocks() -> None:
    """Ours 64, the engine's 16: six blocks, then two more. Both of ours are indexed, each made of its own four."""
    bench = Bench(block_size=64)
    bench.say(stored(TEXT, 16, 0, 6))
    assert bench.blocks(TEXT) == 1
    bench.say(stored(TEXT, 16, 6, 8))
    assert bench.blocks(TEXT) == 2
    bench.say(removed(TEXT, 16, 4, 6))
    assert bench.blocks(TEXT) == 1
    bench.say(stored(TEXT, 16, 4, 6))
    assert bench.blocks(TEXT) == 2
    bench.say(removed(TEXT, 16, 7, 8))
    assert bench.blocks(TEXT) == 1
    bench.say(removed(TEXT, 16, 0, 1))
    assert bench.blocks(TEXT) == 0


def test_d4_a_tier_update_reaches_every_sub_block() -> None:
    bench = Bench(block_size=16)
    bench.say(stored(TEXT, 64))
    bench.say(nameless(TEXT, 64, tier=Tier.G2))
    bench.say(removed(TEXT, 64))
    assert bench.by_tier(TEXT) == {"G2": 8}
