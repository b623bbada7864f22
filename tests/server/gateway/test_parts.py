"""The gateway's small parts, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvyard import openai
from kvyard.clock import VirtualClock
from kvyard.errors import KvyardError
from kvyard.index import Holder, Identity, Indexer
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.server.gateway import asking
from kvyard.server.gateway.config import EngineConfig, GatewayConfig, NameConfig, check_url
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.headers import decision_header, downstream, upstream
from kvyard.server.gateway.health import Health
from kvyard.server.gateway.pool import Exhausted, Place, Pool
from kvyard.server.gateway.prompting import Prompting
from kvyard.server.gateway.usage import Usage, usage
from kvyard.server.http import Refusal


def test_usage_is_read_from_the_end() -> None:
    whole = b'{"choices":[{"text":"\\"usage\\": {\\"cached_tokens\\": 9}"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
    assert usage(whole) == Usage(5, 2, None)
    detailed = b'"usage": {"prompt_tokens" : 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}'
    assert usage(detailed) == Usage(5, 2, 3)
    stream = b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    assert usage(stream) == Usage(7, 1, None)
    assert usage(b"") == usage(b'{"usage":null}') == Usage()


def test_headers_of_one_hop_stay() -> None:
    given = [
        (b"host", b"x"),
        (b"authorization", b"Bearer c"),
        (b"connection", b"keep-alive, x-a"),
        (b"x-a", b"1"),
        (b"x-b", "ü".encode()),
        (b"x-c", b"\xff"),
        (b"x-request-id", b"old"),
        (b"content-length", b"5"),
    ]
    assert upstream(given, "new", None, True) == [
        ("x-request-id", "new"),
        ("authorization", "Bearer c"),
        ("x-b", "ü"),
        ("x-c", "ÿ"),
    ]
    assert ("authorization", "Bearer c") not in upstream(given, "new", None, False)
    assert upstream(given, "new", "Bearer e", True)[-1] == ("authorization", "Bearer e")
    down = downstream([(b"Date", b"x"), (b"Content-Type", b"y"), (b"Transfer-Encoding", b"chunked")], "d")
    assert down == [(b"content-type", b"y"), (b"x-kvyard-decision", b"d")]


def test_what_is_read_of_a_request() -> None:
    found = asking.read(openai.COMPLETIONS, b'{"model":"m","prompt":[1,2],"other":1}')
    assert isinstance(found, asking.PeekedCompletion) and found.prompt == [1, 2]
    # A field of the wrong type is the engine's to refuse; only the name is read then.
    assert type(asking.read(openai.COMPLETIONS, b'{"model":"m","stream":"yes"}')) is asking.PeekedBody
    assert asking.read("/v1/embeddings", b'{"model":"m","input":[]}').model == "m"
    for bad in (b"", b"[]", b"5", b'{"model":5}', b"\xff", b'{"a":', b'{"stream":"x","n":NaN}'):
        with pytest.raises(Refusal) as refused:
            asking.read(openai.CHAT, bad)
        assert refused.value.status == 400


def test_urls_and_streams() -> None:
    assert check_url("http://a:1/", "x") == "http://a:1"
    for bad in ("a:1", "ftp://a", "http://", "http://a:x", "http://a b", "http://a?x=1", "http://a:99999"):
        with pytest.raises(KvyardError):
            check_url(bad, "x")
    one = EngineConfig(url="http://h:1", events="tcp://h:5", replay="tcp://h:9", dp_size=3).registrations("m")
    assert [(told.endpoint, told.dp_size, told.instance_id) for told in one] == [("tcp://h:5", 3, "h:1")]
    listed = EngineConfig(url="http://h:1", events=["tcp://h:5", "tcp://h:7"], dp_size=2).registrations("m")
    assert [(told.endpoint, told.dp_rank) for told in listed] == [("tcp://h:5", 0), ("tcp://h:7", 1)]
    with pytest.raises(KvyardError, match="2 ranks"):
        EngineConfig(url="http://h:1", events=["tcp://h:5"], dp_size=2).registrations("m")
    engine = NameConfig(host="n", port=80, events_port=5, model="m").engine("[::1]:80")
    assert (engine.url, engine.events, engine.replay, engine.called) == (
        "http://[::1]:80",
        "tcp://[::1]:5",
        None,
        "[::1]:80",
    )
    with pytest.raises(KvyardError, match="two engines"):
        GatewayConfig(engines=[EngineConfig(url="http://h:1"), EngineConfig(url="http://h:1/")])


def test_prompts() -> None:
    asked: list[dict[str, Any]] = []

    async def engine(body: dict[str, Any]) -> list[int] | None:
        asked.append(body)
        return [1, 2, 3] if body.get("prompt") != "fail" else None

    def read(how: str, path: str, body: bytes) -> list[list[int]]:
        return asyncio.run(Prompting(how, engine).prompts(asking.read(path, body)))

    text, chat = openai.COMPLETIONS, openai.CHAT
    assert read("bytes", text, b'{"prompt":"ab"}') == [[97, 98]] and not asked
    assert read("bytes", text, b'{"prompt":["a",[5,6]]}') == [[97], [5, 6]]
    assert read("engine", text, b'{"prompt":[7,8]}') == [[7, 8]] and not asked
    assert read("engine", text, b'{"prompt":"x","add_special_tokens":false}') == [[1, 2, 3]]
    assert asked.pop() == {"model": None, "prompt": "x", "add_special_tokens": False}
    assert read("engine", text, b'{"prompt":"fail"}') == []
    asked.clear()
    messages = b'{"model":"m","messages":[{"role":"user","content":"h"}],"tools":[1],"chat_template_kwargs":{"a":1}}'
    assert read("engine", chat, messages) == [[1, 2, 3]]
    sent = msgspec.json.decode(msgspec.json.encode(asked.pop()))
    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": "h"}],
        "tools": [1],
        "chat_template_kwargs": {"a": 1},
    }
    assert read("bytes", chat, b'{"messages":[{"role":"user","content":"h"}]}') != []
    for odd in (
        b'{"messages":[{"content":5}]}',
        b'{"messages":5}',
        b"{}",
        b'{"messages":[{"role":"u","content":[{}]}]}',
    ):
        assert read("bytes", chat, odd) == []
    image = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}'
    assert read("engine", chat, image) == [] and not asked
    assert read("bytes", "/v1/embeddings", b'{"input":"x"}') == []


def pool(count: int = 2, most: int = 1, queue: int = 2, seconds: float = 30.0) -> Pool:
    router = Router(RouterConfig(policy="round-robin"), (), Indexer(Identity(16)))

    async def nobody(body: dict[str, Any]) -> list[int] | None:
        return None

    made = Pool(
        "m",
        router,
        Prompting("bytes", nobody),
        VirtualClock(),
        engine_requests=most,
        queue=queue,
        queue_seconds=seconds,
    )
    for at in range(count):
        engine = Engine(EngineConfig(url=f"http://h:{at + 1}", name=f"e{at}"))
        engine.state = "ready"
        made.add(engine)
        made.open(engine)
    return made


def place(id_: str, *shut: str) -> Place:
    return Place(request=RouteRequest(id_, [], 10), shut=frozenset(Holder(name) for name in shut))


def on_a_loop(deed: Callable[[], Any]) -> None:
    asyncio.run(deed())


def test_a_pool_places_in_order() -> None:
    async def run() -> None:
        made = pool()
        first, second = await made.place(place("a")), await made.place(place("b"))
        waiting = [asyncio.create_task(made.place(place(name))) for name in "cd"]
        await asyncio.sleep(0)
        assert made.queued == 2
        with pytest.raises(Refusal) as refused:
            await made.place(place("e"))
        assert refused.value.status == 429 and made.refused == 1
        made.release(second[1], "b")
        third = await waiting[0]
        assert third[1] is second[1] and not waiting[1].done()
        # One that is granted room and leaves in the same moment gives it back.
        made.release(first[1], "a")
        waiting[1].cancel()
        await asyncio.gather(waiting[1], return_exceptions=True)
        assert made.queued == 0 and first[1].in_flight == 0
        made.release(third[1], "c")
        made.router.check_integrity()
        assert not made.router.loads.active

    on_a_loop(run)


def test_a_pool_whose_engines_were_all_tried() -> None:
    async def run() -> None:
        made = pool(most=5)
        asked = place("a")
        for name in ("e0", "e1"):
            _, engine = await made.place(asked)
            assert engine.name == name
            made.release(engine, "a")
            asked.tried.add(name)
        with pytest.raises(Exhausted):
            await made.place(asked)
        # Once nobody is up, those who were tried may be tried again when they are back.
        for engine in made.engines.values():
            made.forget(engine)
        later = asyncio.create_task(made.place(asked))
        await asyncio.sleep(0)
        made.open(made.engines["e1"])
        assert (await later)[1].name == "e1"
        # And one who waits while the last untried engine goes is told.
        made.open(made.engines["e0"])
        other = place("b", "e0")
        other.tried.add("e1")
        with pytest.raises(Exhausted):
            await made.place(other)

    on_a_loop(run)


def test_a_pool_nobody_comes_back_to() -> None:
    async def run() -> None:
        made = pool(count=0, seconds=0.02)
        with pytest.raises(Refusal) as refused:
            await made.place(place("a"))
        assert refused.value.status == 503 and made.expired == 1 and "is up" in str(refused.value)

    on_a_loop(run)


def test_an_engine_that_was_removed_while_it_worked() -> None:
    async def run() -> None:
        made = pool()
        decision, engine = await made.place(place("a"))
        made.remove(engine)
        made.release(engine, decision.id)
        assert engine.in_flight == 0 and engine.name not in made.engines
        assert (await made.place(place("b")))[1].name != engine.name

    on_a_loop(run)


def test_verdicts() -> None:
    clock = VirtualClock()
    made = pool(most=5)
    health = Health(GatewayConfig(unhealthy_after=2, shun_seconds=1.0), clock)
    one, other = made.engines["e0"], made.engines["e1"]
    health.unwell(one, "slow", gone=False)
    assert one.state == "suspect" and one.up
    health.unwell(one, "slow", gone=False)
    assert one.state == "down" and made.router.workers == [*one.holders, *other.holders]
    health.well(one)
    assert one.state == "ready"
    health.unwell(one, "refused", gone=True)
    assert one.state == "down" and made.router.workers == other.holders
    health.well(one)
    for _ in range(2):
        health.failed(one, "500", gone=False)
        health.served(other, [one])
    assert one.state == "down" and "others" in one.reason
    health.well(one)
    assert one.state == "down", "not before its time is up"
    clock.advance(2_000_000_000)
    health.well(one)
    assert one.state == "ready" and one.strikes == 0
    made.shut(other)
    for _ in range(5):
        health.served(other, [one])
    assert one.state == "ready", "the last one is never shunned"


def test_a_decision_in_a_line() -> None:
    router = Router(RouterConfig(policy="round-robin"), ["w"], Indexer(Identity(16)))
    decision = router.route(RouteRequest("a", [1, 2], 40), 0)
    assert decision_header(decision, 1) == "worker=w@0; policy=round-robin; why=turn; hit=0/2; best=0; cost=0.000"
    assert decision_header(decision, 2).endswith("; tries=2")


def test_a_preview_changes_nothing() -> None:
    def fresh() -> Router:
        return Router(RouterConfig(), ["a", "b", "c"], Indexer(Identity(16)), seed=3)

    plain, looked = fresh(), fresh()
    for at in range(40):
        request = RouteRequest(at, [at % 5, 100 + at % 5], 40)
        seen = looked.preview(request, at)
        assert looked.preview(request, at) == seen
        decision = looked.route(request, at)
        assert decision == plain.route(request, at)
        assert (seen.worker, seen.cost, seen.why) == (decision.worker, decision.cost, decision.why)
        if at % 3 == 0:
            assert plain.finished(at, at) and looked.finished(at, at)
    looked.check_integrity()
