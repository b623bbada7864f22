"""Blocks of an ended request that a step in flight still writes to: held until they may go, in the order vLLM frees them."""

from __future__ import annotations

import pytest

from kvyard.blocks import BlockManager, GroupSpec, Request, RequestError
from kvyard.hashing import TokenChain, algorithm

SHA = algorithm("sha256_cbor")
GROUPS = (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=8, block_size=4))


def running(manager: BlockManager, name: str, tokens: int, first: int = 0) -> Request:
    request = Request(name, TokenChain(range(first, first + tokens), 4, SHA))
    assert manager.allocate(request, tokens, manager.lookup(request)) is not None
    request.num_computed_tokens, request.running = tokens, True
    return request


def test_detached_blocks_are_held_and_the_request_is_gone() -> None:
    manager = BlockManager(20, GROUPS)
    request = running(manager, "a", 10)
    free = manager.pool.free
    tables = manager.detach(request)
    assert manager.pool.free == free
    assert "a" not in manager.requests
    assert not request.running
    manager.check_integrity()
    manager.pool.holds.end_all(tables)
    assert manager.pool.free == 19
    manager.check_integrity()


def test_the_last_group_goes_first() -> None:
    one, other = BlockManager(20, GROUPS), BlockManager(20, GROUPS)
    at_once, later = running(one, "a", 10), running(other, "a", 10)
    ids = one.block_ids(at_once)
    assert ids == other.block_ids(later)
    one.free(at_once)
    other.pool.holds.end_all(other.detach(later))
    unnamed = [ids[1][2], ids[0][2]]
    assert list(other.pool.line())[:2] == unnamed
    assert list(one.pool.line())[:2] == unnamed  # both push unnamed blocks to the front, the last released first
    assert list(other.pool.line())[-4:] == [ids[1][1], ids[1][0], ids[0][1], ids[0][0]]
    assert list(one.pool.line())[-4:] == [ids[0][1], ids[0][0], ids[1][1], ids[1][0]]


def test_detached_blocks_can_be_hit_and_shared() -> None:
    manager = BlockManager(20, (GroupSpec(block_size=4),))
    request = running(manager, "a", 10)
    tables = manager.detach(request)
    again = Request("b", TokenChain(range(6), 4, SHA))
    hit = manager.lookup(again)
    assert hit.tokens == 4
    assert manager.allocate(again, 2, hit) is not None
    manager.pool.holds.end_all(tables)
    manager.check_integrity()
    manager.free(again)
    assert manager.pool.free == 19
    manager.check_integrity()


def test_a_request_that_holds_nothing_is_refused() -> None:
    manager = BlockManager(20, GROUPS)
    with pytest.raises(RequestError, match="holds no blocks here"):
        manager.detach(Request("a", TokenChain(range(4), 4, SHA)))
