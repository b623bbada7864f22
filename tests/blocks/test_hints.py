"""Hints about sessions: what is over goes first, what comes back soon goes last, and others' blocks are left alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from tests.blocks.support import FULL, cache, make, run
from tests.blocks.test_eviction import Now

from kvyard.blocks import BlockManager, ConfigError, GroupSpec, Hints, RequestError
from kvyard.blocks.eviction.priority import PriorityOrder
from kvyard.blocks.extent import DEFAULT_PRIORITY, KEPT, Extent
from kvyard.blocks.ownership import SHARED, _claimed, claim, end_session
from kvyard.hashing import Key

SYSTEM = range(8)
"""Two blocks that every conversation begins with."""


def heeding(blocks: int = 40, now: Now | None = None, **options: object) -> BlockManager:
    return BlockManager(blocks, [FULL], hints=True, now=now or Now(), **options)  # type: ignore[arg-type]


def turn(*own: int, common: Sequence[int] = SYSTEM) -> list[int]:
    """A prompt of the common start and, for each number, one block of its own; and a token that fills none."""
    return [*common, *(token for number in own for token in range(4 * number, 4 * number + 4)), 1]


def line(manager: BlockManager) -> list[int]:
    """Cached free blocks, next to be evicted first."""
    return [block for extent in manager.pool.order for block in reversed(extent.ids)]


def ending(session: str = "") -> Hints:
    return Hints(session, session_end=True)


def test_blocks_of_an_ended_session_go_first_and_shared_ones_stay() -> None:
    manager = heeding()
    [other] = cache(manager, "a", turn(100), hints=Hints("a"))
    [mine] = cache(manager, "b", turn(200, 201), hints=ending("b"))
    shared, own = mine[:2], mine[2:4]
    assert shared == other[:2]
    # Without the hint: other[2], own back to front, shared back to front.
    assert line(manager) == [own[1], own[0], other[2], shared[1], shared[0]]
    assert manager.lookup(make(manager, "c", turn(200, 201))).tokens == 16, "it is still found until it is evicted"
    manager.check_integrity()


def test_every_turn_of_a_conversation_is_its_own() -> None:
    manager = heeding()
    cache(manager, "x", turn(100), hints=Hints("x"))
    for at, said in enumerate(([200], [200, 201], [200, 201, 202])):
        cache(manager, f"b{at}", turn(*said), hints=Hints("b", session_end=len(said) == 3))
    found = line(manager)
    [ids] = manager.lookup(make(manager, "again", turn(200, 201, 202))).block_ids()
    assert found[:3] == ids[:1:-1]


def test_without_a_name_a_request_is_a_session_of_its_own() -> None:
    manager = heeding()
    [first] = cache(manager, "b1", turn(200))
    [last] = cache(manager, "b2", turn(200, 201), hints=ending())
    assert line(manager)[0] == last[3]
    assert line(manager)[1:] == [first[2], first[1], first[0]]


def test_a_later_use_makes_a_block_ordinary() -> None:
    manager = heeding()
    [mine] = cache(manager, "a", turn(100), hints=ending("a"))
    cache(manager, "b", turn(200), hints=Hints("b"))
    assert line(manager)[0] == mine[2]
    cache(manager, "c", turn(100), hints=Hints("c"))
    assert line(manager)[-1] == mine[0]
    assert line(manager).index(mine[2]) > 0


def test_an_end_spares_what_a_running_request_of_another_session_uses() -> None:
    manager = heeding()
    running = make(manager, "r", turn(100), hints=Hints("r"))
    assert run(manager, running)
    cache(manager, "x", turn(300), hints=Hints("x"))
    [mine] = cache(manager, "b", turn(100, 101), hints=ending("b"))
    assert line(manager)[0] == mine[3]
    manager.free(running)
    assert line(manager)[0] == mine[3], "only what the other never used"
    assert line(manager)[-3:] == mine[2::-1]


def test_a_preempted_request_has_not_ended() -> None:
    manager = heeding()
    cache(manager, "a", turn(100), hints=Hints("a"))
    request = make(manager, "b", turn(200), hints=ending("b"))
    assert run(manager, request)
    [ids] = manager.block_ids(request)
    manager.preempt(request)
    assert line(manager)[0] != ids[2]
    assert run(manager, request)
    manager.free(request)
    assert line(manager)[0] == ids[2]


def test_a_session_ended_from_outside_loses_all_its_own_blocks() -> None:
    manager = heeding()
    [other] = cache(manager, "a", turn(100), hints=Hints("a"))
    cache(manager, "b1", turn(200), hints=Hints("b"))
    cache(manager, "b2", turn(300), hints=Hints("b"))
    assert manager.end_session("b") == 2
    assert manager.end_session("b") == 0
    assert manager.end_session("nobody") == 0
    assert line(manager)[2:] == [other[2], other[1], other[0]]


def test_windows_give_up_what_they_let_go_of_before() -> None:
    narrow = GroupSpec(kind="sliding_window", window=8, block_size=4)
    manager = BlockManager(80, [FULL, narrow], hints=True, now=Now())
    cache(manager, "a", range(1000, 1033), hints=Hints("a"))
    before = set(line(manager))
    cache(manager, "b", range(2000, 2033), hints=ending("b"))
    found = line(manager)
    assert set(found[-len(before) :]) == before, "all that b cached goes before what a did"
    manager.check_integrity()


# -- for a time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["ordinary", "first"])
def test_a_time_to_live(then: str) -> None:
    now = Now()
    manager = heeding(now=now)
    [kept] = cache(manager, "a", turn(100), hints=Hints("a", ttl=1000, ttl_then=then))
    [other] = cache(manager, "b", turn(200, common=range(900, 908)), hints=Hints("b"))
    behind = [kept[2], kept[1], kept[0]]
    assert line(manager)[-3:] == behind
    now.time = 999
    assert line(manager)[-3:] == behind
    now.time = 1000
    [late] = cache(manager, "c", turn(300, common=range(700, 708)), hints=Hints("c"))
    found = line(manager)
    if then == "first":
        assert found[:3] == behind
    else:
        assert found == [*behind, other[2], other[1], other[0], late[2], late[1], late[0]]


def test_a_session_that_came_back_is_not_kept_any_longer() -> None:
    now = Now()
    manager = heeding(now=now)
    cache(manager, "a1", turn(100), hints=Hints("a", ttl=1000))
    [other] = cache(manager, "b", turn(200, common=range(900, 908)), hints=Hints("b"))
    [kept] = cache(manager, "a2", turn(100), hints=Hints("a"))
    [late] = cache(manager, "c", turn(300, common=range(700, 708)), hints=Hints("c"))
    assert line(manager) == [block for ids in (other, kept, late) for block in ids[2::-1]]


def test_a_shared_block_is_kept_as_long_as_any_session_asks() -> None:
    now = Now()
    manager = heeding(now=now)
    [kept] = cache(manager, "a", turn(100), hints=Hints("a", ttl=1000, ttl_then="first"))
    cache(manager, "b", turn(200), hints=Hints("b", ttl=10))
    cache(manager, "c", turn(300), hints=Hints("c"))
    now.time = 500
    assert line(manager)[-3:] == [kept[2], kept[1], kept[0]], "and b's own block is kept no longer"
    now.time = 2000
    assert line(manager)[0] == kept[2], "its own goes first after its time"
    assert not {kept[0], kept[1]} & set(line(manager)[:2]), "what is shared doesn't"


def test_retained_blocks_are_evicted_last() -> None:
    manager = heeding(8)
    cache(manager, "a", turn(100, 101), hints=Hints("a", ttl=1000))
    cache(manager, "b", range(500, 527))
    assert manager.lookup(make(manager, "again", turn(100, 101))).tokens < 16
    manager.check_integrity()


# -- what can't be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ttl": 0}, "above 0"),
        ({"ttl": 5, "session_end": True}, "not both"),
        ({"ttl_then": "first"}, "without a ttl"),
    ],
)
def test_hints_that_contradict_themselves(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Hints(**wrong)  # type: ignore[arg-type]


def test_a_manager_that_heeds_no_hints_says_so() -> None:
    manager = BlockManager(20, [FULL], now=Now())
    for hints in (ending("a"), Hints("a", ttl=5)):
        with pytest.raises(RequestError, match="hints=True"):
            manager.allocate(make(manager, "a", range(9), hints=hints), 9)
    assert manager.end_session("a") == 0
    clockless = BlockManager(20, [FULL], hints=True)
    with pytest.raises(RequestError, match="clock"):
        clockless.allocate(make(clockless, "a", range(9), hints=Hints("a", ttl=5)), 9)


def test_hints_need_an_order_that_knows_them() -> None:
    with pytest.raises(ConfigError, match="lru or priority"):
        BlockManager(20, [FULL], hints=True, eviction="own")


# -- against a slow model ---------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """State of a block, apart from ordinary."""

    kind: str
    """``over`` or ``kept``."""
    ttl: int = 0
    until: int = 0
    then: str = "ordinary"


class SlowModel:
    """Hints block by block, as the definition says: who used each, what was said of it, and a list to be sorted when asked."""

    def __init__(self) -> None:
        self.users: dict[Key, set[str]] = {}
        self.marks: dict[Key, Mark] = {}
        self.free: list[Key] = []
        """In the order in which they were given back."""

    def expire(self, now: int) -> None:
        due = [key for key in self.free if key in self.marks and self.marks[key].kind == "kept"]
        due = [key for key in due if self.marks[key].until <= now]
        for key in due:
            if self.marks.pop(key).then == "first":
                self.marks[key] = Mark("over")

    def line(self) -> list[Key]:
        plain = Mark("")
        ranks = {("over", "ordinary"): 0, ("", "ordinary"): 1, ("kept", "first"): 2, ("kept", "ordinary"): 3}
        return sorted(
            self.free, key=lambda key: ranks[self.marks.get(key, plain).kind, self.marks.get(key, plain).then]
        )

    def used(self, keys: Sequence[Key], session: str, hints: Hints, now: int) -> None:
        """A request has come and gone: it gives its cached blocks back from last to first."""
        for key in reversed(keys):
            if key in self.free:
                self.free.remove(key)
            self.free.append(key)
            users = self.users.setdefault(key, set())
            users.add(session)
            mark = self.marks.pop(key, None)
            if users == {session}:
                if hints.session_end:
                    self.marks[key] = Mark("over")
                elif hints.ttl is not None:
                    self.marks[key] = Mark("kept", hints.ttl, now + hints.ttl, hints.ttl_then)
            else:
                ttl = max(hints.ttl or 0, mark.ttl if mark is not None else 0)
                if ttl:
                    self.marks[key] = Mark("kept", ttl, now + ttl)

    def forget(self, key: Key) -> None:
        self.users.pop(key, None)
        self.marks.pop(key, None)
        if key in self.free:
            self.free.remove(key)


def keys_in_line(manager: BlockManager) -> list[Key]:
    found: list[Key] = []
    for extent in manager.pool.order:
        assert extent.node is not None
        found += [extent.node.keys[at] for at in range(extent.stop - 1, extent.start - 1, -1)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_against_the_slow_model(seed: int) -> None:
    """Sessions that share a start, with ends and times to live, in a pool with room for all (even seeds) or for few."""
    rng = random.Random(seed)
    now = Now()
    manager = heeding(22 if seed % 2 else 1000, now=now)
    model = SlowModel()
    said: dict[str, list[int]] = {}
    for step in range(200):
        now.time += rng.randint(0, 30)
        model.expire(now.time)
        name = f"s{rng.randrange(6)}"
        own = said.setdefault(name, [])
        if len(own) < 4:
            own.append(100 + step)
        drawn = rng.random()
        hints = Hints(name)
        if drawn < 0.25:
            hints = Hints(name, session_end=True)
        elif drawn < 0.5:
            hints = Hints(name, ttl=rng.randint(1, 200), ttl_then=rng.choice(["ordinary", "first"]))
        prompt = turn(*own[: rng.randint(0, len(own))])
        request = make(manager, f"r{step}", prompt, hints=hints)
        whole = len(prompt) // 4
        hit = manager.lookup(request).tokens // 4
        keys = [request.chain.keys[at] for at in range(whole)]
        if not {key for _, key, _ in manager.pool.cached_blocks()}.isdisjoint(keys[hit:]):
            continue  # behind a hole: it would be a second copy, which the model doesn't have
        assert run(manager, request)
        cached = {key for _, key, _ in manager.pool.cached_blocks()}
        for key in [*(set(model.users) - cached), *keys[hit:]]:
            model.forget(key)
        manager.free(request)
        model.used(keys, name, hints, now.time)
        if hints.session_end:
            del said[name]
        assert keys_in_line(manager) == model.line(), f"step {step}"
        manager.check_integrity()
    assert seed % 2 == 0 or manager.pool.evicted > 50


def test_a_time_that_is_over_stays_over_when_another_session_uses_the_block():
    """What stands free in an order may have expired without anything looking; a later use must not start its time again."""
    now = [0]
    order = PriorityOrder(lambda: now[0])
    extent = Extent([1], 0, 0)
    order.push(extent)
    for at, session, hints in ((0, "a", Hints("a", ttl=1000)), (1, "b", Hints("b")), (5000, "c", Hints("c"))):
        now[0] = at
        claim(order, [extent], session, hints)
    assert extent.priority == DEFAULT_PRIORITY and extent.expires is None


def test_no_session_can_be_called_like_what_is_shared():
    with pytest.raises(ConfigError, match="must not have a NUL"):
        Hints(SHARED)
    order = PriorityOrder(lambda: 0)
    extent = Extent([1], 0, 0)
    extent.owner = SHARED
    order.push(extent)
    assert end_session(order, SHARED) == 0


def test_a_time_to_live_takes_the_place_of_a_priority_that_would_end() -> None:
    """Only two times to live are compared: the longer holds. What a priority would have lasted says nothing of a session."""
    extent = Extent([1], 0, priority=10)
    extent.owner, extent.expires = "a", 7
    assert _claimed(extent, "b", Hints(session="b", ttl=5)) == (KEPT, 5)
    extent.priority = KEPT
    assert _claimed(extent, "c", Hints(session="c", ttl=5)) == (KEPT, 7)


def test_a_block_hit_after_its_ttl_is_ordinary_again() -> None:
    now = 0
    order = PriorityOrder(lambda: now)
    extent = Extent([1], 0, priority=90)
    extent.expires = 10
    order.push(extent)
    now = 20
    order.remove(extent)
    assert (extent.priority, extent.expires, extent.deadline) == (DEFAULT_PRIORITY, None, None)
