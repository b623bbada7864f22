"""The queue before a router: order by policy, bounds, and why a request waited."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.clock import MS, SECOND
from kvyard.errors import KvyardError
from kvyard.router.flow import FLOWS, FlowConfig, FlowPolicy, FlowQueue, FlowRequest
from kvyard.router.flow.session_book import IDLE, SessionBook


def asked(name: str, at: float = 0, tokens: int = 100, **more: Any) -> FlowRequest:
    return FlowRequest(name, round(at * SECOND), tokens, **more)


def queue(policy: str = "fifo", limit: int | None = None, **more: Any) -> FlowQueue[str]:
    return FlowQueue(FlowConfig(policy=policy, **more), limit)


def push(made: FlowQueue[str], *requests: FlowRequest) -> None:
    for request in requests:
        made.push(request, str(request.id), request.arrival)


def order(made: FlowQueue[str], now: float = 10, count: int | None = None) -> str:
    """The names of those that go while there is room for ``count``, in their order."""
    sent: list[str] = []
    made.grant(
        round(now * SECOND),
        lambda: count is None or len(sent) < count,
        lambda waiting: sent.append(waiting.item) or True,  # type: ignore[func-returns-value]
    )
    return "".join(sent)


def test_first_come_first_served() -> None:
    made = queue()
    push(made, asked("a"), asked("b"), asked("c"))
    assert order(made, count=2) == "ab" and order(made) == "c" and not made


def test_strict_priority() -> None:
    made = queue("priority")
    push(made, asked("a", priority=1), asked("b"), asked("c", priority=-2), asked("d"))
    assert order(made) == "cbda"


def test_a_step_of_weighted_priority_is_worth_seconds() -> None:
    made = queue("weighted-priority", options={"seconds": 2})
    push(made, asked("a", 0, priority=1), asked("b", 1.9), asked("c", 2.1))
    assert order(made) == "bac"


def test_shortest_job_by_what_is_known() -> None:
    made = queue("shortest", options={"output_weight": 10})
    made.ended(asked("x", session="s", tokens=1000), 1000, 50, 0)
    push(
        made,
        asked("a", tokens=900, output=10),  # 900 + 100
        asked("b", tokens=1100, session="s"),  # 50 new ones, and 50 answers as before: 550
        asked("c", tokens=100, output=10),  # 200
        asked("d", tokens=90),  # unknown: as other answers, 590
    )
    assert order(made) == "cbda"


def test_least_attained_service() -> None:
    made = queue("las", options={"wait_weight": 0, "half_life_s": 0})
    for session, tokens in (("s", 500), ("t", 100), ("u", 300)):
        made.ended(asked("x", session=session), tokens, 10, 0)
    push(made, *(asked(name, session=session) for name, session in zip("abcd", "stuv", strict=True)))
    assert order(made) == "dbca"


def test_service_fades_by_half() -> None:
    made = queue("las", options={"wait_weight": 0, "half_life_s": 10, "output_weight": 2})
    made.ended(asked("x", session="s"), 380, 10, 0)
    assert made.policy.service("s", 20 * SECOND) == 100  # type: ignore[attr-defined]
    made.ended(asked("y", session="s", tokens=50), 50, 0, 20 * SECOND)
    assert made.policy.service("s", 30 * SECOND) == 75  # type: ignore[attr-defined]


def test_service_fades_only_while_its_session_is_idle() -> None:
    """As in llm-d 0.9: idle from 0 to 10 s, from 40 to 50 s and from 60 s on; it waits, runs, and gives up between."""
    made = queue("las", options={"half_life_s": 10})
    service = partial(made.policy.service, "s")  # type: ignore[attr-defined]
    made.ended(asked("x", session="s"), 400, 0, 0)
    assert service(10 * SECOND) == 200
    made.push(asked("a", session="s"), "a", 10 * SECOND)
    assert service(25 * SECOND) == 200
    assert order(made, 30) == "a" and service(35 * SECOND) == 200
    made.ended(asked("a", session="s"), 100, 0, 40 * SECOND)
    assert service(40 * SECOND) == 300 and service(50 * SECOND) == 150
    made.sent(asked("b", session="s"), 50 * SECOND)
    waiting = made.push(asked("c", session="s"), "c", 50 * SECOND)
    made.ended(asked("b", session="s"), 10, 0, 55 * SECOND)
    assert service(60 * SECOND) == 250  # c waits still
    made.remove(waiting)
    assert service(65 * SECOND) == 125
    # A worker fails with one of its two requests, which waits again and is sent elsewhere.
    retried = asked("d", session="s")
    made.sent(retried, 65 * SECOND)
    made.sent(asked("e", session="s"), 65 * SECOND)
    made.returned(retried)
    made.sent(retried, 70 * SECOND)
    made.ended(retried, 0, 0, 75 * SECOND)
    assert service(85 * SECOND) == 225, "the other one runs still"
    made.ended(asked("e", session="s"), 0, 0, 85 * SECOND)
    assert service(95 * SECOND) == 162.5


def test_service_fades_always_if_wanted() -> None:
    made = queue("las", options={"half_life_s": 10, "busy_fade": 1})
    made.ended(asked("x", session="s"), 400, 0, 0)
    made.push(asked("a", session="s"), "a", 0)
    assert made.policy.service("s", 10 * SECOND) == 200  # type: ignore[attr-defined]


@pytest.mark.parametrize(("cached_weight", "service"), [(1, 1020), (0.5, 620), (0, 220)])
def test_cached_tokens_of_a_prompt_are_service_too(cached_weight: float, service: float) -> None:
    made = queue("las", options={"half_life_s": 0, "output_weight": 2, "cached_weight": cached_weight})
    made.ended(asked("x", session="s", tokens=1000), 200, 10, 0)
    assert made.policy.service("s", 0) == service  # type: ignore[attr-defined]


def test_waiting_counts_a_little_under_las() -> None:
    made = queue("las", options={"service_weight": 0.8, "wait_weight": 0.2, "half_life_s": 0})
    made.ended(asked("x", session="s"), 1000, 0, 0)
    made.ended(asked("x", session="t"), 900, 0, 0)
    # Within the range of those that wait: 0.8 x 1 - 0.2 x 1 = 0.6, 0.8 x 0.9 - 0.2 x 0.5 = 0.62, and 0
    push(made, asked("a", 0, session="s"), asked("b", 5, session="t"), asked("c", 10, session="u"))
    assert order(made, 10) == "cab"


def test_service_counts_within_the_range_of_those_that_wait() -> None:
    made = queue("las", options={"half_life_s": 0})
    made.ended(asked("x", session="s"), 1000, 0, 0)
    made.ended(asked("x", session="t"), 900, 0, 0)
    # 0.8 x 1 - 0.2 x 1 = 0.6 against 0: of two, the one with less goes first, however little less it has had
    push(made, asked("a", 0, session="s"), asked("b", 5, session="t"))
    assert order(made, 10) == "ba"


def test_earliest_deadline() -> None:
    made = queue("deadline", options={"ttft_ms": 500, "token_us": 1000})
    push(made, asked("a", tokens=2000), asked("b", tokens=100), asked("c", tokens=9000, deadline=550 * MS))
    assert order(made) == "cba"


def test_sessions_in_progress_go_first() -> None:
    made = queue("progress", options={"ttl_s": 10})
    for turns, session in ((1, "s"), (3, "t"), (2, "u")):
        for _ in range(turns):
            made.ended(asked("x", session=session), 10, 10, 0)
    made.ended(asked("x", session="u"), 10, 10, 95 * SECOND)
    push(
        made, *(asked(name, 100, session=session) for name, session in zip("abcd", ["new", "s", "t", "u"], strict=True))
    )
    assert order(made, 100) == "dcba"


def test_tenants_get_tokens_by_weight() -> None:
    made = queue("fair", weights={"big": 2.0}, options={"output_weight": 0})
    push(
        made, *(asked(f"b{at}", tenant="big") for at in range(8)), *(asked(f"s{at}", tenant="small") for at in range(8))
    )
    sent: list[str] = []
    made.grant(0, lambda: len(sent) < 9, lambda waiting: sent.append(waiting.item) or True)  # type: ignore[func-returns-value]
    assert sum(name.startswith("b") for name in sent) == 6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_tenant_that_waits_falls_behind_by_more_than_a_request(data: st.DataObject) -> None:
    made = queue("fair", options={"output_weight": 0})
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=4, max_size=30))
    for at, size in enumerate(sizes):
        push(made, asked(f"{at}", tokens=size, tenant="ab"[at % 2]))
    got = {"a": 0, "b": 0}
    left = {"a": sum(sizes[::2]), "b": sum(sizes[1::2])}

    def place(waiting: Any) -> bool:
        request = waiting.request
        got[request.tenant] += request.tokens
        left[request.tenant] -= request.tokens
        if all(left.values()):
            assert abs(got["a"] - got["b"]) <= 2 * max(sizes)
        return True

    made.grant(0, lambda: True, place)


def test_one_that_cannot_be_placed_keeps_its_place() -> None:
    for policy in ("fifo", "las"):
        made = queue(policy)
        push(made, asked("a"), asked("b"), asked("c"))
        sent: list[str] = []

        def place(waiting: Any, sent: list[str] = sent) -> bool:
            if waiting.item == "a":
                return False
            sent.append(waiting.item)
            return True

        made.grant(0, lambda: True, place)
        assert sent == ["b", "c"] and len(made) == 1 and order(made) == "a"


def test_requests_that_are_given_up_leave_nothing_behind() -> None:
    made = queue("priority")
    push(made, asked("a"))
    for at in range(1000):
        assert made.remove(made.push(asked(f"x{at}", priority=5), f"x{at}", 0))
    assert len(made._in_time) < 200 and len(made._lanes[""]._heap) < 100 and order(made) == "a"


def test_nobody_is_ranked_while_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request that comes asks, and ranking all that wait takes long."""
    made = queue("las")
    push(made, asked("a"), asked("b"))
    with monkeypatch.context() as patched:
        patched.setattr(type(made.policy), "rank", None)
        made.grant(0, lambda: False, lambda waiting: True)
    assert order(made) == "ab"


