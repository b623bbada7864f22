"""An exchange: one client's request carried to an engine, and its answer carried back as it comes, byte for byte.

Nothing goes to the client before the engine's first bytes are here: until then another engine can be tried, and afterwards
never. An answer that isn't streamed is held until it is whole, so an engine that dies over it is no loss either. Where the
client hangs up, the engine's connection is closed, which is how engines learn of it.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec

from kvyard.clock import Clock, pause
from kvyard.router import Decision
from kvyard.server.gateway.access import RateAdmission
from kvyard.server.gateway.client import ELSEWHERE, EngineClient
from kvyard.server.gateway.connections import EngineConnection, read_up_to
from kvyard.server.gateway.failures import AnswerCut, EngineFailed
from kvyard.server.gateway.headers import RANK, decision_header, downstream
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.pool import Engine, EnginePool, Exhausted, Placement
from kvyard.server.gateway.tracing import RequestTrace
from kvyard.server.gateway.traffic import TAIL, AnswerTokens, ProxiedRequest, Traffic, answer_tokens
from kvyard.server.http import (
    JSON,
    LOST,
    Refusal,
    chunk_writer,
    close_connection,
    openai_error,
    send_response,
    until_disconnect,
)

RESPONSES = "/v1/responses"
WHOLE = 64 << 20
"""Bytes up to which an answer that isn't streamed is held until it is whole."""
BODILESS = ("GET", "DELETE")
"""Methods that have no body unless there is one."""
MOST_TRIES = 100
"""Engines that a request is sent to, however unlucky it is."""
BREATH = 0.05
"""Seconds before engines are tried a second time."""
_ERROR = re.compile(rb'^data: ?\{"error"')
_CODE = re.compile(rb'"code" ?: ?(\d{3})')


