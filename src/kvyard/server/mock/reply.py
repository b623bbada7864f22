"""Replies: what a request's choices produce, as OpenAI's JSON or as a stream of it, until they end or the client hangs up.

A reply writes when it is told that there is news, all of it at once: the tokens of one pass leave as one write per stream. It
is loaded with Starlette only.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from kvyard.server.http import JSON, Refusal, send_response, while_connected
from kvyard.server.mock.choice import RequestFlow
from kvyard.server.mock.faults import Fate
from kvyard.server.mock.shapes import Shape

_encode = msgspec.json.Encoder().encode


class MockReply(Response):
    """The answer to one completion request."""

    def __init__(
        self,
        flow: RequestFlow,
        shape: Shape,
        *,
        fate: Fate,
        gone: Callable[[RequestFlow], None],
        cut: Callable[[Any], None],
        headers: dict[str, str],
    ) -> None:
        """``gone`` is told where the client hung up; ``cut`` cuts the connection of a client."""
        super().__init__(b"", 200, headers=headers, media_type="text/event-stream" if shape.taken.stream else JSON)
        self._sent_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._flow = flow
        self._shape = shape
        self._fate = fate
        self._gone = gone
        self._cut = cut

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer; the request's choices are over when this returns."""
        try:
            await while_connected(receive, self._answer(scope, send))
        finally:
            if not self._flow.done:
                self._gone(self._flow)
            self._flow.let_go()

    async def _answer(self, scope: Any, send: Any) -> None:
        if self._shape.taken.stream:
            await self._write(scope, send)
            return
        flow = self._flow
        while not flow.done:
            await flow.news()
            if self._cut_short(scope):
                return
            await self._fall_silent()
        refused = _refused(flow)
        value: Any
        if refused is not None:
            status, value = self._shape.error(refused)
        else:
            status, value = 200, self._shape.whole(flow.choices)
        await send_response(send, status, self._sent_headers, _encode(value))

    async def _write(self, scope: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._sent_headers})
        flow, shape = self._flow, self._shape
        if opening := b"".join(map(shape.frame, shape.opening())):
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        while True:
            await flow.news()
            over = flow.done
            refused = _refused(flow)
            parts = list(map(shape.frame, shape.more(flow.choices)))
            if over:
                if refused is not None:
                    parts.append(b"data: %b\n\n" % _encode(shape.error(refused)[1]))
                else:
                    parts += map(shape.frame, shape.last(flow.choices))
                parts.append(shape.end)
            if parts:
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
            if over:
                break
            if self._cut_short(scope):
                return
            await self._fall_silent()
        await send({"type": "http.response.body", "body": b""})

    @property
    def _produced(self) -> int:
        return sum(choice.produced for choice in self._flow.choices)

    def _cut_short(self, scope: Any) -> bool:
        after = self._fate.abort_after
        if after is None or self._produced < after:
            return False
        self._cut(scope)
        return True

    async def _fall_silent(self) -> None:
        after = self._fate.stall_after
        if after is not None and self._produced >= after:
            await asyncio.Event().wait()  # until the client hangs up


def _refused(flow: RequestFlow) -> Refusal | None:
    """Why no client gets an answer, where the engine or its end is the cause."""
    if flow.broken:
        return Refusal(503, flow.broken)
    for choice in flow.choices:
        if choice.refused:
            return Refusal(400, choice.refused)
    return None
