"""Sessions as a unit: where they live, what a crowded cache costs, and when it pays to wait for a worker."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.router.policies.scene import Scene, Steady, policy
from tests.router.support import SECOND, Fleet, chain

from kvyard.index import Holder
from kvyard.router import Choice, Policy, RouterConfig, RouteRequest
from kvyard.router.policies import make_policy
from kvyard.router.policies.program import Program

ONE, TWO = 0b001, 0b010


def scene(session: str | None = None, **more: Any) -> Scene:
    made = Scene(**more)
    made.routing.request = replace(made.routing.request, session=session)
    return made


def programs(policy: Policy) -> Program:
    assert isinstance(policy, Program)
    return policy


def test_without_sessions_it_is_least_time() -> None:
    rng = Random(3)
    one, other = policy("program"), policy("least-time")
    for _ in range(200):
        fields: dict[str, Any] = {
            "prefill": [rng.choice((0, rng.randrange(4000))) for _ in range(3)],
            "requests": [rng.randrange(4) for _ in range(3)],
            "cached": [rng.randrange(100) for _ in range(3)],
            "held": [rng.randrange(900) for _ in range(3)],
        }
        assert Scene(**fields).choice(one) == Scene(**fields).choice(other)


def test_a_new_session_goes_where_sessions_leave_room() -> None:
    """Caches of 200 blocks, 3,200 tokens: two prompts of 1,600 tokens fit, and a third pushes out 1,600 tokens."""
    paces = [Steady(capacity=200)] * 2
    idle = {"prefill": (0, 0), "requests": (0, 0), "held": (0, 0), "cached": (0, 0), "paces": paces}
    made = policy("program")
    for name in "ab":
        first = scene(name, **idle)
        programs(made).routed(first.routing, made.choose(first.routing)._replace(slot=0))
    costs = scene("c", **idle).costs(made)
    plain = scene("c", **idle).costs(policy("least-time"))
    # New content counts for least-time, too; without any history both workers cost it the same.
    assert plain[0] == plain[1]
    assert costs[0] - costs[1] > 1600 and scene("c", **idle).choice(made).slot == 1
    assert scene("a", **idle).costs(made)[0] < costs[0], "its own place isn't taken twice"


def test_a_session_lives_as_long_as_its_own_gaps_say() -> None:
    fleet = Fleet(("a", "b"), policy="program", session_ttl_s=100, options={"ttl_gaps": 3})
    made = programs(fleet.router.policy)
    fleet.pick("xy", session="s")
    fleet.now = 99 * SECOND
    fleet.pick("z", session="other")
    assert len(made) == 2, "before its second request a session lives for session_ttl_s"
    fleet.now = 100 * SECOND
    fleet.pick("z", session="other")
    assert len(made) == 1
    fleet.now = 104 * SECOND
    fleet.pick("z", session="other")  # gaps of 1 and 4 s: for 12 s
    fleet.now = 115 * SECOND
    fleet.pick("q")
    assert len(made) == 1
    fleet.now = 116 * SECOND
    fleet.pick("q")
    assert len(made) == 0 and not any(made._residents)


def test_sessions_are_bounded_and_go_with_their_worker() -> None:
    fleet = Fleet(("a", "b"), policy="program", sessions=3)
    made = programs(fleet.router.policy)
    for at in range(50):
        fleet.pick("x", session=f"s{at}")
        fleet.pick("y", session="s0")
    assert len(made) == 3 and len(made._expiries) <= 2 * 3 + 64
    assert sum(made._residents) == 3 * 5  # of 5 tokens each
    for name in ("a", "b"):
        fleet.router.remove_worker(name)
    assert len(made) == 0 and not any(made._residents)


def test_a_request_waits_for_its_worker_as_long_as_others_cost_more() -> None:
    made = policy("program", {"patience": 2.0, "crowding": 0.0})
    warm = scene("s", cached=(90, 0, 10), requests=(1, 1, 1))
    costs = warm.costs(made)
    assert made.hold(warm.routing, ONE) == (0, 2 * (costs[2] - costs[0]))
    assert made.hold(warm.routing, TWO) is None, "the best one has room"
    assert made.hold(warm.routing, ONE | 0b100) == (0, 2 * (costs[1] - costs[0]))
    cold = scene("s", cached=(0, 0, 0), requests=(4, 1, 1))
    assert made.hold(cold.routing, ONE) is None


def test_a_router_says_whom_to_wait_for() -> None:
    fleet = Fleet(("a", "b"), policy="program")
    prompt = list(range(400))
    fleet.store("a", prompt)
    full = [Holder("a")]
    before = fleet.router.hold(_request(fleet, prompt), fleet.now, full)
    assert before is not None and before.worker == Holder("a") and before.ns > 0
    assert fleet.router.hold(_request(fleet, prompt), fleet.now, []) is None
    assert fleet.router.hold(_request(fleet, prompt), fleet.now, [Holder("a"), Holder("b")]) is None
    assert fleet.router.hold(_request(fleet, prompt), fleet.now, full, exclude=full) is None
    assert fleet.router.hold(_request(fleet, prompt), fleet.now, full) == before, "asking changes nothing"
    other = Fleet(("a", "b"), policy="least-time")
    other.store("a", prompt)
    assert other.router.hold(_request(other, prompt), 0, full) is None, "others never wait"


def _request(fleet: Fleet, prompt: list[int]) -> RouteRequest:
    return RouteRequest("ask", chain(prompt), len(prompt) * 4 + 1, session="s")


def test_sub_agents_that_share_a_prefix_begin_together() -> None:
    fleet = Fleet(tuple("abcdefgh"), policy="program")
    shared = [f"skill {at}" for at in range(200)]
    home = fleet.pick([*shared, "main"], session="main")
    fleet.store(home, [*shared, "main"])
    places = {fleet.pick([*shared, f"task {at}"], session=f"sub {at}") for at in range(5)}
    assert places == {home}


def test_options_are_checked() -> None:
    made = make_policy(RouterConfig(policy="program", options={"stickiness": 2.0, "crowding": 0.5}))
    assert made.options["stickiness"] == 2 and made.options["patience"] == 1 and not made.ranked


@pytest.mark.parametrize("name", ["program", "affinity"])
def test_sessions_that_never_end_and_sessions_that_never_return(name: str) -> None:
    """Bounded in number, and so in bytes: names of clients have at most 128 characters in the gateway."""
    made = make_policy(RouterConfig(policy=name, sessions=1000, session_ttl_s=60, fallback="round-robin"))
    routing = Scene().routing
    chosen = Choice(1, 0.0, 1, "load")
    request = routing.request

    def routed(session: str, now: int) -> None:
        routing.request, routing.now = replace(request, session=session), now
        made.routed(routing, chosen)

    for number in range(2_000):
        routed(f"{number:0128}", number)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(2_000, 12_000):
            routed(f"{number:0128}", number)
        for number in range(10_000):
            routed("one", 200_000 + number)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(made) == 1000  # type: ignore[arg-type]
    assert grown < 1 << 20, "what was held before was replaced, and nothing was added"
    routed("late", 200_000 + 61 * SECOND + 200_000)
    assert len(made) <= 2  # type: ignore[arg-type]
