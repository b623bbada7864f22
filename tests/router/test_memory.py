"""Memory of recent routing, against a list of it; and the tree underneath with keys that are made on demand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.levels import by_slot
from tests.router.support import SECOND, Fleet, chain

from kvyard.hashing import TraceChain
from kvyard.index import Holder
from kvyard.router.memory import RoutedMemory
from kvyard.router.tree import Path, PrefixTree


def depths(memory: RoutedMemory, found: Path, count: int) -> list[int]:
    """The blocks of a prompt that each of ``count`` workers was sent."""
    return by_slot(memory.tree.levels(found), count)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Lazy(Sequence[int]):
    """Keys that can't be sliced, as a trace's can't."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        assert isinstance(index, int) and 0 <= index < len(self.keys)
        return self.keys[index]


def depth(keys: list[int], sent: list[list[int]]) -> int:
    held = {key for prompt in sent for key in prompt}
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), PROMPTS, st.sampled_from([0, 1, 3, 10]), st.booleans()), min_size=1, max_size=40
    ),
    ttl=st.sampled_from([None, 1, 5, 12]),
)
def test_prefixes_are_remembered_for_their_ttl(steps: list[tuple[int, list[int], int, bool]], ttl: int | None) -> None:
    memory = RoutedMemory(ttl, 1 << 20)
    sent: list[tuple[int, int, list[int]]] = []
    now = 0
    for slot, prompt, passed, lazy in steps:
        now += passed
        memory.expire(now)
        sent = [entry for entry in sent if ttl is None or entry[0] + ttl > now]
        keys = chain(prompt)
        found = memory.tree.find(keys)
        expected = [depth(keys, [entry[2] for entry in sent if entry[1] == other]) for other in range(3)]
        assert depths(memory, found, 3) == expected
        memory.remember(slot, Lazy(keys) if lazy else keys, found, now)
        sent.append((now, slot, keys))
        memory.check_integrity()
        assert memory.tree.size == sum(
            len({key for _, to, keys in sent if to == other for key in keys}) for other in range(3)
        )
    memory.tree.remove(1)
    memory.check_integrity()
    assert memory.tree.size == sum(
        len({key for _, to, keys in sent if to == other for key in keys}) for other in (0, 2)
    )
    if ttl is not None:
        memory.expire(now + ttl)
        assert memory.tree.size == 0 and not list(memory.tree.walk())


@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), PROMPTS), min_size=1, max_size=60), room=st.integers(9, 30))
def test_the_memory_is_bounded_and_keeps_the_latest(steps: list[tuple[int, list[int]]], room: int) -> None:
    memory = RoutedMemory(None, room)
    for slot, prompt in steps:
        keys = chain(prompt)
        memory.remember(slot, keys, memory.tree.find(keys), 0)
        memory.check_integrity()
        assert memory.tree.size <= room
        assert depths(memory, memory.tree.find(keys), 3)[slot] == len(keys)


def test_the_longest_unsent_goes_first_and_a_prefix_that_is_sent_again_stays() -> None:
    memory = RoutedMemory(None, 6)
    for prompt in ("ab", "xy", "ac"):
        keys = chain(prompt)
        memory.remember(0, keys, memory.tree.find(keys), 0)
    keys = chain("pq")
    memory.remember(0, keys, memory.tree.find(keys), 0)
    found = {prompt: depths(memory, memory.tree.find(chain(prompt)), 1)[0] for prompt in ("ab", "ac", "xy", "pq")}
    # "b" was sent before "xy", and going suffices: five blocks are left, "a" among them.
    assert found == {"ab": 1, "ac": 2, "xy": 2, "pq": 2}