class Proxy(msgspec.Struct, eq=False):
    """What all exchanges of a gateway share."""

    client: EngineClient
    health: EngineHealth
    traffic: Traffic
    clock: Clock
    retries: int
    homes: ResponseHomes = msgspec.field(default_factory=ResponseHomes)
    draining: bool = False
    """Whether the gateway ends: what is cut off then was not the client's doing."""

    def drain(self) -> None:
        self.draining = True


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """The answer to one request, as an ASGI application; it does its work when it is called."""

    proxy: Proxy
    proxied: ProxiedRequest
    pool: EnginePool
    place: Placement
    path: str
    body: bytes
    method: str = "POST"
    headers: list[tuple[bytes, bytes]]
    """For the engine."""
    ticket: RateAdmission | None = None
    """What it draws on, where there are limits."""
    status_code: int = 200
    scope: Any = None
    send: Any = None
    handed_over: bool = False
    """Whether another engine computed its prompt."""
    prefill_tried: bool = False
    """Whether one was asked to, whatever came of it."""
    _risked: int = 0
    """Tries in which an engine had the request and may have suffered from it; refused connections aren't among them."""
    _failed_at: list[Engine] = []
    _computed: bool = True
    """Whether the engine that has it may have computed the prompt."""
    _began: bool = False
    """Whether anything went to the client."""
    _hung_up: bool = False
    _sent: int = 0
    """When the engine that answered had the request, where that is traced."""
    _task: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Carry it out."""
        self.scope, self.send = scope, send
        self._task = asyncio.current_task()
        lost = scope.get(LOST)
        watching = None
        if lost is not None:
            lost.add(self._gone)
        else:
            watching = asyncio.get_running_loop().create_task(until_disconnect(receive))
            watching.add_done_callback(self._watched)
        outcome = "failed"
        try:
            outcome = await self._serve()
        except asyncio.CancelledError:
            outcome = "cancelled"
            if not self._hung_up and not self.proxy.draining:
                raise
            if self._task is not None:
                self._task.uncancel()
            if not self._hung_up:
                outcome = await self._cut()
        finally:
            self._task = None
            if lost is not None:
                lost.discard(self._gone)
            elif watching is not None:
                watching.cancel()
            proxied = self.proxied
            proxied.status = self.status_code
            if self.ticket is not None:
                used = (proxied.prompt or self.ticket.taken) + (proxied.output or proxied.events)
                had = proxied.tries or self.prefill_tried
                self.ticket.settle(used if had else 0)  # no engine had it: its tokens are given back
            if self.place.trace is not None:
                self._end_trace(self.place.trace, outcome)
            self.proxy.traffic.ended(proxied, outcome)

    def _watched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled():
            self._gone()

    def _gone(self) -> None:
        """The client hung up."""
        if self._task is not None:
            self._hung_up = True
            self._task.cancel()

    def _end_trace(self, trace: RequestTrace, outcome: str) -> None:
        proxied, now = self.proxied, self.proxy.clock.now()
        if proxied.first:
            trace.part("first byte", self._sent or proxied.placed, proxied.first)
            trace.part("stream" if proxied.events else "answer", proxied.first, now)
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.request.model": proxied.model,
            "gen_ai.usage.input_tokens": proxied.prompt,
            "gen_ai.usage.output_tokens": proxied.output,
            "kvyard.request_id": proxied.id,
            "kvyard.tries": proxied.tries,
        }
        if proxied.cached is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = proxied.cached
        if proxied.engine is not None:
            attributes["kvyard.engine"] = proxied.engine.name
        trace.end(now, self.status_code, outcome, attributes)

    async def _serve(self) -> str:
        """Try engines until one answers. Returns how it ended."""
        proxy, proxied, pool, place = self.proxy, self.proxied, self.pool, self.place
        last: EngineFailed | None = None
        while True:
            try:
                if last is not None and (self._risked > proxy.retries or proxied.tries >= MOST_TRIES):
                    return await self._pass_on(last)
                await self._before_placing(last)
                if place.trace is not None:
                    place.trace.queued(proxy.clock.now())
                decision, engine = await pool.place(place)
            except Refusal as refusal:
                await self._refuse(refusal)
                return "refused"
            except Exhausted:
                assert last is not None
                if last.answer is not None:
                    return await self._pass_on(last)
                # A connection that ended without a word says little: it may have been idle for too long. Start over.
                self._risked += 1
                place.tried.clear()
                await pause(BREATH)
                continue
            proxied.tries += 1
            self._computed = True
            try:
                proxy.traffic.placed(proxied, engine, decision)
                await self._attempt(engine, decision)
                proxy.health.served(engine, self._failed_at)
                return "finished" if self.status_code < 400 else "refused"
            except EngineFailed as failed:
                last = failed.with_traceback(None)  # which would hold this frame, and so all of the request
                self._computed = False
                self._risked += failed.reached
                place.tried.add(engine.name)
                if place.trace is not None:
                    place.trace.part("failed", proxied.placed, proxy.clock.now(), failed.reason, engine=engine.name)
                if not failed.busy:
                    self._failed_at.append(engine)
                    proxy.health.failed(engine, failed.reason, gone=failed.gone)
            except AnswerCut as broken:
                proxy.health.failed(engine, broken.args[0])
                return "broken"
            finally:
                pool.release(engine, place.request.id, refused=not self._computed)

    async def _before_placing(self, last: EngineFailed | None) -> None:
        """What is to be done before an engine is chosen, where there is anything; ``last`` is how the one before failed. Raises
        ``Refusal``.
        """

    # -- one engine -----------------------------------------------------------------------------------------------------

    async def _attempt(self, engine: Engine, decision: Decision) -> None:
        connections = self.proxy.client.connections
        if connections is None or connections.closed:
            raise asyncio.CancelledError  # the gateway didn't wait for us
        headers, target = self.headers, self.path.encode()
        if query := self.scope.get("query_string"):
            target += b"?" + query
        if engine.config.dp_size > 1:
            headers = [*headers, (RANK, b"%d" % decision.worker.rank)]
        trace, clock = self.place.trace, self.proxy.clock
        asked = clock.now() if trace is not None else 0
        answer = await connections.take(engine.address)
        if trace is not None:
            self._sent = clock.now()
            trace.part("connect", asked, self._sent, engine=engine.name)
        try:
            await answer.ask(
                self.method, target, headers, None if self.method in BODILESS and not self.body else self.body
            )
            status = answer.status
            if status in ELSEWHERE:
                said = status, answer.headers, await read_up_to(answer, WHOLE)
                raise EngineFailed(f"it answered {status}", answer=said)
            if not 200 <= status < 600:
                raise EngineFailed(f"it answered {status}")
            if answer.content_type == b"text/event-stream" and status < 400:
                usage = await self._stream(answer, decision)
            else:
                usage = await self._whole(answer, decision)
            self.proxy.traffic.answered(self.proxied, engine, decision, usage)
        except BaseException:
            # A connection whose answer wasn't read to its end can't be used again: closing it ends the engine's work.
            answer.close()
            raise
        answer.release()

    async def _stream(self, answer: EngineConnection, decision: Decision) -> AnswerTokens:
        """Pass a streamed answer on. Returns what it says of itself."""
        read, send = answer.read, self.send
        chunk = await read()
        if _ERROR.match(chunk) and (code := _CODE.search(chunk)) is not None and int(code[1]) >= 500:
            error = chunk.partition(b"\n")[0].removeprefix(b"data:").strip()
            raise EngineFailed("it began its answer with an error", answer=(int(code[1]), (), error))
        self._computed = not _ERROR.match(chunk)
        pool, proxied = self.pool, self.proxied
        if self.path == RESPONSES:
            self.proxy.homes.saw(chunk, ResponseHome(pool.model, decision.worker.name, proxied.key))
        await self._start(answer, downstream(answer.headers, decision_header(decision, proxied.tries)))
        relay = StreamRelay(self, chunk_writer(self.scope) if answer.status == 200 else None)
        ended = False
        while chunk:
            ended = answer.complete
            await send({"type": "http.response.body", "body": chunk, "more_body": not ended})
            relay.note(chunk)
            if ended:
                break
            try:
                if relay.write is not None:
                    await answer.pass_to(relay)
                chunk = await read()
            except EngineFailed as failed:
                await self._break(relay.last[-2:], failed.reason)
        if not ended:
            await send({"type": "http.response.body", "body": b""})
        return answer_tokens(relay.tail())

    async def _whole(self, answer: EngineConnection, decision: Decision) -> AnswerTokens:
        """Pass an answer on that isn't streamed. Returns what it says of itself."""
        body = await read_up_to(answer, WHOLE)
        self._computed = answer.status < 400
        if self.path == RESPONSES and self._computed:
            self.proxy.homes.saw(body, ResponseHome(self.pool.model, decision.worker.name, self.proxied.key))
        headers = downstream(answer.headers, decision_header(decision, self.proxied.tries))
        complete = answer.complete
        if complete:
            headers.append((b"content-length", b"%d" % len(body)))
        await self._start(answer, headers, streamed=False)
        await self.send({"type": "http.response.body", "body": body, "more_body": not complete})
        while not complete:
            try:
                chunk = await answer.read()
            except EngineFailed as failed:
                await self._break(None, failed.reason)
            complete = not chunk
            await self.send({"type": "http.response.body", "body": chunk, "more_body": not complete})
        # A response repeats what was asked behind its usage, however long that is.
        told = body if self.path == RESPONSES else body[-TAIL:]
        return answer_tokens(told) if answer.status < 400 else AnswerTokens()

    async def _start(self, answer: EngineConnection, headers: list[tuple[bytes, bytes]], streamed: bool = True) -> None:
        """The engine answers: from now on there is no other."""
        if self._computed:
            # A response says that it begins before its prompt is computed.
            seen = streamed and not self.handed_over and self.path != RESPONSES
            self.pool.first_token(self.proxied.id, seen=seen)
        self.proxy.traffic.began_answer(self.proxied)
        self.status_code = answer.status
        if self.ticket is not None:
            headers += self.ticket.headers()
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        self._began = True

    async def _break(self, last: bytes | None, reason: str) -> None:
        """The engine failed in the middle: say so where a stream lets us, and end the connection without its proper end."""
        if last == b"\n\n":
            problem = openai_error(Refusal(502, f"the engine failed in the middle of its answer: {reason}"))[1]
            said = b"data: " + msgspec.json.encode(problem) + b"\n\n"
            await self.send({"type": "http.response.body", "body": said, "more_body": True})
        self._task = None  # it is we who end the connection, not the client
        await close_connection(self.scope)
        raise AnswerCut(reason)

    async def _cut(self) -> str:
        """The gateway ends, and has waited long enough."""
        if self._began:
            self._task = None
            await close_connection(self.scope)
            return "broken"
        await self._refuse(Refusal(503, "the gateway ends", fix="try again", Retry_After="1"))
        return "refused"

    # -- answers of our own ---------------------------------------------------------------------------------------------

    async def _refuse(self, refusal: Refusal) -> None:
        self._began = True
        self.status_code, problem = openai_error(refusal)
        more = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
        body = msgspec.json.encode(problem)
        await send_response(self.send, self.status_code, [(b"content-type", JSON.encode()), *more], body)

    async def _pass_on(self, failed: EngineFailed) -> str:
        """No engine could answer: what the last engine said, or that it said nothing."""
        tries = self.proxied.tries
        if failed.answer is None:
            where = f"{tries} engines failed" if tries > 1 else "the engine failed"
            await self._refuse(
                Refusal(502, f"{where}, the last one because {failed.reason}", fix="try again", Retry_After="1")
            )
            return "failed"
        status, headers, body = failed.answer
        found = downstream(headers, f"tries={tries}") if headers else [(b"content-type", JSON.encode())]
        self._began, self.status_code = True, status
        await send_response(self.send, status, found, body)
        return "failed"


