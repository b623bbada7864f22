"""Events through the block manager: the seed's three tests on a real pool, and the mirror after every iteration."""

import random

import pytest

from kvyard.blocks import BlockManager, GroupSpec, Hints, Request, Retention
from kvyard.events import Batcher, Cleared, Mirror, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder
from kvyard.hashing import TokenChain, algorithm, wire_hash

XXH3 = algorithm("xxh3")
SHA256 = algorithm("sha256")
BLOCK = 4


class Stage:
    """A manager whose events go through a batcher."""

    def __init__(self, num_blocks: int, groups: list[GroupSpec], **options) -> None:
        self.batcher = Batcher([spec.meta for spec in groups], snapshot=self.snapshot)
        self.manager = BlockManager(num_blocks, groups, sink=self.batcher, **options)
        self.serial = 0

    def snapshot(self):
        return self.manager.pool.snapshot()

    def admit(self, tokens: list[int], new: int | None = None, **options) -> Request:
        self.serial += 1
        request = Request(f"r{self.serial}", TokenChain(tokens, BLOCK, XXH3), **options)
        hit = self.manager.lookup(request)
        assert self.manager.allocate(request, new or len(tokens) - hit.tokens, hit) is not None
        return request

    def run_through(self, tokens: list[int], **options) -> Request:
        request = self.admit(tokens, **options)
        self.manager.free(request)
        return request

    def drain(self) -> list:
        batch = self.batcher.end_iteration(0)
        return list(batch.events) if batch is not None else []


def kinds(events: list) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.group) for event in events]


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def test_removed_batched_within_window():
    # The third request needs every block there is, whatever is cached in them.
    pool = blocks_for(15)
    stage = Stage(pool + 1, [GroupSpec(kind="sliding_window", window=32, block_size=BLOCK)])
    gone = [stage.run_through([start + at for at in range(5)]).chain.keys[0] for start in (100, 200)]
    stage.drain()
    stage.admit(list(range(15)))
    removed = [event for event in stage.drain() if isinstance(event, Removed)]
    assert len(removed) == 1
    assert sorted(removed[0].hashes) == sorted(gone)


def test_removed_ordered_before_store():
    # One block fewer than both requests need together, and the wish decides which one goes: the head, not the tail.
    first, second = list(range(100, 109)), list(range(9))
    pool = blocks_for(9) + 1
    stage = Stage(pool + 1, [GroupSpec(kind="sliding_window", window=32, block_size=BLOCK)], eviction="priority")
    wishes = [Retention(0, 4, priority=0), Retention(4, None, priority=80)]
    victim = stage.run_through(first, hints=Hints(retention=tuple(wishes))).chain.keys[0]
    stage.drain()
    stage.admit(second)
    events = stage.drain()
    assert kinds(events) == [("Removed", 0), ("Stored", 0)]
    assert events[0].hashes == [victim]


def test_store_for_different_window_does_not_flush_pending_removes():
    # Under retention 0 the window registers only where a resend resumes, so a first chunk stores in the full group alone.
    groups = [GroupSpec(block_size=BLOCK), GroupSpec(kind="sliding_window", window=4, block_size=BLOCK)]
    prompt, chunk = 33, 12
    pool = 2 * blocks_for(chunk)
    stage = Stage(pool + 1, groups, retention_interval=0)
    stage.run_through(list(range(100, 109)))
    assert {event.group for event in stage.drain()} == {0, 1}
    stage.admit(list(range(prompt)), new=chunk)
    assert kinds(stage.drain()) == [("Removed", 0), ("Stored", 0), ("Removed", 1)]


GROUP_SETS = {
    "full": [GroupSpec(block_size=BLOCK)],
    "full+window": [GroupSpec(block_size=BLOCK), GroupSpec(kind="sliding_window", window=10, block_size=BLOCK)],
    "full+state": [GroupSpec(block_size=BLOCK), GroupSpec(kind="mamba", mode="all", block_size=BLOCK)],
    "sizes": [GroupSpec(block_size=2 * BLOCK), GroupSpec(kind="sliding_window", window=9, block_size=BLOCK)],
    "fine": [GroupSpec(block_size=2 * BLOCK), GroupSpec(kind="mamba", block_size=2 * BLOCK)],
}