def test_two_long_prompts_are_compared_at_a_few_places_only() -> None:
    class Counting(Lazy):
        looks = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            Counting.looks += 1
            return super().__getitem__(index)

    tree = PrefixTree()
    stem = list(range(3000))
    for number in (1, 2):
        keys = [*stem, *(10_000 * number + at for at in range(1000))]
        found = tree.find(keys)
        for node in tree.extend(keys, found):
            node.held[number] = 1
            node.mask |= 1 << number
    path, at = tree.find(Counting([*stem, *range(90_000, 91_000)]))
    assert at == 3000 and len(path) == 1 and Counting.looks < 40


def test_a_trace_chain_is_routed_without_being_expanded() -> None:
    fleet = Fleet(("a", "b"), index=False, policy="approx")
    one = TraceChain([1, 2, 3], 8, 22, 4, own=1)
    two = TraceChain([1, 2, 9], 8, 24, 4, own=2)
    from kvyard.router import RouteRequest

    first = fleet.router.route(RouteRequest(1, one.keys, 22), 0)
    second = fleet.router.route(RouteRequest(2, two.keys, 24), 0)
    assert (first.blocks, second.blocks) == (5, 6)
    assert second.best == 4 and second.best_worker == first.worker
    one.grow(100)
    fleet.router.finished(1, 0)
    fleet.router.check_integrity()
    fleet.router.finished(2, 0)
    assert not list(fleet.router.loads.tree.walk())


def test_stems_grow_together_again_when_branches_are_gone() -> None:
    """Else a busy prefix would be cut finer and finer for ever."""
    fleet = Fleet(("a",), index=False, policy="round-robin")
    fleet.route(list(range(50)), id_="long")
    for cut in range(1, 50):
        fleet.route([*range(cut), "x"], id_=cut)
    tree = fleet.router.loads.tree
    assert len(list(tree.walk())) == 99
    for cut in range(1, 50):
        fleet.router.finished(cut, 0)
        fleet.router.check_integrity()
    assert len(list(tree.walk())) == 1
    assert fleet.router.load(Holder("a")).blocks == 50


def test_approx_finds_what_it_sent_for_two_minutes() -> None:
    fleet = Fleet(tuple("abcdefgh"), index=False, policy="approx")
    where = fleet.pick(["system", "one"])
    assert fleet.route(["system", "one", "two"], id_=1).device == 2
    fleet.router.finished(1, 0)
    fleet.now = 119 * SECOND
    assert fleet.pick(["system", "one", "three"]) == where
    fleet.now = 239 * SECOND
    assert fleet.route(["system", "one"]).best == 0


def test_approx_without_a_time_goes_by_room() -> None:
    fleet = Fleet(("a", "b"), index=False, policy="approx", approx_ttl_s=None, remembered_blocks=4)
    fleet.pick(["one", "two"])
    fleet.now = 10**15
    assert fleet.route(["one", "two"]).best == 2
    fleet.pick(["x", "y", "z"])
    fleet.pick(["p", "q", "r"])
    assert fleet.route(["one", "two"]).best == 0


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), PROMPTS, st.sampled_from([0, 1, 3]), st.integers(0, 3)), min_size=1, max_size=40
    ),
    ttl=st.sampled_from([None, 5, 12]),
)
def test_a_withdrawn_prompt_was_never_sent(steps: list[tuple[int, list[int], int, int]], ttl: int | None) -> None:
    """Against a list of what was sent. Each prompt may be taken back some steps later, with others of its prefix sent since."""
    memory = RoutedMemory(ttl, 1 << 20)
    sent: list[tuple[int, int, list[int], int]] = []
    refused: list[tuple[int, int]] = []
    now = exact = 0
    for step, (slot, prompt, passed, later) in enumerate(steps):
        now += passed
        memory.expire(now)
        sent = [entry for entry in sent if ttl is None or entry[0] + ttl > now]
        keys = chain(prompt)
        number = memory.remember(slot, keys, memory.tree.find(keys), now)
        assert bool(number) == bool(keys)
        sent.append((now, slot, keys, number))
        if later:
            refused.append((step + later - 1, number))
        for due, number in refused:
            if due == step:
                memory.withdraw(number)
                sent = [entry for entry in sent if entry[3] != number or not number]
        memory.check_integrity()
        most = [depth(keys, [entry[2] for entry in sent if entry[1] == other]) for other in range(3)]
        found = depths(memory, memory.tree.find(keys), 3)
        assert all(one <= bound for one, bound in zip(found, most, strict=True)), (
            "something is left of what was taken back"
        )
        exact += found == most
        assert memory.tree.size <= sum(
            len({key for _, to, keys, _ in sent if to == other for key in keys}) for other in range(3)
        )
    if not refused:
        assert exact == len(steps)
    if ttl is not None:
        memory.expire(now + ttl)
        assert memory.tree.size == 0 and not list(memory.tree.walk())


