"""A lost connection is freed at once, without a garbage search."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

from tests.waiting import eventually_async

from kvyard.server.transports import untie


class Echo(asyncio.Protocol):
    def __init__(self, untied: bool, lost: asyncio.Future[None]) -> None:
        self._untied = untied
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._untied:
            untie(self.transport)
        del self.transport
        self._lost.set_result(None)


def left_behind(untied: bool) -> bool:
    """Whether the transport of a closed connection is still there."""

    async def scenario() -> bool:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        made: list[Echo] = []
        server = await loop.create_server(lambda: made.append(Echo(untied, lost)) or made[0], "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.close()
        await eventually_async(lambda: made)
        transport = weakref.ref(made[0].transport)
        await lost
        server.close()
        for _ in range(5):
            await asyncio.sleep(0)
        return transport() is not None

    gc.collect()
    gc.disable()
    try:
        return asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        gc.enable()


def test_a_transport_is_freed_when_its_connection_is_lost() -> None:
    assert not left_behind(untied=True)


def test_asyncio_alone_leaves_it_to_a_garbage_search_before_python_3_12() -> None:
    """What ``untie`` is for, and that it isn't needed later."""
    assert left_behind(untied=False) == (sys.version_info < (3, 12))
