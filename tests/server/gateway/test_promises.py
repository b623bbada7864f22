"""Promises about engines' caches, and their outcomes: every reason by itself, and over HTTP with real engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, gated
from tests.server.gateway.support import Gated, cached, fleet, front
from tests.server.mock.support import Served

from kvyard.index import Holder
from kvyard.router import Decision
from kvyard.server.gateway.promises import (
    ARRIVED,
    CAUSES,
    AnnouncedElsewhere,
    Promise,
    PromiseTally,
    StreamMarks,
    entered,
)

pytestmark = pytest.mark.zmq

WHOLE = StreamMarks(resets=1, removed=5, whole=True, streams=1)


def promise(blocks: int = 4, tokens: int = 100, predicted: int = 0) -> Promise:
    decision = Decision(
        id="x",
        policy="kv",
        why="cost",
        num_tokens=tokens,
        blocks=tokens // 16,
        worker=Holder("e"),
        cost=0.0,
        tiers=(blocks,),
        predicted=predicted,
        prefill_tokens=0,
        active_blocks=0,
        shared_blocks=0,
        active_requests=0,
    )
    return Promise(decision, 16, WHOLE, 0)


@pytest.mark.parametrize(
    ("made", "found", "marks", "missing"),
    [
        (promise(), {"cached": 64}, WHOLE, {}),
        (promise(), {"cached": 96}, WHOLE, {}),
        (promise(), {"cached": 16}, WHOLE, {"phantom": 48}),
        (promise(), {"cached": 16}, WHOLE._replace(streams=0), {"unknown": 48}),
        (promise(), {"cached": 16}, WHOLE._replace(removed=6), {"evicted": 48}),
        (promise(), {"cached": 16}, WHOLE._replace(whole=False), {"stale": 48}),
        (promise(), {"cached": 16}, WHOLE._replace(resets=2), {"restarted": 48}),
        (promise(), {"cached": 16, "downs": 1}, WHOLE, {"restarted": 48}),
        (promise(), {"cached": 16, "announces": False}, WHOLE, {"no-events": 48}),
        (promise(), {"cached": 16, "prompt": 101}, WHOLE, {"tokens": 48}),
        (promise(), {"cached": 20}, WHOLE, {"block-size": 44}),
        (promise(predicted=1), {"cached": 48}, WHOLE._replace(removed=9), {"in-flight": 16}),
        (promise(predicted=1), {"cached": 16}, WHOLE._replace(removed=9), {"in-flight": 16, "evicted": 32}),
        # A prompt that ends with a block: its last one is computed in any case, and the rest has another reason.
        (promise(4, tokens=64), {"cached": 48, "prompt": 64}, WHOLE, {"last-block": 16}),
        (promise(4, tokens=64), {"cached": 0, "prompt": 64}, WHOLE, {"last-block": 16, "phantom": 48}),
    ],
)
def test_reasons(made: Promise, found: dict[str, int], marks: StreamMarks, missing: dict[str, int]) -> None:
    told = {"prompt": 100, "downs": 0, "announces": True, **found}
    delivered, why = made.settle(marks=marks, **told)  # type: ignore[arg-type]
    assert why == missing and set(why) <= set(CAUSES)
    assert delivered + sum(why.values()) == made.tokens


def test_everything_that_was_promised_ends_once() -> None:
    rng = Random(3)
    tally = PromiseTally()
    for _ in range(2000):
        made = promise(rng.randrange(1, 9), rng.randrange(9 * 16, 200), rng.randrange(3))
        marks = StreamMarks(rng.choice([1, 1, 2]), rng.choice([5, 7]), rng.random() < 0.9, 1)
        delivered, missing = made.settle(rng.randrange(200), 150, marks, rng.choice([0, 0, 1]), rng.random() < 0.9)
        entered((tally,), made.tokens, delivered, missing)
        assert all(tokens > 0 for tokens in missing.values())
    assert tally.promised == tally.delivered + tally.missing.total()


# -- over HTTP --------------------------------------------------------------------------------------------------------


def figures(gate: Gated) -> dict[str, int]:
    """All engines together: promised, delivered, unpromised, and the missing by reason, as a scrape has them."""
    gate.idle()
    found: dict[str, int] = {}
    for name, value in gate.metrics().items():
        for what in ("promised", "delivered", "unpromised", "missing"):
            if name.startswith(f"kvyard_gateway_engine_{what}_tokens_total"):
                key = name.partition('reason="')[2].partition('"')[0] or what
                found[key] = found.get(key, 0) + int(value)
    assert found["promised"] == found["delivered"] + sum(found[reason] for reason in CAUSES if reason in found)
    return {key: value for key, value in found.items() if value}


def test_kept_by_mock_engines() -> None:
    with front(2) as (gate, _):
        text = "a prompt that fills some blocks of sixteen, and a few more of them."
        first = cached(gate.complete(text))
        eventually(lambda: gate.post("/explain", body={"prompt": text}).json()["hit_blocks"] == 4)
        again = cached(gate.complete(text))
        assert (first, again) == (0, 64)
        assert figures(gate) == {"promised": 64, "delivered": 64}
        view = gate.client.get("/dashboard/view").json()
        said = {"promised": 64, "delivered": 64, "missing": {}, "unpromised": 0, "kept": 1, "broken": 0}
        assert view["totals"]["promises"] == said
        assert sum(worker["promises"]["delivered"] for worker in view["workers"]) == 64


def test_evicted_while_it_waited() -> None:
    # One request at a time: the second prompt waits behind an answer that needs the room.
    engine = {"num_gpu_blocks": 14, "max_num_seqs": 1, "max_model_len": 224, "enable_prefix_caching": True}
    with front(1, mock={"engine": engine}) as (gate, _):
        text = "a prompt that fills some blocks of sixteen, and a few more of them."
        gate.complete(text, max_tokens=1)
        eventually(lambda: gate.post("/explain", body={"prompt": text}).json()["hit_blocks"] == 4)
        with gate.stream("x", max_tokens=16 * 12, ignore_eos=True) as long:
            chunks = long.iter_bytes()
            next(chunks)  # it runs
            with gate.stream(text, max_tokens=1, stream_options={"include_usage": True}) as waiting:
                assert "hit=4/4" in waiting.headers["x-kvyard-decision"]
                for _ in chunks:
                    pass
                waiting.read()
        found = figures(gate)
        assert found["promised"] == 64 and found.get("delivered", 0) < 64
        assert found["evicted"] == 64 - found.get("delivered", 0)


def test_an_engine_without_events_is_remembered() -> None:
    # It announces nothing, so what was sent there is taken to be cached, and its cache is emptied.
    with (
        Served(workers=1) as served,
        Gated(engines=[{"url": served.url, "name": "deaf"}], router={"policy": "approx", "block_size": 16}) as gate,
    ):
        gate.ready(1)
        text = "a prompt that fills some blocks of sixteen, and a few more of them."
        gate.complete(text)
        gate.complete(text)
        served.client.post("/reset_prefix_cache").raise_for_status()
        gate.complete(text)
        assert figures(gate) == {"promised": 128, "delivered": 64, "no-events": 64}


def said(prompt: int | None, found: int | None) -> bytes:
    usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": 1}
    if found is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": found}
    return json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("second", "missing"),
    [
        ([answer("200 OK", said(70, None))], {"unreported": 64}),
        ([answer("200 OK", said(75, 16))], {"delivered": 16, "tokens": 48}),
        ([answer("200 OK", said(70, 20))], {"delivered": 20, "no-events": 44}),
        ([answer("200 OK", said(70, 70))], {"delivered": 64, "unpromised": 6}),
        ([answer("400 Bad Request", b"{}")], {"failed": 64}),
        (chunked(b"data: {}\n\n", end=False), {"cut": 64}),
    ],
)
def test_promises_under_every_behaviour_of_engines(second: Sequence[bytes], missing: dict[str, int]) -> None:
    text = "a prompt that fills some blocks of sixteen, and a few more of them.xyz"
    answers = [[answer("200 OK", said(70, 0))], second]

    def script(head: str, body: bytes) -> Sequence[bytes]:
        return answers.pop(0) if answers else [answer("200 OK", said(70, 0))]

    with ScriptedEngine(script) as engine, gated(engine, router={"policy": "approx", "block_size": 16}) as gate:
        gate.ready(1)
        gate.complete(text)
        try:
            gate.client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
        except Exception:
            assert "cut" in missing
        assert figures(gate) == {"promised": 64, **missing}


def test_series_go_with_their_engine_and_reasons_are_few() -> None:
    with fleet(workers=1) as served, Gated(fleets=[served.url]) as gate:
        gate.ready(1, 1)
        gate.complete("once")
        assert any("engine_promised_tokens_total" in name for name in gate.metrics())
        (name,) = gate.engines()
        gate.post("/admin/remove", engine=name)
        assert not any("engine_promised_tokens_total" in name for name in gate.metrics())
    assert len(CAUSES) == 13


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_crossed_events_are_those_of_new_prompts_at_another_engine(crossed: bool, late: int) -> None:
    """Two engines that take turns without a pause; events come ``late`` requests after the answer."""
    announced = AnnouncedElsewhere()
    held: dict[tuple[int, ...], dict[Holder, int]] = {}
    due: list[tuple[tuple[int, ...], str]] = []
    named: set[str] = set()
    for turn in range(40):
        keys = (1, 2, 100 + turn)
        asked = "ab"[turn % 2]
        announced.routed(keys)
        named.add(announced.computed(asked, keys, lambda keys: held.get(tuple(keys), {}), turn * ARRIVED))
        due.append((keys, "ab"[(turn + 1) % 2] if crossed else asked))
        while len(due) > late:
            arrived, owner = due.pop(0)
            held[arrived] = {Holder(owner): 3, Holder("a" if owner == "b" else "b"): 2}
    assert named - {""} == ({"a", "b"} if crossed and not late else set())


def test_a_prompt_that_comes_twice_shows_nothing_of_crossed_events() -> None:
    """Its events may be those of the second engine, while the first engine's are late."""
    announced = AnnouncedElsewhere()
    for turn in range(40):
        keys = (1, turn // 2)
        announced.routed(keys)
        asked = "ab"[turn % 2]
        held = {Holder("b"): 2}
        assert not announced.computed(asked, keys, lambda _, held=held: held, turn * ARRIVED)
    assert not announced.source("a")
