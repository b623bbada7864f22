"""Prompts that a render service tokenizes before they are routed."""

from __future__ import annotations

import pytest
from tests.replay.support import record_of

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.replay.rendering import Rendering
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

FLEET = {"workers": 2, "timing": "fixed:10,5", "router": "round-robin"}


def burst(count: int, tokens: int = 1000) -> list[TraceRequest]:
    return [TraceRequest(str(number), 0, tokens, 2) for number in range(count)]


def test_a_prompt_takes_time_by_its_tokens() -> None:
    rendering = Rendering(1e3, 0)
    rendering.submit(record_of("long", 0, tokens=300), 0)
    rendering.submit(record_of("short", 0, tokens=100), 0)
    assert rendering.due() == 100_000
    assert [ready.id for ready in rendering.take(100_000)] == ["short"]
    assert [ready.id for ready in rendering.take(10**9)] == ["long"]
    assert rendering.due() is None


def test_renderers_take_one_prompt_each() -> None:
    rendering = Rendering(1e3, 2)
    for number in range(5):
        rendering.submit(record_of(str(number), 0, tokens=100), 0)
    rendering.submit(record_of("later", 0, tokens=100), 10**6)
    ready = []
    while (due := rendering.due()) is not None:
        ready += [(due, one.id) for one in rendering.take(due)]
    assert ready == [
        (100_000, "0"),
        (100_000, "1"),
        (200_000, "2"),
        (200_000, "3"),
        (300_000, "4"),
        (1_100_000, "later"),
    ]


def test_the_client_waits_for_it_and_the_router_sees_requests_after_it() -> None:
    plain = replay(burst(4), **FLEET)
    rendered = replay(burst(4), render_token_us=20, renderers=1, **FLEET)
    assert [one.ttft for one in plain.records] == [plain.records[0].ttft] * 4
    # 20 ms each, one after the other: by then each worker is idle again.
    waits = [after.ttft - before.ttft for before, after in zip(plain.records, rendered.records, strict=True)]
    assert waits == [20 * MS, 40 * MS, 60 * MS, 80 * MS]
    assert [one.admitted - one.arrival for one in rendered.records] == waits


def test_requests_that_are_tokenized_when_no_worker_is_left_are_placed_later() -> None:
    workers = [{"name": "a", "fail": "5ms"}, {"name": "b", "start": "100ms"}]
    done = replay(burst(1), workers=workers, timing="fixed:10,5", router="round-robin", render_token_us=20)
    (one,) = done.records
    assert one.status == "finished" and one.admitted == 100 * MS


@pytest.mark.parametrize("setting", ["render_token_us", "renderers"])
def test_negative_figures_are_refused(setting: str) -> None:
    with pytest.raises(KvyardError, match="render_token_us and renderers must not be negative"):
        replay(burst(1), **FLEET, **{setting: -1})
