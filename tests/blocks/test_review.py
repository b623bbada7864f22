"""What a fresh pair of eyes found: each once went wrong, and must not again."""

import gc
import time

import pytest

from kvyard.blocks import BlockManager, GroupSpec, Request, RequestError, Retention
from kvyard.blocks.spec import ConfigError
from kvyard.hashing import TokenChain, TraceChain, algorithm

XXH3 = algorithm("xxh3")


def make(name: str, tokens) -> Request:
    return Request(name, TokenChain(tokens, 16, XXH3))


def cache(manager: BlockManager, tokens) -> None:
    request = make("earlier", tokens)
    assert manager.allocate(request, request.num_tokens, manager.lookup(request)) is not None
    manager.free(request)


@pytest.mark.parametrize("options", [{"caching": False}, {}])
def test_external_tokens_of_a_request_that_holds_blocks_are_not_adopted_twice(options):
    manager = BlockManager(100, **options)
    request = make("a", range(200))
    assert manager.allocate(request, 32, delay_caching=True) is not None
    request.num_computed_tokens = 32
    assert manager.allocate(request, 16, external=16) is not None
    manager.check_integrity()
    assert len(manager.block_ids(request)[0]) == 4


def test_a_hit_after_a_first_chunk_shorter_than_a_block_is_refused():
    manager = BlockManager(100)
    cache(manager, range(100))
    request = make("a", range(100))
    assert manager.allocate(request, 8) is not None
    with pytest.raises(RequestError, match="runs already"):
        manager.allocate(request, 8, manager.lookup(request))
    manager.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_a_surplus_of_states_does_not_hide_another_groups_need(caching):
    manager = BlockManager(7, [GroupSpec(), GroupSpec(kind="mamba", mode="align")], caching=caching)
    request = make("a", range(10))
    assert manager.allocate(request, 10) is not None
    request.num_computed_tokens = 10
    request.running = True
    request.append([1])
    assert manager.allocate(request, 40) is not None
    request.num_computed_tokens = 50
    manager.rollback(request, 39)
    answers = [manager.allocate(request, 1, lookahead=slots) for slots in range(0, 160, 8)]
    assert None in answers
    manager.check_integrity()


def test_a_refused_request_can_go_to_another_manager():
    small = BlockManager(3)
    hybrid = BlockManager(100, [GroupSpec(), GroupSpec(kind="sliding_window", window=64)])
    request = make("a", range(320))
    assert small.allocate(request, 320) is None
    assert small.allocate(request, 320, must_fit=True) is None
    taken = hybrid.allocate(request, 320)
    assert taken is not None
    assert [len(ids) for ids in taken] == [20, 20]


def test_a_request_of_another_manager_is_refused():
    one, other = BlockManager(100), BlockManager(100)
    request = make("a", range(15))
    assert one.allocate(request, 15) is not None
    request.num_computed_tokens, request.running = 15, True
    request.append([1, 2, 3])
    with pytest.raises(RequestError, match="another manager"):
        other.allocate(request, 3)
    one.check_integrity()


def test_a_hit_belongs_to_its_request():
    manager = BlockManager(100)
    cache(manager, range(100))
    found = manager.lookup(make("a", range(100)))
    with pytest.raises(RequestError, match="belongs to request a"):
        manager.allocate(make("b", range(100, 300)), 16, found)


def test_what_a_quiet_step_returns_cannot_be_spoiled():
    manager = BlockManager(100)
    request = make("a", range(20))
    assert manager.allocate(request, 20) is not None
    request.num_computed_tokens, request.running = 20, True
    for _ in range(2):
        request.append([1])
        taken = manager.allocate(request, 1)
        request.num_computed_tokens += 1
    assert taken == ((),)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "full", "window": 512},
        {"kind": "full", "chunk": 3},
        {"kind": "sliding_window", "window": 8, "mode": "all"},
        {"kind": "full", "spec_blocks": 4},
    ],
)
def test_options_of_another_kind_are_refused(spec):
    with pytest.raises(ConfigError):
        BlockManager(10, [GroupSpec(**spec)])


