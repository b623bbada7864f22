"""An exchange: one client's request carried to an engine, and its answer carried back as it comes, byte for byte.

Nothing goes to the client before the engine's first bytes are here: until then another engine can be tried, and afterwards
never. An answer that isn't streamed is held until it is whole, so an engine that dies over it is no loss either. Where the
client hangs up, the engine's connection is closed, which is how engines learn of it. Loaded with Starlette only.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from starlette.responses import Response
from yarl import URL

from kvyard.clock import SECOND, pause
from kvyard.router import Decision
from kvyard.server.gateway.ends import end, read_up_to, refuse, say, until_gone
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.failures import ELSEWHERE, OURS, Body, Broken, Failed, reason_of
from kvyard.server.gateway.headers import RANK, decision_header, downstream
from kvyard.server.gateway.pool import Exhausted, Place, Pool
from kvyard.server.gateway.usage import TAIL, Usage, usage
from kvyard.server.http import JSON, Refusal, openai_error

if TYPE_CHECKING:
    from kvyard.server.gateway.gateway import Gateway

WHOLE = 64 << 20
"""Bytes up to which an answer that isn't streamed is held until it is whole."""
MOST_TRIES = 100
"""Engines that a request is sent to, however unlucky it is."""
BREATH = 0.05
"""Seconds before engines are tried a second time."""
_ERROR = re.compile(rb'^data: ?\{"error"')
_CODE = re.compile(rb'"code" ?: ?(\d{3})')


