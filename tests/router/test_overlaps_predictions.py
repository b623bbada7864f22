"""Prefixes that were routed and not announced yet: credited, confirmed, expired."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.support import SECOND, Fleet, by_tier, chain

from kvyard.events.types import Tier
from kvyard.index import Holder
from kvyard.router import Decision

PROMPT = list("abcdefgh")
FOUR = ("a", "b", "c", "d")


def test_a_burst_of_one_prompt_stays_together() -> None:
    fleet = Fleet(FOUR)
    first = fleet.route(PROMPT)
    fleet.router.prefill_done(first.id, 0)
    second = fleet.route(PROMPT)
    assert second.worker == first.worker
    assert (second.device, second.predicted, second.best) == (8, 8, 8)
    fleet = Fleet(FOUR, predicted_ttl_s=0)
    first = fleet.route(PROMPT)
    fleet.router.prefill_done(first.id, 0)
    assert fleet.route(PROMPT).best == 0


def test_a_prediction_outlives_its_request() -> None:
    fleet = Fleet(FOUR, predicted_ttl_s=2)
    first = fleet.route(PROMPT)
    fleet.router.finished(first.id, 0)
    fleet.now = 2 * SECOND - 1
    assert fleet.route(PROMPT, exclude=[Holder(name) for name in FOUR if name != first.worker.name]).predicted == 8
    fleet.now = 4 * SECOND
    assert fleet.route(PROMPT).best == 0


@pytest.mark.source
def test_refused_prompts_are_not_predicted() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT[:4])
    refused = fleet.route(PROMPT)
    assert _peek(fleet, PROMPT).predicted == 8
    assert fleet.router.refused(refused.id, 0) and not fleet.router.refused(refused.id, 0)
    assert _peek(fleet, PROMPT).predicted == 4, "what another request is about to bring is still on its way"
    assert fleet.router.load(Holder("a")).requests == 1
    fleet.router.check_integrity()


def test_events_that_came_so_far_are_known_and_the_rest_is_predicted() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT)
    fleet.store("a", PROMPT, 0, 5)
    decision = fleet.route(PROMPT)
    assert (decision.device, decision.predicted) == (8, 3)


@pytest.mark.source
def test_once_confirmed_an_eviction_is_believed() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT)
    fleet.store("a", PROMPT)
    assert _peek(fleet, PROMPT).predicted == 0
    fleet.remove("a", PROMPT, 4)
    assert _peek(fleet, PROMPT).device == 4


@pytest.mark.source
def test_the_last_token_is_computed_of_a_predicted_prompt_too() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT)
    assert _peek(fleet, PROMPT, tokens=32).device == 7


@pytest.mark.source
def test_a_prefix_sent_again_after_confirmation_is_predicted_again() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT)
    fleet.store("a", PROMPT)
    _peek(fleet, PROMPT)
    fleet.remove("a", PROMPT, 4)
    fleet.route(PROMPT)
    assert (_peek(fleet, PROMPT).device, _peek(fleet, PROMPT).predicted) == (8, 4)


@pytest.mark.source
def test_a_prompt_that_leaves_the_sent_one_early_confirms_nothing_of_it() -> None:
    fleet = Fleet(("a",))
    fleet.route(PROMPT)
    fleet.store("a", PROMPT, 0, 4)
    assert _peek(fleet, [*PROMPT[:4], "other"]).predicted == 0
    assert _peek(fleet, PROMPT).predicted == 4


@pytest.mark.source
def test_a_stem_counts_while_one_of_its_branches_does() -> None:
    fleet = Fleet(("a",))
    fleet.route([*PROMPT, "one"])
    fleet.route([*PROMPT, "two"])
    fleet.store("a", [*PROMPT, "one"])
    assert _peek(fleet, [*PROMPT, "one"]).predicted == 0
    fleet.remove("a", PROMPT)
    # "one" is confirmed and gone, "two" is still to come, and what comes before it with it.
    assert _peek(fleet, [*PROMPT, "one"]).device == 8
    assert _peek(fleet, [*PROMPT, "two"]).device == 9


@pytest.mark.source
def test_a_stem_is_confirmed_when_asked_for_only_where_nothing_goes_on() -> None:
    fleet = Fleet(("a",))
    fleet.route([*PROMPT, "one"])
    fleet.route([*PROMPT, "two"])
    fleet.store("a", PROMPT)
    assert _peek(fleet, PROMPT).predicted == 0
    assert _peek(fleet, [*PROMPT, "two"]).predicted == 1


@pytest.mark.source
def test_confirmed_and_unconfirmed_parts_are_not_joined() -> None:
    """A stem that counts and a branch that doesn't have the same workers, and are still two."""
    fleet = Fleet(("a", "b"))
    only_a, only_b = [Holder("b")], [Holder("a")]
    fleet.route([*PROMPT, "one", "two"], exclude=only_a)
    fleet.now = SECOND
    fleet.route([*PROMPT, "one"], exclude=only_a)
    fleet.route([*PROMPT, "other"], exclude=only_b)
    fleet.store("a", [*PROMPT, "one", "two"])
    assert _peek(fleet, [*PROMPT, "one", "two"], exclude=only_a).predicted == 0
    fleet.now = 2 * SECOND  # the first entry's time is up, and what is left of it settles
    fleet.remove("a", [*PROMPT, "one", "two"])
    assert _peek(fleet, [*PROMPT, "one", "two"], exclude=only_a).overlap == 0
    fleet.router.check_integrity()


