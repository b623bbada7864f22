"""A stream of the data plane: one request and its answer, message by message.

The request's body comes in pieces, or whole. In full-duplex streaming nothing of a request goes on before it is handed back, so
its pieces are kept until it has an engine; of an answer each piece is handed back at once.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvyard.server.epp import messages
from kvyard.server.epp.messages import BUFFERED, NONE, PARTIAL, PIECES, STREAMED
from kvyard.server.epp.picker import RESPONSES, EndpointPicker, Picked, PickRequest
from kvyard.server.gateway.headers import DECISION, decision_header
from kvyard.server.gateway.homes import ResponseHome
from kvyard.server.gateway.usage import AnswerTokens, UsageReader, events_in
from kvyard.server.http import JSON, Refusal, openai_error

RANK = "x-data-parallel-rank"
PIECE_OVERHEAD = 128
"""Bytes that the objects of one piece of a body take beside it."""

Write = Callable[[Any], Awaitable[None]]


class RequestStream:
    """One request. ``take`` is called with each message, ``close`` once at the end."""

    def __init__(self, picker: EndpointPicker, write: Write) -> None:
        self._picker = picker
        self._write = write
        self._begun = False
        """True once the request's headers came; there may be none in them."""
        self._headers: dict[str, str] = {}
        self._subset: list[str] | None = None
        self._request_mode = self._response_mode = STREAMED
        self._pieces: list[tuple[bytes, bool]] = []
        self._held = 0
        """Bytes of headers and of pieces that are counted for it."""
        self._picked: Picked | None = None
        self._status = 0
        """Status of the answer; 0 before it."""
        self._streamed = False
        """True if the answer consists of server-sent events."""
        self._usage = UsageReader()
        self._whole = False
        """True if all of the answer passed."""
        picker.streams += 1

    async def take(self, message: Any) -> bool:
        """Answer one message, ``None`` for one that was too large to be read. Returns whether more may follow. Raises what
        ``write`` raises.
        """
        if message is not None and message.observability_mode:
            return True  # it doesn't wait for answers, and doesn't go by them
        kind = None if message is None else message.WhichOneof("request")
        try:
            if message is None:
                raise Refusal(431, messages.TOO_LARGE, fix="send less")
            if kind == "request_headers":
                await self._request_headers(message)
            elif kind == "request_body":
                await self._request_body(message.request_body)
            elif kind == "request_trailers":
                await self._request_trailers()
            elif kind == "response_headers":
                await self._response_headers(message)
            elif kind == "response_body":
                await self._response_body(message.response_body)
            elif kind == "response_trailers":
                self._whole = True
                await self._write(messages.trailers_pass(request=False))
        except Refusal as refusal:
            status, problem = openai_error(refusal)
            more = [("content-type", JSON), *((name.lower(), value) for name, value in refusal.headers.items())]
            await self._write(messages.immediate(status, more, msgspec.json.encode(problem), "kvyard_epp_refused"))
            return False
        return True

    def close(self) -> None:
        """End the stream, complete or cut off, which look the same."""
        picker, picked = self._picker, self._picked
        self._hold(-self._held)
        self._pieces = []
        picker.streams -= 1
        if picked is None:
            return
        engine, status = picked.engine, self._status
        # A data plane that sends no bodies of answers closes the stream after their headers.
        ended = self._whole or (status > 0 and self._response_mode == NONE)
        proxied = picked.proxied
        proxied.status, proxied.computed = status, status < 400
        if ended:
            proxied.answered(self._usage.tokens if status < 400 else AnswerTokens())
        failed = status >= 500
        if failed:
            picker.gateway.health.failed(engine, f"it answered {status}")
        elif status and status != 429:
            picker.gateway.health.served(engine, [])
        outcome = "failed" if failed else "refused" if status >= 400 else "finished" if ended else "cancelled"
        proxied.end(outcome)

    # -- the request --------------------------------------------------------------------------------------------------------

    async def _request_headers(self, message: Any) -> None:
        picker, config = self._picker, self._picker.config
        if self._begun or self._picked is not None:
            raise Refusal(400, "a request's headers came twice on one stream", fix="open a stream for each request")
        self._begun = True
        size = message.ByteSize()
        if picker.held + size > config.held_bytes:
            raise Refusal(429, f"requests in progress hold {config.held_bytes} bytes already", fix="try again later")
        self._hold(size)
        self._headers = messages.read_headers(message.request_headers)
        self._subset = messages.subset(message)
        if config.conformance and (wanted := self._headers.get(messages.WANTED)):
            self._subset = messages.endpoints_in(wanted)
        self._request_mode, self._response_mode = messages.modes(message, messages.MODES[config.body_mode])
        if message.request_headers.end_of_stream or self._request_mode in (NONE, PIECES):
            await self._pick(None)
            await self._say_destination()
        elif self._request_mode in (BUFFERED, PARTIAL):
            await self._write(messages.request_headers_pass())

    async def _request_body(self, chunk: Any) -> None:
        if self._request_mode in (BUFFERED, PARTIAL):
            if self._picked is None:
                await self._pick(chunk.body)
                await self._say_destination(body=True)
        elif self._request_mode == PIECES:
            await self._write(messages.body_pass(request=True))
        elif self._picked is not None:
            await self._write(messages.piece(chunk.body, chunk.end_of_stream, request=True))
        else:
            self._keep(chunk.body, chunk.end_of_stream)
            bounds, picker = self._picker.config, self._picker
            if chunk.end_of_stream:
                await self._go_on(b"".join([body for body, _ in self._pieces]))
            elif self._held > bounds.limits.body_bytes or picker.held > bounds.held_bytes:
                await self._go_on(None, "size")

    async def _request_trailers(self) -> None:
        if self._picked is None:
            await self._go_on(b"".join([body for body, _ in self._pieces]))
        await self._write(messages.trailers_pass(request=True))

    async def _go_on(self, body: bytes | None, unread: str = "") -> None:
        """Pick, and hand back what was kept of the body."""
        await self._pick(body, unread)
        await self._say_destination()
        pieces, self._pieces = self._pieces, []
        for each, end in pieces:
            await self._write(messages.piece(each, end, request=True))
            self._hold(-len(each) - PIECE_OVERHEAD)

    async def _pick(self, body: bytes | None, unread: str = "") -> None:
        headers, config = self._headers, self._picker.config
        path = headers.get(":path", "").partition("?")[0]
        if body is not None and not unread:
            if len(body) > config.limits.body_bytes:
                unread = "size"
            elif headers.get("content-encoding", "identity") != "identity":
                unread = "body"
        self._picked = await self._picker.pick(
            PickRequest(
                method=headers.get(":method", "POST"),
                path=path[max(0, path.rfind("/v1/")) :],
                headers=headers,
                body=body,
                unread=unread,
                subset=self._subset,
                sheddable=headers.get(messages.OBJECTIVE) in config.sheddable,
            )
        )

    async def _say_destination(self, body: bool = False) -> None:
        picked = self._picked
        assert picked is not None
        more: list[tuple[str, str]] = []
        # Usage in a compressed answer couldn't be counted.
        remove = ["accept-encoding"] if "accept-encoding" in self._headers else []
        if picked.decision is not None and picked.engine.config.dp_size > 1:
            more.append((RANK, str(picked.decision.worker.rank)))
        elif RANK in self._headers:
            remove.append(RANK)
        if "x-request-id" not in self._headers:
            more.append(("x-request-id", picked.proxied.id))
        await self._write(messages.destination(picked.endpoints, more, remove, body=body))

    def _keep(self, body: bytes, end: bool) -> None:
        self._pieces.append((body, end))
        self._hold(len(body) + PIECE_OVERHEAD)

    def _hold(self, size: int) -> None:
        self._held += size
        self._picker.held += size

    # -- the answer ---------------------------------------------------------------------------------------------------------

    async def _response_headers(self, message: Any) -> None:
        headers = messages.read_headers(message.response_headers)
        status = headers.get(":status", "")
        self._status = int(status) if status.isdecimal() and len(status) == 3 else 0
        self._streamed = headers.get("content-type", "").startswith("text/event-stream")
        self._whole = message.response_headers.end_of_stream
        endpoint = messages.served(message)
        picked = self._picked
        more: list[tuple[str, str]] = []
        if self._picker.config.conformance:
            more.append((messages.WENT, endpoint or "fail: the data plane doesn't say who served"))
        if picked is not None:
            if endpoint is not None:
                self._picker.served(picked, endpoint)
            if picked.decision is not None:
                more.append(
                    (DECISION, decision_header(picked.decision, picked.proxied.tries, picked.proxied.place.wait))
                )
            if self._whole or self._response_mode == NONE:
                self._began(picked)
        await self._write(messages.response_headers(more))

    async def _response_body(self, chunk: Any) -> None:
        picked, body = self._picked, chunk.body
        if picked is not None:
            if body:
                proxied = picked.proxied
                if not proxied.first:
                    self._began(picked)
                    if self._makes_response and self._status < 400:
                        self._picker.intake.proxy.homes.saw(body, ResponseHome(proxied.pool.model, picked.engine.name))
                if self._streamed:
                    proxied.events += events_in(body)
                    if proxied.booked is not None and proxied.pool.router.config.track_output:
                        proxied.pool.router.progressed(proxied.id, proxied.events, self._picker.gateway.clock.now())
                self._usage.feed(body)
            if chunk.end_of_stream:
                self._whole = True
        if self._response_mode == STREAMED:
            await self._write(messages.piece(body, chunk.end_of_stream, request=False))
        else:
            await self._write(messages.body_pass(request=False))

    @property
    def _makes_response(self) -> bool:
        return self._headers.get(":path", "").partition("?")[0].endswith(RESPONSES)

    def _began(self, picked: Picked) -> None:
        """Note the first bytes of an answer."""
        picked.proxied.computed = self._status < 400
        # A response says that it begins before its prompt is computed.
        picked.proxied.first_token(seen=self._streamed and not self._makes_response)
