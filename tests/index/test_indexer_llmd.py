"""The cases of llm-d's tests of its event pool and index (``pkg/kvevents``, ``pkg/kvcache/kvblock``), for our index.

Those of its engine adapters are in ``tests/events/wire/test_decoder.py``.
"""

from __future__ import annotations

import pytest
from tests.index.support import Bench, nameless, removed, stored

from kvyard.blocks import GroupSpec
from kvyard.events.types import Tier

TEXT = list(range(100, 132))


@pytest.mark.parametrize(
    ("engine", "index"), [(4, 4), (4, 8), (8, 4)], ids=["one to one", "many to one", "one to many"]
)
class TestBlockSizes:
    def test_stored(self, engine: int, index: int) -> None:
        bench = Bench(index)
        bench.say(stored(TEXT, engine))
        assert bench.blocks(TEXT) == len(TEXT) // index

    def test_removed(self, engine: int, index: int) -> None:
        """A block of the index is gone with the first block of the engine's that it is made of."""
        bench = Bench(index)
        bench.say(stored(TEXT, engine))
        bench.say(removed(TEXT, engine, first=2, last=3))
        assert bench.blocks(TEXT) == 2 * engine // index
        bench.say(removed(TEXT, engine, first=0))
        assert bench.blocks(TEXT) == 0

    def test_stored_in_parts(self, engine: int, index: int) -> None:
        bench = Bench(index)
        for first in range(len(TEXT) // engine):
            bench.say(stored(TEXT, engine, first, first + 1))
        assert bench.blocks(TEXT) == len(TEXT) // index


def test_engines_with_other_block_sizes_are_scored_alike() -> None:
    bench = Bench(4, workers=("a", "b"))
    bench.say(stored(TEXT, 4))
    bench.say(stored(TEXT, 16), stream="b")
    assert bench.blocks(TEXT, "a") == bench.blocks(TEXT, "b") == 8


def test_tokens_that_fill_no_block_of_the_index_are_left_out() -> None:
    bench = Bench(16)
    bench.say(stored(TEXT[:24], 8))
    assert bench.blocks(TEXT) == 1


def test_a_block_that_nobody_announced_can_be_removed() -> None:
    bench = Bench(4)
    bench.say(stored(TEXT[:8], 4))
    bench.say(removed(TEXT[16:], 4))
    assert bench.blocks(TEXT) == 2


class TestOffloading:
    def test_known_blocks_without_tokens_are_on_the_host_too(self) -> None:
        bench = Bench(4)
        bench.say(stored(TEXT, 4))
        bench.say(nameless(TEXT, 4, tier=Tier.G2))
        bench.say(removed(TEXT, 4))
        assert bench.by_tier(TEXT) == {"G2": 8}
        bench.say(removed(TEXT, 4, tier=Tier.G2))
        assert bench.blocks(TEXT) == 0

    def test_unknown_blocks_without_tokens_are_nowhere(self) -> None:
        bench = Bench(4)
        bench.say(nameless(TEXT, 4, tier=Tier.G2))
        assert bench.blocks(TEXT) == 0

    def test_leaving_the_host_first_changes_nothing_on_the_device(self) -> None:
        bench = Bench(4)
        bench.say(stored(TEXT, 4))
        bench.say(nameless(TEXT, 4, tier=Tier.G2))
        bench.say(removed(TEXT, 4, tier=Tier.G2))
        assert bench.by_tier(TEXT) == {"G1": 8}


class TestGroups:
    GROUPS = (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", block_size=4, window=8))

    def test_a_prefix_needs_all_groups(self) -> None:
        bench = Bench(4, groups=self.GROUPS)
        bench.say(stored(TEXT, 4, group=0))
        assert bench.blocks(TEXT) == 0
        bench.say(stored(TEXT, 4, group=1))
        assert bench.blocks(TEXT) == 8

    def test_a_block_leaves_one_group_alone(self) -> None:
        bench = Bench(4, groups=self.GROUPS)
        bench.say(stored(TEXT, 4, group=0), stored(TEXT, 4, group=1))
        bench.say(removed(TEXT, 4, first=7, group=1))
        assert bench.blocks(TEXT) == 7
        bench.say(removed(TEXT, 4, group=0))
        assert bench.blocks(TEXT) == 0


class TestClearing:
    def test_others_keep_what_they_have(self) -> None:
        bench = Bench(4, workers=("a", "b"))
        bench.say(stored(TEXT, 4))
        bench.say(stored(TEXT, 4), stream="b")
        bench.clear()
        assert (bench.blocks(TEXT, "a"), bench.blocks(TEXT, "b")) == (0, 8)

    def test_every_tier_goes_and_can_come_back(self) -> None:
        bench = Bench(4, clear_scope="all")
        bench.say(stored(TEXT, 4))
        bench.say(nameless(TEXT, 4, tier=Tier.G2))
        bench.clear()
        assert bench.blocks(TEXT) == 0
        bench.say(stored(TEXT[:16], 4))
        assert bench.by_tier(TEXT) == {"G1": 4}


def test_a_block_stored_twice_is_there_until_both_copies_are_gone() -> None:
    """In llm-d's index one removal is enough; vLLM keeps two copies of a block and announces each removal."""
    bench = Bench(4)
    bench.say(stored(TEXT[:8], 4))
    bench.say(stored(TEXT[:8], 4))
    bench.say(removed(TEXT[:8], 4))
    assert bench.blocks(TEXT) == 2
    bench.say(removed(TEXT[:8], 4))
    assert bench.blocks(TEXT) == 0
