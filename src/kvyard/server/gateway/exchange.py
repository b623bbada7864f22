"""An exchange: one client's request carried to an engine, and its answer made into a response, byte for byte.

Nothing goes to the client before the engine's first bytes are here: until then another engine can be tried, and afterwards
never. An answer that isn't streamed is held until it is complete, so an engine that dies over it is no loss either. Where the
client hangs up, the engine's connection is closed, which is how engines learn of it.
"""

import asyncio
import re

import msgspec

from kvyard.clock import Clock, pause
from kvyard.router import Decision
from kvyard.server.gateway.client import ELSEWHERE, EngineClient
from kvyard.server.gateway.connections import EngineConnection, Room, read_up_to
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.failures import EngineFailed, EngineMoved
from kvyard.server.gateway.headers import RANK, decision_header, downstream
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.pool import Exhausted
from kvyard.server.gateway.proxied_request import ProxiedRequest
from kvyard.server.gateway.traffic import GatewayTraffic
from kvyard.server.gateway.usage import AnswerTokens, UsageReader, answer_tokens, events_in
from kvyard.server.http import JSON, Refusal, Response, ResponseBroken, openai_error
from kvyard.server.request import HttpRequest

RESPONSES = "/v1/responses"
WHOLE = 64 << 20
"""Bytes up to which an answer that isn't streamed is held until it is complete, if there is room."""
ERROR_BYTES = 1 << 20
"""Bytes up to which an error is held until another engine has answered."""
BODILESS = ("GET", "DELETE")
"""Methods that have no body unless there is one."""
MOST_TRIES = 100
"""Engines that a request is sent to, however unlucky it is."""
BREATH = 0.05
"""Seconds before engines are tried a second time."""
_ERROR = re.compile(rb'^data: ?\{"error"')
_CODE = re.compile(rb'"code" ?: ?(\d{3})')


