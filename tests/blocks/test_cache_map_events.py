"""Calls of the sink: everything that enters and leaves the maps of cached copies, and what is first and last.

The native stream announces the first copy in and the last copy out. A mirror that hears only that must know, after every
single operation, exactly what can be found: invariant I4 at its source.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.blocks.content import Engine, Traffic, pool_for
from tests.blocks.support import FULL, WINDOW, cache, make, run
from tests.blocks.test_manager_content import SETS

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.events.types import Tier
from kvyard.hashing import Key, Run

Told = tuple[str, int, list[Key], bool]


class Mirror:
    """A sink that believes what it is told, and counts for itself to see whether that is true."""

    def __init__(self) -> None:
        self.known: set[tuple[int, Key]] = set()
        """By first in and last out alone."""
        self.copies: Counter[tuple[int, Key]] = Counter()
        """By every copy."""
        self.told: list[Told] = []

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        assert tier is Tier.G1
        assert len(run) > 0
        for key in run.hashes:
            assert first == (self.copies[group, key] == 0), "first means that there was none"
            self.copies[group, key] += 1
            if first:
                self.known.add((group, key))
        self.told.append(("entered", group, run.hashes, first))

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        assert tier is Tier.G1
        assert len(run) > 0
        for key in run.hashes:
            self.copies[group, key] -= 1
            assert self.copies[group, key] >= 0, "what leaves must have entered"
            assert last == (self.copies[group, key] == 0), "last means that there is none any more"
            if last:
                self.known.remove((group, key))
        self.told.append(("left", group, run.hashes, last))

    def cleared(self, tier: Tier | None = None) -> None:
        self.known.clear()
        self.copies.clear()
        self.told.append(("cleared", -1, [], True))

    def check(self, manager: BlockManager) -> None:
        cached = Counter((group, key) for group, key, _ in manager.pool.cached_blocks())
        assert self.known == cached.keys()
        assert +self.copies == cached

    def take(self) -> list[Told]:
        told, self.told = self.told, []
        return told


class WatchedTraffic(Traffic):
    """Traffic that compares the mirror after each thing it does."""

    def act(self) -> None:
        super().act()
        self.engine.manager.pool.sink.check(self.engine.manager)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SETS)
def test_the_mirror_equals_the_map_after_every_operation(name: str, seed: int) -> None:
    groups, options, traffic = SETS[name]
    mirror = Mirror()
    engine = Engine(pool_for(groups, 1 + 2 * seed), groups, **options, sink=mirror)
    WatchedTraffic(engine, 10 + seed, **traffic).run(300)
    told = Counter((what, flag) for what, _, _, flag in mirror.told)
    if not engine.manager.caching:
        assert set(told) <= {("cleared", True)}, "nothing is cached, so there is nothing to tell"
    elif name != "window-one":
        assert told["entered", True] > 50
        assert told["left", True] > 10
    for job in list(engine.jobs.values()):
        engine.finish(job)
    assert engine.manager.reset()
    assert mirror.known == set()
    mirror.check(engine.manager)


def test_only_the_first_and_the_last_copy_are_announced() -> None:
    """Three requests compute the same text at the same time: one entry, two more copies, and one exit at the very end."""
    mirror = Mirror()
    manager = BlockManager(7, [FULL], sink=mirror)
    requests = [make(manager, name, range(8)) for name in "abc"]
    for request in requests:
        assert manager.allocate(request, 8) is not None  # cold on purpose
    hashes = requests[0].chain.hashes(0, 2)
    assert mirror.take() == [("entered", 0, hashes, True), ("entered", 0, hashes, False), ("entered", 0, hashes, False)]
    for request in requests:
        manager.free(request)
    assert mirror.take() == [], "freeing forgets nothing"
    manager.pool.take(2)
    manager.pool.take(2)
    assert mirror.take() == [("left", 0, hashes, False)] * 2
    manager.pool.take(1)
    assert mirror.take() == [("left", 0, hashes[1:], True)]
    mirror.check(manager)


def test_a_partly_new_run_is_announced_in_parts() -> None:
    mirror = Mirror()
    manager = BlockManager(20, [FULL], sink=mirror)
    first, second = make(manager, "a", range(8)), make(manager, "b", range(16))
    assert manager.allocate(first, 8) is not None
    assert manager.allocate(second, 16) is not None
    hashes = second.chain.hashes(0, 4)
    told = mirror.take()
    assert told[0] == ("entered", 0, hashes[:2], True)
    assert [flag for _, _, keys, flag in told[1:] for _ in keys] == [False, False, True, True]
    assert [key for _, _, keys, _ in told[1:] for key in keys] == hashes
    mirror.check(manager)


def test_a_growing_request_is_announced_block_by_block() -> None:
    mirror = Mirror()
    manager = BlockManager(20, [FULL], sink=mirror)
    request = make(manager, "a", range(7))
    assert run(manager, request)
    assert len(mirror.take()) == 1
    for token in range(8):
        request.append([token])
        assert run(manager, request)
    assert [keys for _, _, keys, first in mirror.take() if first] == [[key] for key in request.chain.hashes(1, 3)]


def test_groups_are_announced_separately() -> None:
    mirror = Mirror()
    manager = BlockManager(20, [FULL, WINDOW], sink=mirror)
    cache(manager, "a", range(8))
    assert [(what, group, len(keys)) for what, group, keys, _ in mirror.take()] == [
        ("entered", 0, 2),
        ("entered", 1, 2),
    ]
    manager.evict([3])
    assert [(what, group, len(keys)) for what, group, keys, _ in mirror.take()] == [("left", 1, 1)]


def test_a_reset_is_one_word() -> None:
    mirror = Mirror()
    manager = BlockManager(20, [FULL, WINDOW], sink=mirror)
    cache(manager, "a", range(8))
    mirror.take()
    holder = make(manager, "b", range(9))
    assert run(manager, holder)
    mirror.take()
    assert manager.reset() is False
    assert mirror.take() == []
    manager.free(holder)
    assert manager.reset() is True
    assert mirror.take() == [("cleared", -1, [], True)]
    mirror.check(manager)


def test_unregistered_blocks_are_not_announced() -> None:
    """Window group, retention 0: of 13 blocks only the one is kept where the same prompt can resume."""
    mirror = Mirror()
    groups = [GroupSpec(kind="sliding_window", window=4, block_size=4)]
    manager = BlockManager(40, groups, sink=mirror, retention_interval=0)
    request = make(manager, "a", range(53))
    assert run(manager, request)
    assert mirror.take() == [("entered", 0, request.chain.hashes(12, 13), True)]


def test_runs_can_be_asked_for_more_later() -> None:
    """A run is a view of a chain that goes on growing, or is cut when its request ends: its answers must not change."""
    kept: list[tuple[Run, Any]] = []

    class Keeping(Mirror):
        def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
            super().entered(run, group, tier, first)
            kept.append((run, (run.hashes, run.parent, run.tokens)))

        def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
            super().left(run, group, tier, last)
            kept.append((run, (run.hashes, run.parent, run.tokens)))

    groups = [FULL, GroupSpec(kind="sliding_window", window=10, block_size=4)]
    engine = Engine(pool_for(groups), groups, sink=Keeping())
    Traffic(engine, 3).run(400)
    assert len(kept) > 200
    for run_, answers in kept:
        assert (run_.hashes, run_.parent, run_.tokens) == answers
        assert len(run_.hashes) == len(run_)
        assert run_.tokens is not None
        assert len(run_.tokens) == 4 * len(run_)


@pytest.mark.source
def test_nothing_is_built_without_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events cost nothing where nobody listens: not a single run is made."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a run was built for nobody")

    groups = [FULL, GroupSpec(kind="sliding_window", window=10, block_size=4)]
    engine = Engine(pool_for(groups), groups)
    monkeypatch.setattr("kvyard.blocks.cache_map.Run", refuse)
    Traffic(engine, 1).run(200)
    engine = Engine(pool_for(groups), groups, sink=Mirror())
    with pytest.raises(AssertionError, match="a run was built for nobody"):
        Traffic(engine, 1).run(200)
