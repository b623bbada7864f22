"""Feeds: from events to rows. Numbers such as D11 are those of the defects of llm-d's index, which must not be ours."""

from __future__ import annotations

import logging

import msgspec
import pytest
from tests.index.support import ENGINE, Bench, hashes_of, nameless, removed, stored

from kvyard.errors import KvyardError
from kvyard.events.types import Removed, Stored, Tier
from kvyard.events.wire import decode
from kvyard.hashing import Namespace
from kvyard.index import Holder, Identity, IdentityError
from kvyard.index.feed import FeedCounters

TEXT = list(range(1000, 1128))
SHORT = list(range(100, 116))


def raw(events: list[object], *rest: object) -> bytes:
    return msgspec.msgpack.encode([1.5, events, *rest])


def counters(bench: Bench) -> FeedCounters:
    ((_, feed),) = bench.indexer.feeds()
    return feed.counters


def test_d1_one_bad_event_costs_itself_only() -> None:
    bench = Bench()
    good = ["BlockStored", [11], None, [1, 2, 3, 4], 4]
    bench.say(*decode(raw([["Mystery", 1], good], None)).events)
    assert bench.blocks([1, 2, 3, 4]) == 1


def test_d2_small_integers_are_hashes() -> None:
    bench = Bench()
    first, second = ["BlockStored", [1], None, [1, 2, 3, 4], 4], ["BlockStored", [2], 1, [5, 6, 7, 8], 4]
    bench.say(*decode(raw([first, second], None)).events)
    assert bench.blocks([1, 2, 3, 4, 5, 6, 7, 8]) == 2


def test_d9_batches_of_two_elements() -> None:
    bench = Bench()
    bench.say(*decode(raw([["BlockStored", [11], None, [1, 2, 3, 4], 4]])).events)
    assert bench.blocks([1, 2, 3, 4]) == 1


class Shy(int):
    """A number that mustn't be made into text."""

    def __repr__(self) -> str:
        raise AssertionError("formatted")

    __str__ = __repr__
    __format__ = __repr__  # type: ignore[assignment]


def test_d11_nothing_is_formatted_on_the_hot_path(caplog: pytest.LogCaptureFixture) -> None:
    """Stores, repetitions, removals, orphans, lookups: with logging at its default no hash or token becomes text."""
    with caplog.at_level(logging.INFO):
        bench = Bench()
        names = [Shy(int.from_bytes(key[-8:], "big")) for key in hashes_of(SHORT, 4)]
        tokens = [Shy(token) for token in SHORT]
        for at in (2, 0, 0):
            parent = names[at - 1] if at else None
            bench.say(Stored(hashes=names[at:], parent=parent, tokens=tokens[4 * at :], block_size=4))
        bench.say(Stored(hashes=names, parent=None, tokens=None, block_size=0, tier=Tier.G2))
        bench.say(Removed(hashes=names), Removed(hashes=names[3:]), Removed(hashes=[Shy(7)]))
        assert bench.blocks(tokens) == 4
        assert bench.indexer.score(tokens).workers[Holder("a")].tokens == 12
        assert bench.indexer.dedup.counters.suppressed
    assert not caplog.records


def test_a_store_that_lists_a_hash_twice_is_refused_and_the_next_is_not() -> None:
    """It would name two texts by one hash. Nothing of it is applied, and the stream goes on."""
    bench = Bench()
    bench.say(
        Stored(hashes=[1, 1], parent=None, tokens=[1, 2, 3, 4, 1, 2, 3, 4], block_size=4),
        Stored(hashes=[2, 3, 2], parent=None, tokens=list(range(12)), block_size=4),
        Stored(hashes=[5], parent=None, tokens=[5, 6, 7, 8], block_size=4),
    )
    assert counters(bench).refused == 5 and "twice" in counters(bench).last_refusal
    assert bench.blocks([1, 2, 3, 4]) == bench.blocks(list(range(12))) == 0
    assert bench.blocks([5, 6, 7, 8]) == 1


