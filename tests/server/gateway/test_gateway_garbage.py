"""Requests leave nothing behind that only a search for garbage finds: what has lived for some seconds isn't searched."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.support import Gated, front
from tests.server.support import asking

pytestmark = [pytest.mark.zmq, pytest.mark.usefixtures("only_new_objects")]
OURS = ("kvyard.", "zmq.", "uvicorn.")
"""Modules whose objects may not be among the garbage."""
TRANSPORT = "asyncio.selector_events._SelectorSocketTransport"


@contextmanager
def circles() -> Iterator[Counter[str]]:
    """The types of what only a search for garbage found within, counted at its end."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: Counter[str] = Counter()
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def ask(gated: Gated, *, headers: str = "", hang_up: bool = False, **body: Any) -> bytes:
    """Return the answer over a connection of its own, up to its end or to the first bytes."""
    body = {"prompt": "some text of a client " * 8, "max_tokens": 6, "stream": True, **body}
    found = b""
    with asking(gated.url, "/v1/completions", f"Connection: close\r\n{headers}", **body) as line:
        while (part := line.recv(1 << 16)) and not hang_up:
            found += part
    return found


def test_requests_leave_no_circles() -> None:
    """Answered in full, refused, hung up on, failed, cut: connections, events and requests are freed when they end."""
    with front(2) as (gated, served):
        ask(gated)
        with circles() as left:
            assert b"[DONE]" in ask(gated)
            assert b"usage" in ask(gated, stream=False)
            assert b" 400 " in ask(gated, max_tokens=-1)
            ask(gated, hang_up=True, max_tokens=200)
            assert b" 503 " in ask(gated, headers="X-Mock-Fault: error=503\r\n")
            assert b"[DONE]" not in ask(gated, headers="X-Mock-Fault: abort_after=2\r\n", max_tokens=20)
            gated.idle()
            eventually(lambda: all(worker.load == 0 for worker in served.fleet.workers))
        assert not [kind for kind in left if kind.startswith(OURS)], left
        # One for each request at least, if they were left; the client that looks at engines' health may leave one or two.
        assert left[TRANSPORT] < 5, left
