"""Allocation: who may have which blocks, and calls that are refused."""

import pytest

from kvyard.blocks import BlockManager, GroupSpec, Request, RequestError
from kvyard.hashing import TokenChain, algorithm

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


def test_the_result_of_a_step_without_new_blocks_is_immutable():
    manager = BlockManager(100)
    request = make("a", range(20))
    assert manager.allocate(request, 20) is not None
    request.num_computed_tokens, request.running = 20, True
    for _ in range(2):
        request.append([1])
        taken = manager.allocate(request, 1)
        request.num_computed_tokens += 1
    assert taken == ((),)