def test_no_group_is_not_group_zero() -> None:
    """A removal that names no group doesn't take what group 0 announced."""
    bench = Bench()
    bench.say(stored(SHORT, 4, group=0, kind="full_attention"))
    bench.say(removed(SHORT, 4))
    assert bench.blocks(SHORT) == 4
    bench.say(removed(SHORT, 4, group=0))
    assert bench.blocks(SHORT) == 0


def test_a_tier_update_of_half_known_hashes_counts_that_half() -> None:
    bench = Bench()
    bench.say(stored(SHORT, 4, 0, 2))
    for _ in range(2):
        bench.say(nameless(SHORT, 4, 0, 4, tier=Tier.G2))
    assert bench.indexer.dedup.outstanding == 2


class TestDirect:
    """Where the engine's hash can be computed, its names are ours."""

    def bench(self) -> Bench:
        return Bench(identity=Identity(4, ENGINE, direct=True))

    def test_names_meet_without_tokens_or_parents(self) -> None:
        bench = self.bench()
        bench.say(nameless(TEXT, 4, 0, 3), nameless(TEXT, 4, 0, 3), removed(TEXT, 4, 2, 3))
        assert bench.blocks(TEXT) == 3
        bench.say(removed(TEXT, 4, 2, 3))
        assert bench.blocks(TEXT) == 2

    def test_a_list_that_repeats_itself_counts_each_mention(self) -> None:
        bench = self.bench()
        name = hashes_of(TEXT, 4)[0]
        bench.say(Stored(hashes=[name, name], parent=None, tokens=None, block_size=0))
        bench.say(Removed(hashes=[name]))
        assert bench.blocks(TEXT) == 1
        bench.say(Removed(hashes=[name]))
        assert bench.blocks(TEXT) == 0

    def test_adapters_and_other_block_sizes_are_refused(self) -> None:
        bench = self.bench()
        bench.say(stored(TEXT, 4, lora_name="poet"), stored(TEXT, 8))
        assert bench.blocks(TEXT) == 0
        with pytest.raises(IdentityError, match="adapter"):
            bench.indexer.identity.keys(TEXT, Namespace(lora_name="poet"))
        with pytest.raises(KvyardError, match="integers"):
            Identity(4, ENGINE)


def test_blocks_of_an_unnamed_adapter_belong_to_no_base_model() -> None:
    """Engines from before adapters had names in events say a number."""
    bench = Bench()
    bench.say(stored(TEXT, 4, lora_id=3))
    assert bench.blocks(TEXT) == 0 and bench.blocks(TEXT, namespace=Namespace(lora_name="3")) == 0
    bench.say(stored(SHORT, 4, lora_id=3, lora_name="poet"), stored(list(range(50, 66)), 4, lora_id=0))
    assert bench.blocks(SHORT, namespace=Namespace(lora_name="poet")) == 4 and bench.blocks(SHORT) == 0
    assert bench.blocks(list(range(50, 66))) == 4, "0 is no adapter's number"
    direct = Bench(identity=Identity(4, ENGINE, direct=True))
    direct.say(stored(TEXT, 4, lora_id=3))
    assert direct.blocks(TEXT) == 0 and "adapter" in counters(direct).last_refusal


def test_an_unknown_medium_costs_its_announcement_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What was announced before and beside it holds, and the reason names the medium."""
    bench = Bench()
    bench.say(stored(TEXT, 4))
    other = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    good = {"type": "BlockStored", "block_hashes": [8], "parent_block_hash": None, "token_ids": [5, 6, 7, 8]}
    gone = {"type": "BlockRemoved", "block_hashes": hashes_of(TEXT, 4), "medium": "WARP_CORE"}
    decoded = decode(raw([other | {"block_size": 4, "medium": "WARP_CORE"}, good | {"block_size": 4}, gone], None))
    assert not decoded.lossy, "the stream goes on"
    with caplog.at_level(logging.WARNING):
        bench.say(*decoded.events, problems=decoded.problems)
    assert bench.blocks(TEXT) == 32 and bench.blocks([5, 6, 7, 8]) == 1 and bench.blocks([1, 2, 3, 4]) == 0
    assert counters(bench).refused == 2 and "'WARP_CORE'" in counters(bench).last_refusal
    assert "'WARP_CORE'" in caplog.text
    bench.say(problems=decoded.problems)
    assert counters(bench).refused == 4
