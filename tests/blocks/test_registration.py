"""Registration: what it keeps alive, what it costs, and in how many pieces."""

import gc
import time

import pytest

from kvyard.blocks import BlockManager, GroupSpec, Hints, Request, Retention
from kvyard.hashing import TokenChain, algorithm

XXH3 = algorithm("xxh3")


def make(name: str, tokens) -> Request:
    return Request(name, TokenChain(tokens, 16, XXH3))


def cache(manager: BlockManager, tokens) -> None:
    request = make("earlier", tokens)
    assert manager.allocate(request, request.num_tokens, manager.lookup(request)) is not None
    manager.free(request)


def live_chains() -> int:
    gc.collect()
    return list(map(type, gc.get_objects())).count(TokenChain)


@pytest.mark.slow
@pytest.mark.usefixtures("only_new_objects")
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


@pytest.mark.usefixtures("only_new_objects")
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


def test_a_growing_request_with_retention_stays_one_extent():
    manager = BlockManager(1000, eviction="priority")
    request = Request("a", TokenChain(range(64), 16, XXH3), hints=Hints(retention=(Retention(0, None, 80),)))
    assert manager.allocate(request, 64) is not None
    request.num_computed_tokens, request.running = 64, True
    for token in range(400):
        request.append([token])
        assert manager.allocate(request, 1) is not None
        request.num_computed_tokens += 1
    assert len(request.tables[0].extents) <= 2
    assert request.tables[0].extents[0].priority == 80