class Proxy(msgspec.Struct, eq=False):
    """Parts that all exchanges of a gateway share."""

    client: EngineClient
    health: EngineHealth
    traffic: GatewayTraffic
    clock: Clock
    retries: int
    homes: ResponseHomes = msgspec.field(default_factory=ResponseHomes)


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """Carries one request to engines until one answers."""

    proxy: Proxy
    proxied: ProxiedRequest
    path: str
    body: bytes
    method: str = "POST"
    query: bytes = b""
    headers: list[tuple[bytes, bytes]]
    """For the engine."""
    room: Room
    """Counts what is held of an answer."""
    handed_over: bool = False
    """True if another engine computed its prompt."""
    _risked: int = 0
    """Tries in which an engine had the request and may have suffered from it; refused connections aren't among them."""
    _failed_at: list[Engine] = []

    async def respond(self) -> Response:
        """Return the response of the first engine that answers, or the last engine's error. Raises ``Refusal``."""
        try:
            return await self._first_answer()
        except Refusal as refusal:
            self.proxied.outcome = self.proxied.outcome or "refused"
            self.proxied.status = openai_error(refusal)[0]
            raise

    async def _first_answer(self) -> Response:
        proxy, proxied = self.proxy, self.proxied
        last: EngineFailed | None = None
        while True:
            try:
                if last is not None and (self._risked > proxy.retries or proxied.tries >= MOST_TRIES):
                    return self._given_up(last)
                await self._before_placing(last)
                decision, engine = await proxied.book()
            except Exhausted:
                assert last is not None
                if last.answer is not None:
                    return self._given_up(last)
                # A connection that ended without a word says little: it may have been idle for too long. Start over.
                self._risked += 1
                proxied.place.tried.clear()
                await pause(BREATH)
                continue
            try:
                return await self._attempt(engine, decision)
            except EngineFailed as failed:
                last = failed.with_traceback(None)  # which would hold this frame, and so all of the request
                self._risked += failed.reached
                proxied.failed(failed.reason, engine)
                if not failed.busy:
                    self._failed_at.append(engine)
                    proxy.health.failed(engine, failed.reason, gone=failed.gone)

    async def _before_placing(self, last: EngineFailed | None) -> None:
        """Prepare for an engine to be chosen; ``last`` is how the one before failed. Raises ``Refusal``."""

    # -- one engine -----------------------------------------------------------------------------------------------------

    async def _attempt(self, engine: Engine, decision: Decision) -> Response:
        """Return the response that ``engine`` begins. Raises ``EngineFailed``."""
        proxied = self.proxied
        connections = self.proxy.client.connections
        if connections is None or connections.closed:
            raise asyncio.CancelledError  # the gateway didn't wait for us
        headers, target = self.headers, self.path.encode()
        if self.query:
            target += b"?" + self.query
        if engine.config.dp_size > 1:
            headers = [*headers, (RANK, b"%d" % decision.worker.rank)]
        if engine.doubt is not None:
            await asyncio.shield(engine.doubt)
            if engine.pool is not proxied.pool:
                raise EngineMoved("it serves another model by now", reached=False)
        trace, clock = proxied.trace, self.proxy.clock
        asked = clock.now() if trace is not None else 0
        answer = proxied.connection = await connections.take(engine.address)
        if trace is not None:
            proxied.sent = clock.now()
            trace.part("connect", asked, proxied.sent, engine=engine.name)
        await answer.ask(self.method, target, headers, None if self.method in BODILESS and not self.body else self.body)
        status = answer.status
        if status in ELSEWHERE:
            raise EngineFailed(f"it answered {status}", answer=await self._error(answer))
        if not 200 <= status < 600:
            raise EngineFailed(f"it answered {status}")
        if answer.content_type == b"text/event-stream" and status < 400:
            return await self._streamed(answer, engine, decision)
        return await self._whole(answer, engine, decision)

    async def _error(self, answer: EngineConnection) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return an engine's error: status, headers and body, for the client if no other engine answers."""
        body = await read_up_to(answer, ERROR_BYTES, self.room)
        if answer.complete:
            return answer.status, answer.headers, body
        problem = openai_error(Refusal(answer.status, f"the engine's error has more than {len(body)} bytes"))[1]
        return answer.status, [], msgspec.json.encode(problem)

    async def _streamed(self, answer: EngineConnection, engine: Engine, decision: Decision) -> Response:
        chunk = await answer.read()
        error = bool(_ERROR.match(chunk))
        if error and (code := _CODE.search(chunk)) is not None and int(code[1]) >= 500:
            event = chunk.partition(b"\n")[0].removeprefix(b"data:").strip()
            raise EngineFailed("it began its answer with an error", answer=(min(int(code[1]), 599), (), event))
        self.proxied.computed = not error
        headers = self._begin(answer, chunk, decision)
        return RelayedStream(self, answer, engine, headers, chunk, events=True)

    async def _whole(self, answer: EngineConnection, engine: Engine, decision: Decision) -> Response:
        body = await read_up_to(answer, WHOLE, self.room)
        self.proxied.computed = answer.status < 400
        headers = self._begin(answer, body, decision, streamed=False)
        if not answer.complete:
            return RelayedStream(self, answer, engine, headers, body, events=False)
        self._complete(engine, answer.status, answer_tokens(body) if answer.status < 400 else AnswerTokens())
        return Response(answer.status, headers, body)

    def _begin(
        self, answer: EngineConnection, body: bytes, decision: Decision, streamed: bool = True
    ) -> list[tuple[bytes, bytes]]:
        """Commit to the engine that answers: from now on no other is tried. Returns the response's headers."""
        proxied = self.proxied
        if self.path == RESPONSES and proxied.computed:
            home = ResponseHome(proxied.pool.model, decision.worker.name, proxied.key, proxied.session)
            self.proxy.homes.saw(body, home)
        # A response says that it begins before its prompt is computed.
        proxied.first_token(seen=streamed and not self.handed_over and self.path != RESPONSES)
        proxied.status = answer.status
        header = decision_header(decision, proxied.tries, proxied.place.wait) if proxied.explained else None
        headers = downstream(answer.headers, header)
        return headers if proxied.ticket is None else headers + proxied.ticket.headers()

    def _complete(self, engine: Engine, status: int, usage: AnswerTokens) -> None:
        """Note that an engine's answer is complete."""
        self.proxied.answered(usage)
        self.proxied.outcome = "finished" if status < 400 else "refused"
        self.proxy.health.served(engine, self._failed_at)

    def _given_up(self, failed: EngineFailed) -> Response:
        """Return the last engine's error, since no engine could answer. Raises ``Refusal`` if it sent none."""
        proxied = self.proxied
        proxied.outcome = "failed"
        tries = proxied.tries
        if failed.answer is None:
            where = f"{tries} engines failed" if tries > 1 else "the engine failed"
            raise Refusal(502, f"{where}, the last one because {failed.reason}", fix="try again", Retry_After="1")
        status, headers, body = failed.answer
        header = f"tries={tries}" if proxied.explained else None
        lines = downstream(headers, header) if headers else [(b"content-type", JSON.encode())]
        proxied.status = status
        return Response(status, lines, body)


