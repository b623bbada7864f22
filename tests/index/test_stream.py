"""Updates of a stream in the index: which replace all before them, and the weight of each state (I12)."""

from __future__ import annotations

import pytest
from tests.index.support import Bench, removed, stored

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Tier
from kvyard.index import Holder, Identity, Indexer, Source

TEXT = list(range(100, 116))


class TestSource:
    def test_speaks_for_a_worker_or_a_pool(self) -> None:
        with pytest.raises(KvyardError, match="either a worker or a pool"):
            Source(stream="s")
        with pytest.raises(KvyardError, match="either a worker or a pool"):
            Source(stream="s", worker="a", pool="p")

    def test_d18_settings_that_do_nothing_are_refused(self) -> None:
        with pytest.raises(KvyardError, match="clear_scope"):
            Source(stream="s", worker="a", clear_scope="some")

    def test_one_name_is_registered_once(self) -> None:
        indexer = Indexer()
        indexer.register(Source(stream="s", worker="a"))
        indexer.register(Source(stream="s", worker="a"))
        with pytest.raises(KvyardError, match="registered already"):
            indexer.register(Source(stream="s", worker="b"))


class TestStream:
    def test_a_restart_empties_every_tier(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2))
        bench.say(Cleared(), seq=-1, origin=Origin.RESET, epoch=1, state=State.CATCHING_UP)
        assert bench.indexer.backend.usage().blocks == 0
        bench.say(stored(TEXT, 4, 0, 1), seq=0, epoch=1)
        assert bench.blocks(TEXT) == 1

    def test_a_snapshot_replaces_all(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2))
        bench.say(Cleared(), stored(TEXT, 4, 0, 3), seq=8, origin=Origin.SNAPSHOT, state=State.CATCHING_UP)
        assert bench.blocks(TEXT) == 0
        bench.say(seq=8, origin=Origin.STATE)
        assert bench.by_tier(TEXT) == {"G1": 3}
        bench.say(removed(TEXT, 4, 0, 3), seq=9)
        assert bench.blocks(TEXT) == 0

    def test_a_clear_can_be_of_the_device_only(self) -> None:
        bench = Bench(clear_scope="device")
        bench.say(stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2))
        bench.say(Cleared())
        assert bench.by_tier(TEXT) == {"G2": 4}

    def test_state_decides_over_credit(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4))
        for state, blocks in ((State.STALE, 0), (State.CATCHING_UP, 0), (State.FRESH, 4)):
            bench.say(seq=0, origin=Origin.STATE, state=state, reason="so it is")
            assert bench.blocks(TEXT) == blocks

    def test_one_stale_stream_of_a_worker_does_not_discredit_the_other(self) -> None:
        bench = Bench()
        bench.indexer.register(Source(stream="connector", worker="a"))
        bench.say(stored(TEXT, 4, 0, 2))
        bench.say(stored(TEXT, 4, tier=Tier.G2), stream="connector")
        assert bench.by_tier(TEXT) == {"G1": 2, "G2": 2}
        bench.say(seq=0, origin=Origin.STATE, state=State.STALE, reason="lost", stream="connector")
        assert bench.by_tier(TEXT) == {"G1": 2}
        match = bench.indexer.score(TEXT).workers[Holder("a")]
        assert (match.state, match.confidence, match.reason) == (State.STALE, 1.0, "lost")

    def test_an_unreported_loss_lasts_until_all_is_replaced(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4))
        bench.indexer.lose("a", "the listener died")
        bench.say(stored(TEXT, 4))
        bench.say(seq=1, origin=Origin.STATE)
        assert bench.blocks(TEXT) == 0
        assert bench.indexer.score(TEXT).workers[Holder("a")].reason == "the listener died"
        bench.say(Cleared(), stored(TEXT, 4, 0, 3), seq=2, origin=Origin.SNAPSHOT)
        assert bench.blocks(TEXT) == 3

    def test_age_is_that_of_the_quietest_stream(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4))
        assert bench.indexer.score(TEXT, now=7 * SECOND).workers[Holder("a")].age == 7 * SECOND


def test_a_worker_is_as_old_as_the_quietest_of_its_streams() -> None:
    indexer = Indexer(Identity(4))
    for stream in ("device", "offload"):
        indexer.register(Source(stream=stream, worker="a"))
    said = {"topic": "", "seq": 0, "epoch": 0, "origin": Origin.LIVE, "state": State.FRESH, "dialect": "map"}
    tokens = list(range(9))
    indexer.apply(Update(stream="device", events=[stored(tokens, 4)], **said), 100)
    indexer.apply(Update(stream="offload", events=[stored(tokens, 4, tier=Tier.G2)], **said), 250)
    for _ in range(2):  # as it is found out, and as it is brought up to date
        assert indexer.score(tokens, now=300).workers[Holder("a")].age == 200
    indexer.apply(Update(stream="device", events=[], **{**said, "seq": 1}), 290)
    assert indexer.score(tokens, now=300).workers[Holder("a")].age == 50


def test_so_is_one_of_which_nothing_is_stored_yet() -> None:
    indexer = Indexer(Identity(4))
    said = {"topic": "", "seq": 0, "epoch": 0, "origin": Origin.LIVE, "state": State.FRESH, "dialect": "map"}
    for stream, at in (("device", 100), ("offload", 250)):
        indexer.register(Source(stream=stream, worker="a"))
        indexer.apply(Update(stream=stream, events=[], **said), at)
    assert indexer.score(list(range(9)), now=300).workers[Holder("a")].age == 200