class StreamRelay:
    """What a streamed answer has said so far, and a sink for what comes next: most chunks go to the client as they come,
    without a turn of the exchange's task.
    """

    __slots__ = ("_before", "_clock", "_earlier", "_proxied", "_router", "last", "write")

    def __init__(self, exchange: Exchange, write: Callable[[bytes], bool] | None) -> None:
        """``write`` is ``chunk_writer``'s."""
        self.write = write
        self.last = self._before = self._earlier = b""
        self._proxied, self._clock = exchange.proxied, exchange.proxy.clock
        router = exchange.pool.router
        self._router = router if router.config.track_output else None

    def __call__(self, chunk: bytes) -> bool:
        """Write a chunk; returns whether the client took it."""
        if self.write is None or not self.write(chunk):
            return False
        self.note(chunk)
        return True

    def note(self, chunk: bytes) -> None:
        """A chunk went to the client."""
        proxied = self._proxied
        proxied.events += chunk.count(b"\n\n")
        if self._router is not None:
            self._router.progressed(proxied.id, proxied.events, self._clock.now())
        self._earlier, self._before, self.last = self._before, self.last, chunk

    def tail(self) -> bytes:
        """The end of what it has said, where its usage is."""
        return (self._earlier + self._before + self.last)[-TAIL:]
