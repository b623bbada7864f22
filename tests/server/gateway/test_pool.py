"""A pool without HTTP: who gets which engine, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvyard.clock import SECOND, Clock, VirtualClock, WallClock
from kvyard.index import Holder, Identity, Indexer
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.router.flow import FlowConfig, FlowRequest
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.pool import EnginePool, EngineRequest, Exhausted
from kvyard.server.gateway.prompting import Prompting
from kvyard.server.gateway.reading import PromptReader
from kvyard.server.http import Refusal


def make_pool(
    count: int = 2,
    most: int = 1,
    queue: int = 2,
    seconds: float = 30.0,
    down: float = 5.0,
    clock: Clock | None = None,
    flow: FlowConfig | None = None,
    router: RouterConfig | None = None,
) -> EnginePool:
    routes = Router(router or RouterConfig(policy="round-robin"), (), Indexer(Identity(16)))

    async def nobody(body: dict[str, Any]) -> list[int] | None:
        return None

    config = GatewayConfig(
        engine_requests=most, queue=queue, queue_seconds=seconds, down_seconds=down, flow=flow or FlowConfig()
    )
    reader = PromptReader(Prompting("bytes", nobody), Identity(16), 0)
    made = EnginePool("m", routes, reader, config, clock or VirtualClock())
    for at in range(count):
        engine = Engine(GatewayEngine(url=f"http://h:{at + 1}", name=f"e{at}"))
        engine.state = "ready"
        made.add(engine)
        made.open(engine)
    return made


def place(id_: str, *shut: str) -> EngineRequest:
    return EngineRequest(request=RouteRequest(id_, [], 10), shut=frozenset(Holder(name) for name in shut))


def test_a_pool_places_in_order() -> None:
    async def run() -> None:
        made = make_pool()
        first, second = await made.place(place("a")), await made.place(place("b"))
        waiting = [asyncio.create_task(made.place(place(name))) for name in "cd"]
        await asyncio.sleep(0)
        assert len(made.waiting) == 2
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
        assert not made.waiting and first[1].in_flight == 0
        made.release(third[1], "c")
        made.router.check_integrity()
        assert not made.router.loads.active

    asyncio.run(run())


def owned(id_: str, tenant: str, session: str | None = None) -> EngineRequest:
    """A request of a tenant, and perhaps of a session."""
    return msgspec.structs.replace(place(id_), flow=FlowRequest(id_, 0, 10, session=session, tenant=tenant))


@pytest.mark.parametrize("late", [True, False], ids=["it was granted an engine", "its turn comes"])
def test_a_client_that_leaves_as_it_gets_its_turn_takes_no_place_of_its_tenants(late: bool) -> None:
    async def run() -> None:
        made = make_pool(count=1, queue=9, flow=FlowConfig(policy="las", tenant_requests=1, options={"busy_fade": 0}))
        first = await made.place(place("a"))
        waiting = asyncio.create_task(made.place(owned("b", "t", "talk")))
        await asyncio.sleep(0)
        if late:
            made.release(first[1], "a")
            waiting.cancel()
        else:
            waiting.cancel()
            made.release(first[1], "a")
        await asyncio.gather(waiting, return_exceptions=True)
        assert not made.waiting and not made.waiting._in_flight
        notes = made.waiting.policy._sessions.find("talk")  # type: ignore[attr-defined]
        assert notes.busy == 0, "its service fades from now on"
        assert (await asyncio.wait_for(made.place(owned("c", "t")), 5))[1].name == "e0"

    asyncio.run(run())


def test_a_retry_does_not_wait_for_itself_where_its_tenant_has_a_limit() -> None:
    async def run() -> None:
        made = make_pool(queue=9, flow=FlowConfig(tenant_requests=1))
        asked = owned("a", "t")
        decision, engine = await made.place(asked)
        asked.tried.add(engine.name)
        made.take_back(asked)
        made.release(engine, decision.id)
        again, other = await asyncio.wait_for(made.place(asked), 5)
        assert other is not engine
        waiting = asyncio.create_task(made.place(owned("b", "t")))
        await asyncio.sleep(0)
        assert len(made.waiting) == 1, "its tenant has its one request"
        made.waiting.ended(asked.flow, 10, 1, 0)  # type: ignore[arg-type]
        made.release(other, again.id)
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_a_pool_whose_engines_were_all_tried() -> None:
    async def run() -> None:
        made = make_pool(most=5)
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

    asyncio.run(run())


def test_a_request_waits_so_long_and_no_longer() -> None:
    async def run() -> None:
        made = make_pool(count=0, seconds=0.02)
        with pytest.raises(Refusal) as refused:
            await made.place(place("a"))
        assert refused.value.status == 503 and made.expired == 1 and "is up" in str(refused.value)

    asyncio.run(run())


def test_an_engine_that_was_removed_while_it_worked() -> None:
    async def run() -> None:
        made = make_pool()
        decision, engine = await made.place(place("a"))
        made.remove(engine)
        made.release(engine, decision.id)
        assert engine.in_flight == 0 and engine.name not in made.engines
        assert (await made.place(place("b")))[1].name != engine.name

    asyncio.run(run())


def test_an_engine_goes_down_and_comes_back_by_looks_and_by_requests() -> None:
    clock = VirtualClock()
    made = make_pool(most=5)
    health = EngineHealth(GatewayConfig(unhealthy_after=2, shun_seconds=1.0), clock)
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


def test_one_that_comes_back_with_as_much_as_it_may_have_gets_no_more() -> None:
    async def run() -> None:
        made = make_pool(count=1)
        _, engine = await made.place(place("a"))
        made.shut(engine)
        made.open(engine)
        waiting = asyncio.create_task(made.place(place("b")))
        await asyncio.sleep(0)
        assert len(made.waiting) == 1 and not waiting.done()
        made.release(engine, "a")
        assert (await waiting)[1] is engine
        made.release(engine, "b")

    asyncio.run(run())


def test_requests_that_wait_are_refused_soon_after_the_last_engine_went_down() -> None:
    async def run() -> None:
        made = make_pool(count=1, down=0.03, clock=WallClock())
        await made.place(place("a"))
        waiting = [asyncio.create_task(made.place(place(name))) for name in "bc"]
        await asyncio.sleep(0)
        made.forget(made.engines["e0"])
        for task in waiting:
            with pytest.raises(Refusal, match="no engine of model m is up") as refused:
                await asyncio.wait_for(task, 10)
            assert refused.value.status == 503
        assert made.expired == 2 and not made.waiting

    asyncio.run(run())


def test_while_all_engines_are_down_requests_are_refused_at_once() -> None:
    async def run() -> None:
        clock = VirtualClock()
        made = make_pool(count=2, most=5, clock=clock)
        made.forget(made.engines["e0"])
        made.shut(made.engines["e1"])
        early = asyncio.create_task(made.place(place("a")))
        await asyncio.sleep(0)
        assert len(made.waiting) == 1  # it may be back soon
        clock.advance(5 * SECOND)
        with pytest.raises(Refusal, match="no engine of model m is up"):
            await made.place(place("b"))
        made.open(made.engines["e0"])
        assert (await early)[1].name == (await made.place(place("c")))[1].name == "e0"

    asyncio.run(run())


def test_a_pool_goes_by_its_flow_policy() -> None:
    async def run() -> None:
        made = make_pool(count=1, queue=3, flow=FlowConfig(policy="priority"))
        _, engine = await made.place(place("a"))
        asked = {name: place(name) for name in "bcd"}
        for priority, (name, one) in enumerate(asked.items()):
            one.flow = FlowRequest(name, 0, 10, priority=-priority)
        tasks = {name: asyncio.create_task(made.place(one)) for name, one in asked.items()}
        await asyncio.sleep(0)
        latest, order = "a", ""
        while tasks:
            made.release(engine, latest)
            await asyncio.sleep(0)
            ((latest, _),) = [(name, task) for name, task in tasks.items() if task.done()]
            order += latest
            await tasks.pop(latest)
        assert order == "dcb"
        wait = asked["b"].wait
        assert wait is not None and wait.overtaken == 2 and "its priority is 0" in str(wait)
        assert asked["d"].wait is not None and asked["d"].wait.overtaken == 0
        made.configured(msgspec.structs.replace(made.config, flow=FlowConfig(policy="las"), queue=1))
        assert made.waiting.limit == 1 and made.waiting.config.policy == "las"

    asyncio.run(run())


@pytest.mark.parametrize(("patience", "engine"), [(0.05, "e1"), (1000.0, "e0")])
def test_a_session_waits_for_its_own_engine(patience: float, engine: str) -> None:
    """What was sent lately is taken for cached: 16,000 tokens, which take about a second elsewhere."""

    def chat(id_: str, session: str) -> EngineRequest:
        return EngineRequest(request=RouteRequest(id_, list(range(1, 1001)), 16_001, session=session))

    async def run() -> None:
        program = RouterConfig(policy="program", options={"patience": patience}, predicted_ttl_s=100)
        made = make_pool(clock=WallClock(), router=program)
        home = (await made.place(chat("a", "s")))[1]
        made.first_token("a")
        made.release(home, "a")
        busy = (await made.place(chat("c", "t")))[1]
        made.first_token("c")
        assert busy is home, "it has the prompt"
        asked = chat("b", "s")
        waiting = asyncio.create_task(made.place(asked))
        await asyncio.sleep(0)
        assert len(made.waiting) == 1, "the other engine has room, and costs more"
        if engine == "e0":
            made.release(busy, "c")
        placed = (await asyncio.wait_for(waiting, 30))[1]
        assert (placed is home) == (engine == "e0") and asked.wait is not None
        assert f"then for {home.name}" in asked.wait.why
        made.release(placed, "b")

    asyncio.run(run())