def test_wishes_that_cannot_be_honoured_are_refused():
    for start, stop, priority, duration in ((50, 10, 40, None), (0, 1, 101, None), (0, 1, 40, -4)):
        with pytest.raises(ConfigError):
            Retention(start, stop, priority, duration)
    lru, timeless = BlockManager(10), BlockManager(10, eviction="priority")
    chain = TokenChain(range(20), 16, XXH3)
    with pytest.raises(RequestError, match="priority"):
        lru.allocate(Request("a", chain, retention=[Retention(0, 16, 80)]), 20)
    with pytest.raises(RequestError, match="clock"):
        timeless.allocate(Request("a", chain, retention=[Retention(0, 16, 80, 5)]), 20)


def test_a_token_that_cannot_be_hashed_is_not_kept():
    chain = TokenChain(range(15), 16, XXH3)
    with pytest.raises(ValueError, match="token"):
        chain.append([-1])
    chain.append([15])
    assert chain.hashes(0, 1) == TokenChain(range(16), 16, XXH3).hashes(0, 1)
    with pytest.raises(ValueError, match="grows"):
        TraceChain([1], 512, 512, 16, own=1).grow(-1)


def live_chains() -> int:
    gc.collect()
    return sum(isinstance(thing, TokenChain) for thing in gc.get_objects())


def test_cached_windows_do_not_keep_whole_requests_alive():
    manager = BlockManager(
        4000, [GroupSpec(kind="sliding_window", window=32)], max_in_flight_tokens=4096, retention_interval=0
    )
    before = live_chains()
    for number in range(20):
        request = make(f"r{number}", range(10_000 * number, 10_000 * number + 4096))
        for _ in range(8):
            assert manager.allocate(request, 512) is not None
            request.num_computed_tokens += 512
            request.running = True
        manager.free(request)
    del request
    assert live_chains() == before
    manager.check_integrity()


def test_a_short_prefix_does_not_keep_a_long_prompt_alive():
    manager = BlockManager(1200)
    before = live_chains()
    for number in range(8):
        start = 100_000 * number
        cache(manager, range(start, start + 9000))
        # Sharing its head makes it a stretch of its own, and the most recent.
        cache(manager, [*range(start, start + 160), -1 % 2**32])
    assert live_chains() <= before + 3
    manager.check_integrity()


def seconds(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.slow
def test_registering_a_sparse_prompt_takes_time_by_its_length():
    def run(tokens: int) -> None:
        manager = BlockManager(3 * tokens // 16, [GroupSpec(kind="mamba", mode="all")], retention_interval=32)
        request = make("a", range(tokens))
        assert manager.allocate(request, tokens) is not None

    run(1000)
    assert seconds(lambda: run(80_000)) < 12 * seconds(lambda: run(20_000)) + 0.1


def test_a_growing_request_with_a_wish_stays_in_one_piece():
    manager = BlockManager(1000, eviction="priority")
    request = Request("a", TokenChain(range(64), 16, XXH3), retention=[Retention(0, None, 80)])
    assert manager.allocate(request, 64) is not None
    request.num_computed_tokens, request.running = 64, True
    for token in range(400):
        request.append([token])
        assert manager.allocate(request, 1) is not None
        request.num_computed_tokens += 1
    assert len(request.tables[0].extents) <= 2
    assert request.tables[0].extents[0].priority == 80


def test_memory_of_deadlines_follows_the_candidates():
    manager = BlockManager(100, eviction="priority", now=lambda: 0)
    for number in range(2000):
        request = Request(f"r{number}", TokenChain(range(33), 16, XXH3), retention=[Retention(0, None, 80, 10)])
        hit = manager.lookup(request)
        assert manager.allocate(request, 33 - hit.tokens, hit) is not None
        manager.free(request)
    assert len(manager.pool.order._deadlines) < 200
