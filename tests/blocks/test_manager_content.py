"""Whatever the manager does, each running request reads its own history in every group. See ``content.py``.

The other half of the file breaks the manager in ways that have happened elsewhere and wants the engine to notice, without
the help of ``check_integrity``.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.blocks.content import Corrupted, Engine, Traffic, first_seen, pool_for
from tests.blocks.support import FULL, WINDOW, XXH3, Interleaved

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.attention.chunked import ChunkRule
from kvyard.blocks.attention.state import StateRule
from kvyard.blocks.attention.window import WindowRule
from kvyard.blocks.extent import Extent
from kvyard.blocks.pool import Pool


def spec(kind: str, size: int = 4, **fields: Any) -> GroupSpec:
    return GroupSpec(kind=kind, block_size=size, **fields)


NARROW = spec("sliding_window", window=10)
CHUNK = spec("chunked_local", chunk=8)
ALL = spec("mamba", mode="all")
ALIGN = spec("mamba")
SPEC_ALIGN = spec("mamba", spec_blocks=3)

SETS: dict[str, tuple[list[GroupSpec], dict[str, Any], dict[str, Any]]] = {
    "full": ([FULL], {}, {}),
    "window": ([NARROW], {}, {}),
    "full+window": ([FULL, NARROW], {}, {}),
    "full+2windows": ([FULL, NARROW, spec("sliding_window", window=5)], {}, {}),
    "window-one": ([FULL, spec("sliding_window", window=1)], {}, {}),
    "mla+window-mla": ([spec("mla"), spec("sliding_window_mla", window=9)], {}, {}),
    "full+chunked": ([FULL, CHUNK], {}, {}),
    "full+states": ([FULL, ALL], {}, {}),
    "full+aligned": ([FULL, ALIGN], {}, {}),
    "full+window+aligned": ([FULL, NARROW, ALIGN], {}, {}),
    "mixed-sizes": ([spec("full", 8), spec("sliding_window", 2, window=7)], {}, {}),
    "inside-blocks": ([spec("full", 8), spec("mamba", 8)], {"hash_block_size": 2}, {}),
    "inside-blocks-drafts": ([spec("full", 8), spec("mamba", 8, spec_blocks=3)], {"hash_block_size": 4}, {"drafts": 3}),
    "drafts": ([FULL, NARROW], {}, {"drafts": 4}),
    "drafts-chunked": ([FULL, CHUNK], {}, {"drafts": 4}),
    "drafts-states": ([FULL, spec("mamba", mode="all", spec_blocks=3)], {}, {"drafts": 3}),
    "drafts-aligned": ([FULL, SPEC_ALIGN], {}, {"drafts": 3}),
    "eagle": ([FULL, NARROW], {"use_eagle": True}, {"drafts": 3}),
    "eagle-aligned": ([FULL, SPEC_ALIGN], {"use_eagle": True}, {"drafts": 3}),
    "retain-0": ([FULL, NARROW], {"retention_interval": 0}, {}),
    "retain-0-aligned": ([FULL, ALIGN], {"retention_interval": 0}, {}),
    "retain-n": ([FULL, NARROW], {"retention_interval": 12}, {}),
    "overlap": ([FULL, NARROW, CHUNK], {"overlap": True}, {}),
    "watermark": ([FULL, NARROW], {"watermark": 0.1}, {}),
    "caching-off": ([FULL, NARROW], {"caching": False}, {}),
    "priority": ([FULL, NARROW], {"eviction": "priority"}, {}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETS)
def test_every_request_reads_its_own_history(name: str, seed: int) -> None:
    groups, options, traffic = SETS[name]
    roomy = seed == 2  # then what was looked up stays good for a while
    engine = Engine(pool_for(groups, 4 if roomy else 1), groups, **options)
    walk = Traffic(engine, seed, **traffic)
    for _ in range(25):
        walk.run(16)
        engine.manager.check_integrity()
    expected = {"admitted": 30, "stepped": 80, "finished": 15}
    if not roomy:
        expected["preempted"] = 5
    if walk.external:
        expected["loaded"] = 5
    if engine.manager.caching and name != "window-one":
        # Like vLLM, a window of one token registers nothing and finds nothing: it never hits.
        expected["late" if roomy else "hit"] = 1 if roomy else 8
    assert {what: count for what, count in walk.done.items() if count < expected.get(what, 0)} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETS)
def test_for_a_long_time(name: str) -> None:
    groups, options, traffic = SETS[name]
    for seed in range(100, 110):
        Traffic(Engine(pool_for(groups), groups, **options), seed, **traffic).run(2000)


def test_a_token_attends_to_the_right_blocks() -> None:
    """The rule by which the engine reads, spelled out once: a window of 10 is the token itself and 9 before it."""
    assert [first_seen(NARROW, computed) for computed in (0, 5, 9, 10, 20)] == [0, 0, 0, 1, 11]
    assert [first_seen(CHUNK, computed) for computed in (0, 7, 8, 15, 16)] == [0, 0, 8, 8, 16]
    assert first_seen(FULL, 1000) == 0


# -- a broken manager is caught ---------------------------------------------------------------------------------------


def provoke(groups: list[GroupSpec], options: dict[str, Any] | None = None, **traffic: Any) -> None:
    """Enough traffic to fall into any of the traps below."""
    for seed in range(12):
        Traffic(Engine(pool_for(groups), groups, **options or {}), seed, **traffic).run(400)


@pytest.mark.source
def test_a_block_that_two_groups_adopted_cannot_hide() -> None:
    with pytest.raises(Corrupted, match="reads"):
        provoke([FULL, WINDOW, spec("sliding_window", window=2000)], {"coordinator": Interleaved}, external=0.8)


def test_a_block_that_two_requests_hold_cannot_hide() -> None:
    """The plainest case: one entry of a table points to another request's block. It shows when it is next read."""
    engine = Engine(30, [FULL])
    first, second = engine.create("a", list(range(6))), engine.create("b", list(range(50, 56)))
    assert engine.admit(first, 6) and engine.admit(second, 6)
    engine.verify()
    stolen = engine.manager.block_ids(first.request)[0][1]
    second.request.tables[0].extents[-1].ids[-1] = stolen
    with pytest.raises(Corrupted, match=rf"request b expects .* reads .* in block {stolen}"):
        engine.verify()
    with pytest.raises(Corrupted, match=rf"request b expects .* reads .* in block {stolen}"):
        engine.step(second, 1, [], 0, 9)