def test_patience_goes_before_the_policy() -> None:
    made = queue("priority", patience_s=5)
    push(made, asked("a", 0, priority=9), asked("b", 4), asked("c", 5, priority=-1))
    assert order(made, 7, count=1) == "a" and order(made, 7) == "cb"


def test_a_full_queue_says_when_to_come_again() -> None:
    made = queue(limit=4)
    push(made, *(asked(name) for name in "abcd"))
    refusal = made.refusal(asked("e"), 1)
    assert refusal is not None and refusal.kind == "full" and refusal.retry_after_s == 1
    for second in (3, 6):  # one goes every 3 s, and two more come
        order(made, second, count=1)
        push(made, asked(f"x{second}"))
    refusal = made.refusal(asked("e"), 1)
    assert refusal is not None and refusal.retry_after_s == 12
    order(made, 9)  # all that wait go, and for an hour nobody waits
    push(made, *(asked(name, 3600) for name in "fghi"))
    order(made, 3603, count=1)
    push(made, asked("j", 3603))
    refusal = made.refusal(asked("k", 3603), 1)
    assert refusal is not None and 0 < refusal.retry_after_s <= 12


def test_a_tenant_that_floods_the_queue_leaves_room() -> None:
    made = queue("fair", limit=10)
    let_in = 0
    for at in range(50):
        request = asked(f"{at}", tenant="flood")
        refusal = made.refusal(request, 1)
        if refusal is None:
            push(made, request)
            let_in += 1
        else:
            assert refusal.kind == "share" and "tenant flood has 5" in refusal.reason
    assert let_in == 5
    assert made.refusal(asked("other", tenant="quiet"), 1) is None


