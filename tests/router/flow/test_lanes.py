"""Lanes against a search of all that wait, and the work that they save."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.clock import SECOND
from kvyard.router.flow import FlowConfig, FlowPolicy, FlowQueue, FlowRequest
from kvyard.router.flow.lanes import Lane, LineLane, Scale
from kvyard.router.flow.las import LeastAttainedService


def asked(x: int, y: int = 0) -> FlowRequest:
    return FlowRequest(0, y, x)


def lanes() -> list[Lane]:
    return [
        Lane(lambda request, now: float(request.tokens)),
        LineLane(lambda request, now: (request.tokens, request.arrival)),
    ]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_heads_are_those_of_a_search(data: st.DataObject) -> None:
    """Small whole numbers, so that sums are exact and ties are common."""
    lane = data.draw(st.sampled_from(lanes()))
    lines = isinstance(lane, LineLane)
    there: dict[int, tuple[int, int]] = {}
    skipped: set[int] = set()
    for serial in range(data.draw(st.integers(1, 60))):
        figures = st.integers(0, 8)
        again = data.draw(st.sampled_from([serial, *there]))
        x, y = data.draw(figures), data.draw(figures)
        there[again] = x, y
        lane.add(again, asked(x, y), 0)
        for deed in data.draw(st.lists(st.sampled_from(["discard", "skip", "restore"]), max_size=2)):
            if not there:
                break
            other = data.draw(st.sampled_from(sorted(there)))
            getattr(lane, deed)(other)
            skipped.add(other) if deed == "skip" else skipped.discard(other)
            if deed == "discard":
                del there[other]
        scale = Scale(data.draw(figures), data.draw(figures)) if lines else Scale(1)
        left = [(scale.x * x + scale.y * y, serial) for serial, (x, y) in there.items() if serial not in skipped]
        assert lane.head(scale) == min(left, default=None) and len(lane) == len(there)
        if isinstance(lane, LineLane) and there:
            xs, ys = zip(*there.values(), strict=True)
            assert (lane.range.x, lane.range.y) == (min(xs), min(ys))
            assert (lane.range.most_x, lane.range.most_y) == (max(xs), max(ys))


class Searched(LeastAttainedService):
    """LAS that ranks all that wait anew for each that goes."""

    dynamic = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dynamic = True


@pytest.mark.parametrize("tenant_requests", [0, 3])
@pytest.mark.parametrize("patience_s", [0.0, 40.0])
def test_las_in_lanes_lets_requests_in_as_las_that_ranks_all_anew(
    monkeypatch: pytest.MonkeyPatch, tenant_requests: int, patience_s: float
) -> None:
    def order() -> list[object]:
        rng, sent = Random(5), []
        config = FlowConfig(policy="las", tenant_requests=tenant_requests, patience_s=patience_s)
        queue: FlowQueue[FlowRequest] = FlowQueue(config)
        going: list[FlowRequest] = []
        for number in range(900):
            now = number * SECOND // 10
            request = FlowRequest(
                number, now, rng.randrange(9000), None, rng.choice([None, *"abcdefgh"]), rng.choice(["", "t", "u"])
            )
            waiting = queue.push(request, request, now)
            if rng.random() < 0.05:
                queue.remove(waiting)
            refused = rng.random() < 0.1

            def place(waiting: Any, refused: bool = refused) -> bool:
                if refused and waiting.request.session == "c":
                    return False
                going.append(waiting.request)
                sent.append(waiting.request.id)
                return True

            room = len(going) + rng.choice([0, 1, 1, 2])
            queue.grant(now, lambda room=room: len(going) < room, place)  # type: ignore[misc]
            while going and rng.random() < 0.6:
                queue.ended(going.pop(rng.randrange(len(going))), rng.randrange(5000), rng.randrange(400), now)
        return sent

    fast = order()
    assert len(fast) > 500
    monkeypatch.setattr("kvyard.router.flow.las.LeastAttainedService", Searched)
    assert fast == order()


@pytest.mark.parametrize("policy", ["las", "progress", "fifo"])
def test_many_that_wait_are_not_looked_at_for_each_that_goes(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    looks = 0
    queue: FlowQueue[FlowRequest] = FlowQueue(FlowConfig(policy=policy))
    kind = type(queue.policy)
    method = "service" if policy == "las" else "rank"
    looked: Any = getattr(kind, method)

    def counted(self: FlowPolicy, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return looked(self, *args)

    monkeypatch.setattr(kind, method, counted)
    queue.configure(FlowConfig(policy=policy, patience_s=1e6), None)
    for number in range(3000):
        request = FlowRequest(number, number, 100, None, f"s{number % 900}")
        queue.push(request, request, number)
    looks = 0
    for number in range(500):
        gone: list[FlowRequest] = []

        def place(waiting: Any, gone: list[FlowRequest] = gone) -> bool:
            gone.append(waiting.item)
            return True

        queue.grant(9000, lambda gone=gone: not gone, place)  # type: ignore[misc]
        queue.ended(gone[0], 100, 10, 9000 + number)
    assert looks <= 500 * 4, "those of its session, and its own"