@pytest.mark.source
def test_another_turn_confirms_the_turn_before() -> None:
    fleet = Fleet(("a", "b"))
    fleet.route(PROMPT, exclude=[Holder("b")])
    fleet.store("a", PROMPT)
    fleet.route([*PROMPT, "more"], exclude=[Holder("a")])
    fleet.remove("a", PROMPT)
    decision = _peek(fleet, PROMPT, exclude=[Holder("b")])
    assert decision.overlap == 0


@pytest.mark.source
def test_predicted_device_blocks_replace_those_of_lower_tiers() -> None:
    fleet = Fleet(("a",))
    fleet.store("a", PROMPT, 0, 2)
    fleet.store("a", PROMPT, 2, 6, tier=Tier.G2)
    fleet.store("a", PROMPT, 6, 8, tier=Tier.G3)
    assert _tiers(_peek(fleet, PROMPT)) == (2, 4, 2)
    fleet.route(PROMPT[:4])
    decision = _peek(fleet, PROMPT)
    assert (_tiers(decision), decision.predicted) == ((4, 2, 2), 2)
    fleet.route([*PROMPT[:7], "other"])
    assert _tiers(_peek(fleet, PROMPT)) == (7, 0, 1)


@pytest.mark.source
def test_a_worker_that_is_gone_leaves_no_predictions_to_its_successor() -> None:
    fleet = Fleet(("a", "b"))
    fleet.route(PROMPT, exclude=[Holder("b")])
    assert fleet.router.remove_worker("a") == [1]
    fleet.router.add_worker("c")
    assert _peek(fleet, PROMPT).best == 0


def test_they_are_bounded() -> None:
    fleet = Fleet(("a",), remembered_blocks=20)
    for at in range(50):
        fleet.route([at, *PROMPT])
    memory = fleet.router.overlaps.memory
    assert memory is not None and memory.tree.size <= 20


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["route", "store", "remove", "wait"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
            st.sampled_from("ab"),
        ),
        max_size=40,
    )
)
def test_never_less_than_the_index_and_never_more_than_what_was_sent(steps: list[tuple[str, list[int], str]]) -> None:
    """Where events and predictions mix, what is credited lies between the two; and a confirmed one is not credited anew."""
    fleet = Fleet(("a", "b"))
    cached: dict[str, set[int]] = {"a": set(), "b": set()}
    sent: list[tuple[int, str, list[int]]] = []
    for what, prompt, worker in steps:
        keys = chain(prompt)
        if what == "wait":
            fleet.now += SECOND // 2
        elif what == "store":
            if all(key in cached[worker] for key in keys[:-1]) and keys[-1] not in cached[worker]:
                fleet.store(worker, prompt, len(keys) - 1)
                cached[worker].add(keys[-1])
        elif what == "remove":
            if keys[-1] in cached[worker]:
                fleet.remove(worker, prompt, len(keys) - 1)
                cached[worker].discard(keys[-1])
        else:
            other = "a" if worker == "b" else "b"
            decision = fleet.route(prompt, exclude=[Holder(other)])
            known = _prefix(keys, cached[worker])
            recent = [was for when, to, was in sent if to == worker and when + 2 * SECOND > fleet.now]
            ahead = max((_prefix(keys, set(was)) for was in recent), default=0)
            assert known <= decision.device <= max(known, ahead)
            assert decision.device - decision.predicted == known
            sent.append((fleet.now, worker, keys))


def _prefix(keys: Sequence[int], held: set[int]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def _tiers(decision: Decision) -> tuple[int, int, int]:
    return by_tier(decision.tiers)


def _peek(fleet: Fleet, prompt: Sequence[object], **options: object) -> Decision:
    """Return the decision for a prompt without sending it: a router with the same memory, asked and discarded."""
    memory = fleet.router.overlaps.memory
    fleet.router.overlaps.memory = _Deaf(memory)  # type: ignore[assignment, arg-type]
    try:
        decision = fleet.route(prompt, id_="peek", **options)
        fleet.router.finished("peek", fleet.now)
        return decision
    finally:
        fleet.router.overlaps.memory = memory


class _Deaf:
    """A memory that learns nothing."""

    def __init__(self, memory: object) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> object:
        return getattr(self.memory, name)

    def remember(self, *_: object) -> None: ...
