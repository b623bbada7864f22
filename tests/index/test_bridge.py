"""The bridge from a stream's hashes to request keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from tests.index.support import Bench, hashes_of, stored

from kvyard.events.types import Removed, Stored
from kvyard.index import Identity, IdentityError
from kvyard.index.bridge import Bridge, TextSpan

TEXT = list(range(1000, 1128))


def test_d5_bridges_are_scoped_by_stream() -> None:
    """Two engines use one number for different texts."""
    bench = Bench(workers=("a", "b"))
    mine, yours = [1, 2, 3, 4], [5, 6, 7, 8]
    bench.say(Stored(hashes=[77], parent=None, tokens=mine, block_size=4))
    bench.say(Stored(hashes=[77], parent=None, tokens=yours, block_size=4), stream="b")
    assert bench.blocks(mine, "a") == bench.blocks(yours, "b") == 1
    assert bench.blocks(mine, "b") == bench.blocks(yours, "a") == 0
    bench.say(Removed(hashes=[77]))
    assert bench.blocks(mine, "a") == 0
    assert bench.blocks(yours, "b") == 1


def test_a_refused_announcement_leaves_nothing_behind() -> None:
    bridge = Bridge(Identity(4))
    event = Stored(hashes=[1, 2, 1], parent=None, tokens=TEXT[:12], block_size=4)
    with pytest.raises(IdentityError, match="twice"):
        bridge.announce(event, [1, 2, 1])
    assert len(bridge) == 0 and bridge.snapshot() == ([], [])


def test_hashes_that_are_no_longer_held_are_remembered_for_a_while() -> None:
    bridge = Bridge(Identity(4), remembered=2)
    names = hashes_of(TEXT, 4)[:5]
    bridge.announce(stored(TEXT, 4, 0, 5), names)
    for key in names[:4]:
        bridge.rest(key)
    assert [key in bridge for key in names] == [False, False, True, True, True]
    bridge.wake(names[3:4])
    assert len(bridge.idle) == 1


def test_mappings_held_again_meanwhile_are_forgotten_last() -> None:
    """The order is that of the last time: a hash that rests once more goes to the end, wherever it stood."""
    bridge = Bridge(Identity(4), remembered=2)
    names = hashes_of(TEXT, 4)[:3]
    bridge.announce(stored(TEXT, 4, 0, 3), names)
    for key in (names[0], names[1], names[0], names[2]):
        bridge.rest(key)
    assert [key in bridge for key in names] == [True, False, True]
    assert list(bridge.idle) == [names[0], names[2]]


@pytest.mark.parametrize("size", [2, 4, 6, 16])
def test_a_restored_bridge_finds_what_the_first_did(size: int) -> None:
    bridge, other = Bridge(Identity(size)), Bridge(Identity(size))
    fork = [*TEXT[:18], *range(14)]
    for text, first, last in ((TEXT, 0, 6), (TEXT, 6, 9), (fork, 4, 8)):
        bridge.announce(event := stored(text, 4, first, last), list(event.hashes))
    bridge.rest(hashes_of(TEXT, 4)[8])
    other.restore(*bridge.snapshot())
    assert other.snapshot() == bridge.snapshot()
    for key in {*hashes_of(TEXT, 4)[:9], *hashes_of(fork, 4)}:
        ours, theirs = bridge.find(key), other.find(key)
        assert ours is not None and theirs is not None
        assert (ours[0].begin, ours[0].keys, ours[1]) == (theirs[0].begin, theirs[0].keys, theirs[1])


def test_the_block_before_a_span_is_its_parents_last() -> None:
    parent = TextSpan(0, 4, [1], None, keys=array("Q", [7]), last=7)
    child = TextSpan(4, 4, [2], parent, first=1, keys=array("Q", [8]), last=8)
    assert [child.last_before(2), child.last_before(1), parent.last_before(1), parent.last_before(0)] == [8, 7, 7, None]


def test_nothing_is_left_of_an_engine_that_is_another_now() -> None:
    bridge = Bridge(Identity(4))
    names = hashes_of(TEXT, 4)[:3]
    bridge.announce(stored(TEXT, 4, 0, 3), names)
    bridge.rest(names[2])
    bridge.clear()
    assert (len(bridge), list(bridge.idle), bridge.snapshot()) == (0, [], ([], []))


class CountingDict(dict[int, None]):
    """How often its first item was looked for."""

    searches = 0

    def __iter__(self) -> Iterator[int]:
        self.searches += 1
        return super().__iter__()


def test_mappings_are_forgotten_in_batches() -> None:
    """A dictionary that is emptied at its front passes over all that was there, so it is asked for its first rarely."""
    bridge = Bridge(Identity(4), remembered=640)
    bridge.idle = CountingDict()
    for name in range(3000):
        bridge.announce(Stored(hashes=[name], parent=None, tokens=[name, 1, 2, 3], block_size=4), [name])
        bridge.rest(name)
        assert len(bridge.idle) == len(bridge) <= 640 + 10
    assert list(bridge.idle) == list(range(3000 - len(bridge), 3000)), "the first go first"
    assert bridge.idle.searches <= 1 + 3000 // 10