class Exchange(Response):
    """The answer to one request; it does its work when it is sent."""

    def __init__(
        self,
        gateway: Gateway,
        pool: Pool,
        place: Place,
        *,
        name: str,
        path: str,
        body: bytes,
        headers: list[tuple[str, str]],
        received: int,
    ) -> None:
        """``headers`` are those for the engine; ``received`` is when the request was here."""
        self.status_code = 200
        self.gateway = gateway
        self.pool = pool
        self.place = place
        self.name = name
        """The model's, as the client has it."""
        self.output = 0
        """Tokens of the answer, as far as they can be told."""
        self.path = path
        self.content = body
        self.upstream_headers = headers
        self.received = received
        self.tries = 0
        self.risked = 0
        """Tries in which an engine had the request and may have suffered from it; refused connections aren't among them."""
        self.failed_at: list[Engine] = []
        self.began = False
        """Whether anything went to the client."""
        self.first = 0
        """When the engine's first bytes came."""
        self.events = 0
        self.hung_up = False
        self._me: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Carry it out."""
        self._me = asyncio.current_task()
        watching = asyncio.get_running_loop().create_task(until_gone(receive))
        watching.add_done_callback(self._gone)
        outcome = "failed"
        try:
            outcome = await self._serve(scope, send)
        except asyncio.CancelledError:
            outcome = "cancelled"
            if not self.hung_up and not self.gateway.draining:
                raise
            if self._me is not None:
                self._me.uncancel()
            if not self.hung_up:
                outcome = await self._cut(scope, send)
        finally:
            self._me = None
            watching.cancel()
            self.gateway.traffic.ended(self, outcome)

    def _gone(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and self._me is not None:
            self.hung_up = True
            self._me.cancel()

    async def _serve(self, scope: Any, send: Any) -> str:
        """Try engines until one answers. Returns how it ended."""
        gateway, pool, place = self.gateway, self.pool, self.place
        last: Failed | None = None
        while True:
            try:
                if last is not None and (self.risked > gateway.config.retries or self.tries >= MOST_TRIES):
                    return await self._pass_on(send, last)
                decision, engine = await pool.place(place)
            except Refusal as refusal:
                await self._refuse(send, refusal)
                return "refused"
            except Exhausted:
                assert last is not None
                if last.answer is not None:
                    return await self._pass_on(send, last)
                # A connection that ended without a word says little: it may have been idle for too long. Begin anew.
                self.risked += 1
                place.tried.clear()
                await pause(BREATH)
                continue
            self.tries += 1
            try:
                gateway.traffic.placed(self, engine, decision)
                await self._attempt(engine, decision, scope, send)
                gateway.health.served(engine, self.failed_at)
                return "finished" if self.status_code < 400 else "refused"
            except Failed as failed:
                last = failed
                self.risked += failed.reached
                place.tried.add(engine.name)
                if not failed.busy:
                    self.failed_at.append(engine)
                    gateway.health.failed(engine, failed.reason, gone=failed.gone)
            except Broken as broken:
                gateway.health.failed(engine, broken.args[0], gone=False)
                return "broken"
            finally:
                pool.release(engine, place.request.id)

    # -- one engine -----------------------------------------------------------------------------------------------------

    async def _attempt(self, engine: Engine, decision: Decision, scope: Any, send: Any) -> None:
        if self.gateway.session.closed:
            raise asyncio.CancelledError  # the gateway didn't wait for us
        headers = self.upstream_headers
        url = engine.addresses.get(self.path)
        if url is None:
            url = engine.addresses[self.path] = URL(engine.url + self.path)
        if query := scope.get("query_string"):
            url = URL(f"{url}?{query.decode('latin-1')}", encoded=True)
        if engine.config.dp_size > 1:
            headers = [*headers, (RANK, str(decision.worker.rank))]
        try:
            response = await self.gateway.session.post(
                url, data=Body(self.content), headers=headers, allow_redirects=False
            )
        except aiohttp.ClientConnectorError as error:
            reason = f"it can't be reached: {error.strerror or error.os_error}"
            raise Failed(reason, reached=False, gone=error.errno not in OURS) from None
        except aiohttp.ConnectionTimeoutError:
            raise Failed("it can't be reached in time", reached=False) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Failed(reason_of(error)) from None
        whole = False
        try:
            status = response.status
            if status in ELSEWHERE:
                raise Failed(f"it answered {status}", answer=await self._refused(response))
            if not 200 <= status < 600:
                raise Failed(f"it answered {status}")
            if response.content_type == "text/event-stream" and status < 400:
                await self._stream(engine, response, decision, scope, send)
            else:
                await self._whole(engine, response, decision, scope, send)
            whole = True
        finally:
            # A connection whose answer wasn't read to its end can't be used again: closing it ends the engine's work.
            if whole:
                response.release()
            else:
                response.close()

    async def _refused(self, response: aiohttp.ClientResponse) -> tuple[int, Any, bytes]:
        """An answer with which another engine is asked."""
        try:
            return response.status, response.raw_headers, await read_up_to(response, WHOLE)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Failed(reason_of(error)) from None

    async def _stream(
        self, engine: Engine, response: aiohttp.ClientResponse, decision: Decision, scope: Any, send: Any
    ) -> None:
        read = response.content.readany
        try:
            chunk = await read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Failed(reason_of(error)) from None
        if _ERROR.match(chunk) and (code := _CODE.search(chunk)) is not None and int(code[1]) >= 500:
            raise Failed("it began its answer with an error", answer=(int(code[1]), (), _error_of(chunk)))
        gateway = self.gateway
        self.first = gateway.clock.now()
        gateway.traffic.first_bytes(self)
        self.status_code = response.status
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": downstream(response.raw_headers, decision_header(decision, self.tries)),
            }
        )
        self.began = True
        earlier = before = last = b""
        track = self.pool.router.config.track_output
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self.events += chunk.count(b"\n\n")
            if track:
                gateway.traffic.progressed(self)
            earlier, before, last = before, last, chunk
            try:
                chunk = await read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._break(scope, send, last[-2:], reason_of(error))
        await send({"type": "http.response.body", "body": b""})
        gateway.traffic.answered(self, engine, decision, usage((earlier + before + last)[-TAIL:]))

    async def _whole(
        self, engine: Engine, response: aiohttp.ClientResponse, decision: Decision, scope: Any, send: Any
    ) -> None:
        try:
            body = await read_up_to(response, WHOLE)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Failed(reason_of(error)) from None
        self.first = self.gateway.clock.now()
        self.gateway.traffic.first_bytes(self)
        self.status_code = response.status
        headers = downstream(response.raw_headers, decision_header(decision, self.tries))
        complete = response.content.at_eof()
        if complete:
            headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        self.began = True
        await send({"type": "http.response.body", "body": body, "more_body": not complete})
        while not complete:
            try:
                chunk = await response.content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._break(scope, send, None, reason_of(error))
            complete = not chunk
            await send({"type": "http.response.body", "body": chunk, "more_body": not complete})
        self.gateway.traffic.answered(self, engine, decision, usage(body[-TAIL:]) if response.status < 400 else Usage())

    async def _break(self, scope: Any, send: Any, last: bytes | None, reason: str) -> None:
        """The engine failed in the middle: say so where a stream lets us, and end the connection without its proper end."""
        if last == b"\n\n":
            problem = openai_error(Refusal(502, f"the engine failed in the middle of its answer: {reason}"))[1]
            said = b"data: " + msgspec.json.encode(problem) + b"\n\n"
            await send({"type": "http.response.body", "body": said, "more_body": True})
        await end(scope)
        raise Broken(reason)

    async def _cut(self, scope: Any, send: Any) -> str:
        """The gateway ends, and has waited long enough."""
        if self.began:
            await end(scope)
            return "broken"
        await self._refuse(send, Refusal(503, "the gateway ends", fix="try again", Retry_After="1"))
        return "refused"

    # -- answers of our own ---------------------------------------------------------------------------------------------

    async def _refuse(self, send: Any, refusal: Refusal) -> None:
        self.began = True
        self.status_code = await refuse(send, refusal)

    async def _pass_on(self, send: Any, failed: Failed) -> str:
        """Nobody could answer: what the last engine said, or that it said nothing."""
        if failed.answer is None:
            where = f"{self.tries} engines failed" if self.tries > 1 else "the engine failed"
            await self._refuse(
                send, Refusal(502, f"{where}, the last one because {failed.reason}", fix="try again", Retry_After="1")
            )
            return "failed"
        status, headers, body = failed.answer
        found = downstream(headers, f"tries={self.tries}") if headers else [(b"content-type", JSON.encode())]
        self.began, self.status_code = True, status
        await say(send, status, found, body)
        return "failed"

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return (self.gateway.clock.now() - self.received) / SECOND


def _error_of(chunk: bytes) -> bytes:
    return chunk.partition(b"\n")[0].removeprefix(b"data:").strip()