@pytest.mark.parametrize("policy", sorted(FLOWS.names()))
def test_a_tenants_requests_in_flight_are_limited(policy: str) -> None:
    made = queue(policy, tenant_requests=2)
    first = asked("0", tenant="t")
    assert not made.capped(first, 1)
    made.sent(first, 0)
    flood = [asked(name, at, tenant="t") for at, name in enumerate("abc")]
    push(made, *flood, asked("x", 5), asked("y", 6, tenant="u"))
    assert sorted(order(made)) == ["a", "x", "y"], "there is room for all, and t has two"
    assert made.capped(asked("z", tenant="t"), 1) and not made.capped(asked("z"), 1)
    assert order(made) == "" and len(made) == 2
    assert made.ended(flood[0], 1, 1, 10) and order(made) == "b"
    assert not made.ended(flood[0], 1, 1, 10), "it has ended before"
    [waiting] = made._waiting.values()
    assert made.remove(waiting)
    assert made.ended(first, 1, 1, 10) and made.ended(flood[1], 1, 1, 10) and order(made) == "" and not made
    assert not made._in_flight.get("t") and not made._lanes


def test_one_that_is_given_up_as_its_turn_comes_passes_it_on() -> None:
    made = queue("fair", tenant_requests=1)
    first = asked("0", tenant="t")
    made.sent(first, 0)
    waiting = [made.push(asked(name, tenant="t"), name, 0) for name in "ab"]
    assert order(made) == "", "both are held back"
    assert made.ended(first, 1, 1, 0)
    made.grant(0, lambda: False, lambda waiting: True)
    assert made.remove(waiting[0]) and order(made) == "b"
    for at in range(500):
        made.remove(made.push(asked(f"x{at}", tenant="t"), f"x{at}", 0))
        assert order(made) == ""
    assert not made._lanes and len(made._in_time) < 100


