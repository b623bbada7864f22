"""Replies: the output of a request's choices, as OpenAI's JSON or as a stream of it, until they end or the client
disconnects.

A reply writes on each signal, everything new at once: the tokens of one pass leave as one write per stream.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from kvyard.server.http import JSON, Refusal, Response, header_pairs
from kvyard.server.mock.choice import RequestFlow
from kvyard.server.mock.faults import Fate
from kvyard.server.mock.shapes import ReplyShape
from kvyard.server.request import HttpRequest

_encode = msgspec.json.Encoder().encode


class MockReply(Response):
    """The answer to one completion request."""

    def __init__(
        self,
        flow: RequestFlow,
        shape: ReplyShape,
        *,
        fate: Fate,
        gone: Callable[[RequestFlow], None],
        headers: dict[str, str],
    ) -> None:
        """``gone`` is called if the client disconnected."""
        kind = "text/event-stream; charset=utf-8" if shape.taken.stream else JSON
        super().__init__(200, header_pairs({**headers, "content-type": kind}))
        self._flow = flow
        self._shape = shape
        self._fate = fate
        self._gone = gone

    async def send(self, request: HttpRequest) -> None:
        """Answer; the request's choices are over when this returns."""
        try:
            request.abandon_with_client()
            if self._shape.taken.stream:
                await self._stream(request)
            else:
                await self._whole(request)
        finally:
            if not self._flow.done:
                self._gone(self._flow)
            self._flow.release()

    async def _whole(self, request: HttpRequest) -> None:
        flow = self._flow
        while not flow.done:
            await flow.news()
            if self._cut_short(request):
                return
            await self._fall_silent()
        refused = _refused(flow)
        value: Any
        if refused is not None:
            status, value = self._shape.error(refused)
        else:
            status, value = 200, self._shape.whole(flow.choices)
        request.respond(status, self.headers, _encode(value))

    async def _stream(self, request: HttpRequest) -> None:
        request.start(200, self.headers)
        flow, shape = self._flow, self._shape
        if opening := b"".join(map(shape.frame, shape.opening())):
            await request.write(opening)
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
                await request.write(b"".join(parts))
            if over:
                break
            if self._cut_short(request):
                return
            await self._fall_silent()
        await request.finish()

    @property
    def _produced(self) -> int:
        return sum(choice.produced for choice in self._flow.choices)

    def _cut_short(self, request: HttpRequest) -> bool:
        after = self._fate.abort_after
        if after is None or self._produced < after:
            return False
        request.reset()
        return True

    async def _fall_silent(self) -> None:
        after = self._fate.stall_after
        if after is not None and self._produced >= after:
            await asyncio.Event().wait()  # until the client hangs up


def _refused(flow: RequestFlow) -> Refusal | None:
    """Return why no client gets an answer, where the engine or its end is the cause."""
    if flow.broken:
        return Refusal(503, flow.broken)
    for choice in flow.choices:
        if choice.refused:
            return Refusal(400, choice.refused)
    return None
