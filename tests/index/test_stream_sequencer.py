"""Batches without a transport: what came before is dropped, what is missing makes the stream stale (I12)."""

from __future__ import annotations

from tests.index.support import removed, stored

from kvyard.events.transport import State
from kvyard.events.types import Cleared, Event, EventBatch, Tier
from kvyard.index import BatchSequencer, Holder, Identity, Indexer, Source

TEXT = list(range(100, 116))


class World:
    """An index that is told batches."""

    def __init__(self) -> None:
        self.indexer = Indexer(Identity(4))
        self.indexer.register(Source(stream="a", worker="a"))

    def say(self, seq: int, *events: Event, epoch: int = 0) -> None:
        self.indexer.apply_batch(EventBatch(stream="a", seq=seq, epoch=epoch, events=list(events)))
        self.indexer.check_integrity()

    def by_tier(self) -> dict[str, int]:
        match = self.indexer.score(TEXT).workers[Holder("a")]
        return {tier.name: found.blocks for tier, found in match.tiers.items()}


def test_a_gap_earns_nothing_however_many_batches_follow() -> None:
    world = World()
    world.say(0, stored(TEXT, 4))
    world.say(5, stored(TEXT, 4, tier=Tier.G2))
    match = world.indexer.score(TEXT).workers[Holder("a")]
    assert (match.tokens, match.state, match.confidence) == (0, State.STALE, 0)
    assert match.reason == "batches before 5 are missing"
    world.say(6, stored(TEXT, 4))
    assert world.by_tier() == {}


def test_a_clear_heals_it_on_every_tier() -> None:
    world = World()
    world.say(0, stored(TEXT, 4, tier=Tier.G2))
    world.say(7, Cleared(), stored(TEXT, 4, 0, 2))
    assert world.by_tier() == {"G1": 2}
    assert world.indexer.score(TEXT).workers[Holder("a")].state == State.FRESH


def test_a_clear_without_a_gap_empties_every_tier() -> None:
    world = World()
    world.say(0, stored(TEXT, 4, tier=Tier.G2))
    world.say(1, Cleared(), stored(TEXT, 4, 0, 2))
    assert world.by_tier() == {"G1": 2}


def test_joining_in_the_middle_earns_nothing() -> None:
    world = World()
    world.say(3, stored(TEXT, 4))
    assert world.by_tier() == {}


def test_a_batch_that_comes_again_does_not_count_again() -> None:
    """The seed's residual issue (b)."""
    world = World()
    for _ in range(3):
        world.say(0, stored(TEXT, 4))
    world.say(1, removed(TEXT, 4))
    assert world.by_tier() == {}


def test_a_late_batch_brings_nothing_back() -> None:
    world = World()
    world.say(0, stored(TEXT, 4))
    world.say(1, removed(TEXT, 4))
    world.say(0, stored(TEXT, 4))
    assert world.by_tier() == {}


def test_a_restart_empties_every_tier_and_what_was_before_it_is_dropped() -> None:
    world = World()
    world.say(0, stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2))
    world.say(0, stored(TEXT, 4, 0, 1), epoch=1)
    world.say(1, stored(TEXT, 4), epoch=0)
    assert world.by_tier() == {"G1": 1}


def test_parts_of_several_ranks_share_a_number() -> None:
    sequencer = BatchSequencer()
    batches = [EventBatch(stream="a", seq=0, rank=rank, events=[]) for rank in (0, 1, 1)]
    assert [sequencer.update(batch) is not None for batch in batches] == [True, True, False]


def test_a_stream_that_is_registered_again_begins_afresh() -> None:
    world = World()
    world.say(0)
    world.say(1)
    world.indexer.unregister("a")
    world.indexer.register(Source(stream="a", worker="a"))
    world.say(0, stored(TEXT, 4))
    assert world.by_tier() == {"G1": 3}