def test_a_capped_tenant_keeps_its_order_and_costs_others_no_time() -> None:
    made = queue("fair", tenant_requests=1)
    flood = [asked(f"{at:04}", tenant="t") for at in range(2000)]
    push(made, *flood)
    assert order(made) == "0000"
    placed: list[str] = []
    ranked = 0

    def place(waiting: Any) -> bool:
        nonlocal ranked
        ranked += 1
        placed.append(waiting.item)
        return True

    for at in range(1999):
        assert made.ended(flood[at], 1, 1, at)
        made.grant(at, lambda: True, place)
    assert placed == [request.id for request in flood[1:]]
    assert ranked == 1999


def test_shedding_by_chance() -> None:
    made = FlowQueue[str](FlowConfig(shed=True, shed_depth=5, shed_power=5, shed_k=300), None, seed=1)
    assert all(made.refusal(asked("x", priority=1), 4) is None for _ in range(200))
    push(made, *(asked(f"{at}") for at in range(4)))  # saturation 4 / (5 x 4) = 0.2, chance 9.6 %
    shed = sum(made.refusal(asked("x", priority=1), 4) is not None for _ in range(4000))
    assert 0.08 < shed / 4000 < 0.112
    assert all(made.refusal(asked("x"), 4) is None for _ in range(200))
    push(made, *(asked(f"m{at}") for at in range(3)))  # saturation 0.35: all
    assert all(made.refusal(asked("x", priority=1), 4) is not None for _ in range(200))


def test_why_a_request_waited() -> None:
    made = queue("las", options={"half_life_s": 0})
    made.ended(asked("x", session="s"), 1000, 100, 0)
    push(made, asked("a", session="s"), asked("b", 1), asked("c", 2))
    waits: dict[str, Any] = {}

    def place(waiting: Any) -> bool:
        waits[waiting.item] = made.explain(waiting, 4 * SECOND)
        return True

    made.grant(4 * SECOND, lambda: True, place)
    assert list(waits) == ["b", "c", "a"]
    assert waits["a"].overtaken == 2 and waits["a"].ahead == 0 and waits["a"].waited_ms == 4000
    assert waits["c"].overtaken == 0 and waits["c"].ahead == 2
    assert str(waits["a"]) == (
        "waited 4,000.0 ms behind 0 requests, 2 that came later went first: las, its session has had 1,200 tokens of "
        "service, and those with less go first"
    )
    assert waits["b"].why == "its session has had no service yet: only those that came before it go first"


