"""A link between two workers is a link like any other: sources are pinned, destinations reserved, bandwidth is shared."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.tiers.support import BLOCK, Worker, link, tiers

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.integrity import check_pool
from kvyard.blocks.spec import ConfigError
from kvyard.events import Batcher, Mirror
from kvyard.events.types import Tier
from kvyard.hashing import TokenChain, algorithm
from kvyard.tiers import Timeline
from kvyard.tiers.copies import WorkerLink
from kvyard.tiers.store import PageRange

HASH = algorithm("sha256")


class Side:
    """A worker's device: a block manager whose events are mirrored."""

    def __init__(self, blocks: int = 20) -> None:
        group = GroupSpec(block_size=4)
        self.batcher = Batcher([group.meta])
        self.manager = BlockManager(blocks, [group], sink=self.batcher)
        self.pool = self.manager.pool
        self.mirror = Mirror()

    def compute(self, name: str, tokens: range) -> Request:
        request = Request(name, TokenChain(tokens, 4, HASH))
        assert self.manager.allocate(request, len(tokens)) is not None
        request.num_computed_tokens = len(tokens)
        return request

    def check(self) -> None:
        batch = self.batcher.end_iteration(0)
        if batch is not None:
            self.mirror.apply(batch.events)
        cached = {key for _, key, _ in self.pool.cached_blocks()}
        assert self.mirror.held.get((0, Tier.G1), set()) == cached, "I4: the mirror is not the map"
        owned = [extent for request in self.manager.requests.values() for table in request.tables for extent in table]
        check_pool(self.pool, Counter(owned + [extent for held in self.pool.holds.tables for extent in held]))


class Pair:
    """Two workers on one time line."""

    def __init__(self, discipline: str = "fair", receiver: int = 20) -> None:
        self.sides = {"w0": Side(), "w1": Side(receiver)}
        self.timeline = Timeline()
        pools = (self.sides["w0"].pool, self.sides["w1"].pool)
        self.link: WorkerLink = self.timeline.connect(("w0", "w1"), pools, link(discipline=discipline))

    def send(self, now: int, sender: str, request: Request, start: int, stop: int) -> bool:
        piece = PageRange(0, request.chain, start, stop)
        sent = self.link.send(now, sender, piece, request.tables[0].settle(), BLOCK)
        self.check()
        return sent is not None

    def advance(self, now: int) -> None:
        self.timeline.advance(now)
        self.check()

    def check(self) -> None:
        self.timeline.check_integrity()
        for side in self.sides.values():
            side.check()


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_what_was_sent_is_found_where_it_went(discipline: str) -> None:
    pair = Pair(discipline)
    here, there = pair.sides["w0"], pair.sides["w1"]
    request = here.compute("r", range(40))
    assert pair.send(0, "w0", request, 0, 10)
    here.manager.free(request)
    assert here.pool.free == 9, "pinned, though its request has gone"
    assert there.pool.free == 9, "reserved"
    pair.advance(9_999)
    assert there.manager.lookup(Request("s", TokenChain(range(41), 4, HASH))).tokens == 0, "not before it has landed"
    assert pair.timeline.earliest() == 10_000
    pair.advance(10_000)
    assert here.pool.free == there.pool.free == 19
    assert there.manager.lookup(Request("s", TokenChain(range(41), 4, HASH))).tokens == 40
    assert [copy.blocks for copy in pair.link.inboxes["w1"]] == [10] and not pair.link.inboxes["w0"]


def test_both_directions_at_once_and_shared_bandwidth() -> None:
    pair = Pair()
    there, back = pair.sides["w0"].compute("a", range(40)), pair.sides["w1"].compute("b", range(100, 120))
    assert pair.send(0, "w0", there, 0, 4) and pair.send(0, "w0", there, 4, 8) and pair.send(0, "w1", back, 0, 5)
    pair.advance(5_000)
    assert len(pair.link.inboxes["w0"]) == 1 and not pair.link.inboxes["w1"]
    pair.advance(8_000)
    assert [copy.ended for copy in pair.link.inboxes["w1"]] == [8_000, 8_000], "each had half of the bandwidth"


def test_without_room_nothing_is_sent_and_nothing_held() -> None:
    pair = Pair(receiver=5)
    request = pair.sides["w0"].compute("r", range(40))
    assert not pair.send(0, "w0", request, 0, 5)
    assert not pair.sides["w0"].pool.holds.tables and pair.timeline.earliest() is None
    assert pair.send(0, "w0", request, 0, 4)


@pytest.mark.parametrize("failing", ["w0", "w1"])
def test_a_worker_that_fails_mid_transfer_leaves_nothing_held(failing: str) -> None:
    pair = Pair()
    request = pair.sides["w0"].compute("r", range(40))
    assert pair.send(0, "w0", request, 0, 3) and pair.send(0, "w0", request, 3, 10)
    pair.advance(6_000)
    assert len(pair.link.inboxes["w1"]) == 1
    pair.timeline.fail(failing, 7_000)
    pair.check()
    assert not pair.sides["w0"].pool.holds.tables and not pair.sides["w1"].pool.holds.tables
    assert pair.timeline.earliest() is None
    assert pair.sides["w1"].manager.lookup(Request("s", TokenChain(range(41), 4, HASH))).tokens == 12


def test_one_link_between_two_workers() -> None:
    pair = Pair()
    pools = (pair.sides["w1"].pool, pair.sides["w0"].pool)
    with pytest.raises(ConfigError, match="have a link already"):
        pair.timeline.connect(("w1", "w0"), pools, link())
    with pytest.raises(ConfigError, match="are one worker"):
        pair.timeline.connect(("w2", "w2"), pools, link())


def test_copies_between_workers_and_to_tiers_are_counted_separately() -> None:
    """A device that is copied to its host and to another worker at once; what neither asked for is found."""
    here, there = Worker(tiers(), name="w0"), Worker(tiers(), name="w1")
    pools = (here.manager.pool, there.manager.pool)
    made = Timeline().connect(("w0", "w1"), pools, link())
    for worker in (here, there):
        worker.offload.connect(made)
    request = here.make("r", range(40))
    assert here.manager.allocate(request, 40) is not None
    request.num_computed_tokens = 40
    here.offload.offload(request, 0)
    assert made.send(0, "w0", PageRange(0, request.chain, 0, 10), request.tables[0].settle(), BLOCK) is not None
    for worker in (here, there):
        worker.offload.check_integrity()
    made.advance(10_000)
    here.offload.tick(10_000)
    for worker in (here, there):
        worker.offload.check_integrity()
        assert not worker.manager.pool.holds.tables
    stray = there.manager.pool.holds.take(2, 0)
    with pytest.raises(AssertionError, match="I6: a hold on the device without a copy"):
        there.offload.check_integrity()
    there.manager.pool.holds.end(stray)
    with pytest.raises(ConfigError, match="doesn't end at the device of w2"):
        Worker(tiers(), name="w2").offload.connect(made)