class Walk:
    """Random requests on a small pool: admitted, grown, released, preempted, evicted by id, and now and then a reset."""

    def __init__(self, name: str, seed: int, digests: bool) -> None:
        self.rng = random.Random(seed)
        self.algorithm = SHA256 if digests else XXH3
        groups = GROUP_SETS[name]
        options = {"hash_block_size": BLOCK} if name == "fine" else {}
        self.stage = Stage(
            30, groups, retention_interval=self.rng.choice([None, 0]) if len(groups) > 1 else None, **options
        )
        self.live: list[Request] = []
        self.families = [[1000 * f + i for i in range(40)] for f in range(3)]

    def step(self) -> None:
        rng, manager = self.rng, self.stage.manager
        manager.begin_step()
        roll = rng.random()
        if roll < 0.45 or not self.live:
            self.admit()
        elif roll < 0.75:
            self.grow(rng.choice(self.live))
        elif roll < 0.95:
            manager.free(self.live.pop(rng.randrange(len(self.live))))
        elif roll < 0.98:
            manager.evict(rng.sample(range(1, 30), 3))
        else:
            for request in self.live:
                manager.preempt(request)
            self.live.clear()
            manager.reset()
        manager.take_copies()
        manager.check_integrity()

    def admit(self) -> None:
        self.stage.serial += 1
        tokens = self.rng.choice(self.families)[: self.rng.randrange(30)] + [self.rng.randrange(9) for _ in range(1, 6)]
        request = Request(f"r{self.stage.serial}", TokenChain(tokens, BLOCK, self.algorithm))
        hit = self.stage.manager.lookup(request)
        if self.stage.manager.allocate(request, request.num_tokens - hit.tokens, hit) is not None:
            request.num_computed_tokens = request.num_tokens
            request.running = True
            self.live.append(request)

    def grow(self, request: Request) -> None:
        count = self.rng.randrange(1, 6)
        request.append([self.rng.randrange(9) for _ in range(count)])
        if self.stage.manager.allocate(request, count) is None:
            self.live.remove(request)
            self.stage.manager.free(request)
        else:
            request.num_computed_tokens += count

    def held(self, wire: bool) -> dict:
        places: dict = {}
        for group, key, _ in self.stage.manager.pool.cached_blocks():
            places.setdefault((group, Tier.G1), set()).add(wire_hash(key) if wire else key)
        return places


@pytest.mark.parametrize("digests", [False, True], ids=["xxh3", "sha256"])
@pytest.mark.parametrize("dialect", [None, "vllm", "vllm-array", "trtllm"])
@pytest.mark.parametrize("name", GROUP_SETS)
def test_mirror_equals_the_map_after_every_iteration(name, dialect, digests):
    if dialect == "trtllm" and name in ("sizes", "fine"):
        pytest.skip("TensorRT-LLM's wire tells groups apart by window and has one block size")
    walk = Walk(name, seed=7, digests=digests)
    mirror = Mirror()
    narrow = dialect in ("vllm", "vllm-array")
    metas = [spec.meta for spec in GROUP_SETS[name]]
    encoder = Encoder(dialect, groups=metas) if dialect else None
    decoder = Decoder()
    for _ in range(250):
        for _ in range(walk.rng.randrange(1, 4)):
            walk.step()
        batch = walk.stage.batcher.end_iteration(0)
        if batch is not None:
            events = batch.events
            if encoder is not None:
                decoded = decoder.decode(encoder.encode(batch))
                assert not decoded.problems
                events = decoded.events
            mirror.apply(events)
        held = walk.held(narrow)
        if dialect == "trtllm":
            assert {frozenset(keys) for keys in mirror.held.values()} == {frozenset(keys) for keys in held.values()}
        else:
            assert mirror.held == held
    assert not mirror.unknown
    assert not mirror.repeated


def test_a_resync_rebuilds_the_mirror():
    walk = Walk("full+window", seed=3, digests=False)
    for _ in range(120):
        walk.step()
    walk.stage.drain()
    batch = walk.stage.batcher.resync(0)
    assert isinstance(batch.events[0], Cleared)
    mirror = Mirror()
    mirror.apply(batch.events)
    assert mirror.held == walk.held(False)
    known: dict[int, set] = {0: set(), 1: set()}
    for event in batch.events[1:]:
        assert isinstance(event, Stored)
        known[event.group].update(event.hashes)
        if event.group == 0 and event.parent is not None:
            assert event.parent in known[0], "a parent comes before its children"
