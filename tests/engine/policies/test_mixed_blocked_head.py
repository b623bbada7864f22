"""A head of the queue that was refused is asked again only when something has changed for it."""

from __future__ import annotations

import pytest

from kvyard.engine.job import Job
from kvyard.engine.policies.mixed import BlockedHead
from kvyard.hashing import TraceChain


def job(*ids: int, length: int = 1024) -> Job:
    return Job(str(ids), TraceChain(ids, 512, length, 512, 0), 1)


@pytest.fixture
def refused():
    """Remembers a job whose first block is cached and which found 3 blocks free."""
    head, memory = job(1, 2), BlockedHead()
    memory.begin_pass()
    memory.remember(head, 512, 3)
    memory.begin_pass()
    return head, memory


def test_a_blocked_head_stays_refused_from_pass_to_pass(refused):
    head, memory = refused
    assert memory.still(head, 3, [])
    memory.begin_pass()
    assert memory.still(head, 2, [(job(5, 6), 512, 0)])


def test_more_free_blocks_are_worth_asking(refused):
    head, memory = refused
    assert not memory.still(head, 4, [])


def test_another_head_is_worth_asking(refused):
    _, memory = refused
    assert not memory.still(job(1, 2), 3, [])


def test_so_is_one_whose_next_block_is_being_computed(refused):
    head, memory = refused
    assert not memory.still(head, 3, [(job(1, 2, 3, length=1536), 512, 512)])


def test_a_blocked_head_is_forgotten_after_a_pass(refused):
    head, memory = refused
    memory.begin_pass()
    assert not memory.still(head, 3, [])