class RelayedStream(Response):
    """An engine's answer that goes to the client as it comes: most chunks without a turn of the request's task."""

    def __init__(
        self,
        exchange: Exchange,
        answer: EngineConnection,
        engine: Engine,
        headers: list[tuple[bytes, bytes]],
        first: bytes,
        *,
        events: bool,
    ) -> None:
        """``first`` is what has come of it; ``events``: it is a stream of server-sent events."""
        super().__init__(answer.status, headers, first)
        self._exchange = exchange
        self._answer = answer
        self._engine = engine
        self._events = events
        self._last = b""
        self._usage = UsageReader()
        self._proxied, self._clock = exchange.proxied, exchange.proxy.clock
        router = exchange.proxied.pool.router
        self._router = router if router.config.track_output and events else None
        self._request: HttpRequest | None = None

    async def send(self, request: HttpRequest) -> None:
        """Relay the answer. Raises ``ResponseBroken`` if the engine fails."""
        answer, chunk = self._answer, self.body
        request.start(self.status, self.headers)
        self._request = request
        try:
            while chunk:
                await request.write(chunk)
                self._note(chunk)
                if answer.complete:
                    break
                await answer.pass_to(self._relay)
                chunk = await answer.read()
        except EngineFailed as failed:
            await self._break(request, failed.reason)
        finally:
            self._request = None
        usage = self._usage.tokens if self.status < 400 else AnswerTokens()
        self._exchange._complete(self._engine, self.status, usage)
        await request.finish()

    def _relay(self, chunk: bytes) -> bool:
        """Write a chunk at once; returns whether the client took it."""
        if self._request is None or not self._request.write_now(chunk):
            return False
        self._note(chunk)
        return True

    def _note(self, chunk: bytes) -> None:
        """Note a chunk that was sent to the client."""
        proxied = self._proxied
        if self._events:
            proxied.events += events_in(chunk)
        if self._router is not None:
            self._router.progressed(proxied.id, proxied.events, self._clock.now())
        self._usage.feed(chunk)
        self._last = chunk

    async def _break(self, request: HttpRequest, reason: str) -> None:
        """End an answer whose engine failed midway; a stream gets an error event."""
        self._proxied.outcome = "broken"
        self._exchange.proxy.health.failed(self._engine, reason)
        if self._events and self._last.endswith((b"\n\n", b"\r\n\r\n")):
            problem = openai_error(Refusal(502, f"the engine failed in the middle of its answer: {reason}"))[1]
            await request.write(b"data: " + msgspec.json.encode(problem) + b"\n\n")
        raise ResponseBroken(reason)