@pytest.mark.parametrize("policy", FLOWS.names())
def test_every_policy_sends_each_once_and_explains_it(policy: str) -> None:
    rng = Random(3)
    made = queue(policy)
    waiting = []
    sent: list[str] = []
    for at in range(200):
        request = asked(
            f"{at}",
            at / 10,
            rng.randrange(1, 5000),
            session=rng.choice([None, "s", "t"]),
            tenant=rng.choice(["", "x"]),
            priority=rng.randrange(3),
            output=rng.choice([None, 30]),
        )
        waiting.append(made.push(request, f"{at}", request.arrival))
        if rng.random() < 0.1:
            gone = rng.choice(waiting)
            if made.remove(gone):
                sent.append(gone.item)
            assert not made.remove(gone)
        if rng.random() < 0.5:
            before = len(sent)

            def place(one: Any, now: int = request.arrival) -> bool:
                assert made.explain(one, now).why
                sent.append(one.item)
                made.ended(one.request, 100, 10, now)
                return True

            made.grant(request.arrival, lambda before=before: len(sent) < before + 2, place)  # type: ignore[misc]
    sent += made.drain()
    assert sorted(sent, key=int) == [f"{at}" for at in range(200)] and not made


def test_another_policy_while_requests_wait() -> None:
    made = queue("fifo")
    push(made, asked("a", priority=2), asked("b", priority=1))
    made.configure(FlowConfig(policy="priority"), 5)
    assert made.limit == 5 and order(made) == "ba"


def test_sessions_are_remembered_within_bounds() -> None:
    book = SessionBook(most=3)
    for name in "abca":
        book.open(name, 0).turns += 1
    book.open("d", 0)
    assert len(book) == 3 and book.find("b") is None and book.find("a") is not None
    made = queue("fair")
    for at in range(70_000):
        made.sent(asked("x", tenant=f"{at}"), 0)
    assert len(made.policy._ends) <= 65_536  # type: ignore[attr-defined]


def test_a_million_sessions_and_a_session_of_a_million_turns() -> None:
    book = SessionBook(most=1000)
    for number in range(1_000_000):
        book.open(f"s{number}", number)
    assert len(book) == 1000
    for number in range(1_000_000):
        book.open("one", 1_000_000 + number).turns += 1
    assert len(book) == 1000 and book.open("one", 2_000_000).turns == 1_000_000
    assert book.open("s999999", IDLE + 2_000_001).turns == 0, "quiet for an hour, it begins anew"
    assert len(book) == 1, "and the others are gone"


@pytest.mark.parametrize("policy", ["las", "progress", "shortest"])
def test_policies_forget_sessions_that_were_quiet(policy: str) -> None:
    made = queue(policy).policy
    for number in range(70_000):
        made.ended(asked("x", session=f"{number}"), 1, 1, number)
    sessions = made._sessions  # type: ignore[attr-defined]
    assert len(sessions) == 65_536
    made.ended(asked("x", session="late"), 1, 1, 2 * IDLE)
    assert len(sessions) == 1


def test_tenants_are_forgotten_once_they_have_no_more_than_their_share() -> None:
    made = queue("fair")
    for number in range(1_000):
        push(made, asked(f"r{number}", tenant=f"t{number}"))
    assert len(made.policy) == 1_000  # type: ignore[arg-type]
    order(made)
    for number in range(1_000):
        push(made, asked(f"r{number}", tenant="one"))
    order(made)
    made.sent(asked("x", tenant="other"), 0)
    assert len(made.policy) <= 2  # type: ignore[arg-type]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(KvyardError, match="unknown flow policy 'lass'"):
        FlowConfig(policy="lass")
    with pytest.raises(KvyardError, match="unknown option 'x' of the flow policy las"):
        FlowConfig(policy="las", options={"x": 1})
    with pytest.raises(KvyardError, match="weight of tenant a is 0"):
        FlowConfig(weights={"a": 0})
    with pytest.raises(KvyardError, match="shed_k of flow control"):
        FlowConfig(shed_k=-1)
    with pytest.raises(KvyardError, match="tenant_requests is -1"):
        FlowConfig(tenant_requests=-1)


def test_other_peoples_policies() -> None:
    class Latest(FlowPolicy):
        def rank(self, request: FlowRequest, now: int) -> float:
            return -float(request.arrival)

    FLOWS.register("test-latest", Latest)
    try:
        made = queue("test-latest")
        push(made, asked("a", 0), asked("b", 1), asked("c", 2))
        assert order(made) == "cba"
    finally:
        FLOWS._loaded.pop("test-latest")