def test_prefixes_of_others_stay_when_a_prompt_is_withdrawn() -> None:
    memory = RoutedMemory(None, 100)
    numbers = []
    for prompt in ("ab", "abcd", "abcx", "ab"):
        keys = chain(prompt)
        numbers.append(memory.remember(0, keys, memory.tree.find(keys), 0))
    seen = []
    for number in (numbers[1], numbers[3], numbers[2], numbers[0]):
        memory.withdraw(number)
        memory.check_integrity()
        seen.append([depths(memory, memory.tree.find(chain(name)), 1)[0] for name in ("abcd", "abcx")])
    assert seen == [[3, 4], [3, 4], [2, 2], [0, 0]]
    assert not memory.tree.size


def test_what_the_index_knew_before_a_refused_prompt_is_left_to_the_index() -> None:
    memory = RoutedMemory(None, 100)
    keys = chain("abc")
    memory.remember(0, keys, memory.tree.find(keys), 0)
    memory.confirm(memory.tree.find(keys), [(3, 0b1)])
    again = memory.remember(0, keys, memory.tree.find(keys), 1)
    assert depths(memory, memory.tree.find(keys), 1) == [3]
    memory.withdraw(again)
    memory.check_integrity()
    assert depths(memory, memory.tree.find(keys), 1) == [0]


def test_what_the_index_knew_before_a_prompt_that_was_never_computed_it_knows_still() -> None:
    memory = RoutedMemory(None, 100)
    keys = [1, 2, 3]
    memory.remember(1, keys, memory.tree.find(keys), 0)
    memory.confirm(memory.tree.find(keys), [(3, 0b10)])
    assert depths(memory, memory.tree.find(keys), 2) == [0, 0]
    longer = [*keys, 4]
    number = memory.remember(1, longer, memory.tree.find(longer), 1)
    assert depths(memory, memory.tree.find(longer), 2) == [0, 4]
    memory.withdraw(number)
    assert depths(memory, memory.tree.find(keys), 2) == [0, 0]
    memory.check_integrity()


def test_keys_that_are_packed_stay_packed_where_stretches_are_joined() -> None:
    memory, keys = RoutedMemory(10 * SECOND, 1000), [array("Q", chain([1, 2, 5])), array("Q", chain([1, 2, 3, 4]))]
    for at, one in enumerate(keys):
        memory.remember(0, one, memory.tree.find(one), at * SECOND)
    memory.expire(10 * SECOND)
    (node,) = memory.tree.walk()
    assert node.keys == keys[1] and isinstance(node.keys, array)
    memory.check_integrity()


def test_keys_that_are_packed_in_different_ways_are_joined_too() -> None:
    memory, keys = RoutedMemory(10 * SECOND, 1000), [array("L", chain([1, 2, 5])), array("Q", chain([1, 2, 3, 4]))]
    for at, one in enumerate(keys):
        memory.remember(0, one, memory.tree.find(one), at * SECOND)
    memory.expire(10 * SECOND)
    (node,) = memory.tree.walk()
    assert list(node.keys) == list(keys[1])
    memory.check_integrity()