@pytest.mark.source
def test_a_window_that_closes_a_token_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowRule, "stale", lambda self, computed: max(0, computed - self.window + 2))
    with pytest.raises(Corrupted, match="null"):
        provoke([FULL, NARROW])


@pytest.mark.source
def test_a_window_hit_one_block_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = WindowRule.needed
    monkeypatch.setattr(WindowRule, "needed", lambda self, drop: needed(self, drop) - 1)
    with pytest.raises(Corrupted, match="null"):
        provoke([FULL, NARROW])


@pytest.mark.source
def test_a_chunk_that_closes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkRule, "stale", lambda self, computed: -(-computed // self.chunk) * self.chunk)
    with pytest.raises(Corrupted, match="null"):
        provoke([FULL, CHUNK])


@pytest.mark.source
def test_a_state_given_up_while_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateRule, "stale", lambda self, computed: computed)
    with pytest.raises(Corrupted, match="null"):
        provoke([FULL, ALIGN])


@pytest.mark.source
def test_a_shared_block_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed by the first of its holders, handed out again, and written while the second still reads it."""

    def pin(self: Pool, extent: Extent) -> None:
        if not extent.refs:
            self.order.remove(extent)
            self.free -= len(extent.ids)
            extent.refs = 1

    release = Pool.release

    def release_held(self: Pool, extents: Any) -> None:
        release(self, [extent for extent in extents if extent.refs])

    monkeypatch.setattr(Pool, "pin", pin)
    monkeypatch.setattr(Pool, "release", release_held)
    caught = set()
    for seed in range(12):
        try:
            Traffic(Engine(pool_for([FULL]), [FULL]), seed).run(400)
        except AssertionError as error:  # some walks stumble over the broken pool before they read
            caught.add(type(error))
    assert Corrupted in caught


def test_a_load_that_is_announced_before_it_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockManager.allocate

    def hasty(self: BlockManager, *arguments: Any, **options: Any) -> Any:
        return allocate(self, *arguments, **{**options, "delay_caching": False})

    monkeypatch.setattr(BlockManager, "allocate", hasty)
    with pytest.raises(Corrupted, match="the map of cached copies expects"):
        provoke([FULL])


def test_drafts_that_are_registered_before_they_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a block that the text has not reached yet can only be the name of something else."""
    monkeypatch.setattr(BlockManager, "rollback", lambda self, request, count: None)
    with pytest.raises((Corrupted, IndexError)):
        provoke([FULL], drafts=4)


def test_copies_that_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    take_copies = BlockManager.take_copies

    def forget(self: BlockManager) -> list[tuple[int, int]]:
        take_copies(self)
        return []

    monkeypatch.setattr(BlockManager, "take_copies", forget)
    groups, options, _ = SETS["inside-blocks"]
    with pytest.raises(Corrupted, match="reads"):
        provoke(groups, options)


def test_names_that_do_not_cover_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens after unequal ones are not the same content."""
    hash_blocks = XXH3.hash_blocks

    def unchained(parent: Any, tokens: Any, size: int, extras: Any = None) -> list[Any]:
        blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        return [key for block in blocks for key in hash_blocks(None, block, size)]

    monkeypatch.setattr(XXH3, "hash_blocks", unchained)
    with pytest.raises(Corrupted, match="reads"):
        provoke([FULL])
