"""Event streams that announce absurd things: no message takes much more memory than it has bytes, or holds the loop."""

from __future__ import annotations

import contextlib
import gc
import re
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import MIB, MOST_HOLD_S, LoopHolds, ServerProcess, holds
from tests.hostile.test_memory import BACK_S
from tests.server.support import Served
from tests.server.wire import Wire
from tests.waiting import eventually

from kvyard.events.transport import Update
from kvyard.events.transport.frames import (
    PART_WORD,
    SNAPSHOT_WORD,
    TOPIC_BYTES,
    StreamHead,
    end_reply,
    reply_parts,
    write_head,
)
from kvyard.events.transport.inquiry import RequestKind
from kvyard.events.transport.state import Limits
from kvyard.events.transport.subscriber import FRAME_BYTES
from kvyard.events.transport.subscription import Subscription
from kvyard.events.wire import Decoder
from kvyard.events.wire.decoded import LARGE, MOST_EVENTS, MOST_PROBLEMS
from kvyard.server import garbage

__all__ = ["holds"]

pytestmark = pytest.mark.zmq
pack = msgspec.msgpack.encode
NULL = b"\xc0"


def listed(part: bytes, count: int) -> bytes:
    """A list that repeats one value."""
    return b"\xdd" + struct.pack(">I", count) + part * count


def batch(part: bytes, size: int, *, count: int | None = None) -> bytes:
    """A batch of about ``size`` bytes that repeats one event."""
    return b"\x93" + pack(1.0) + listed(part, count or size // len(part)) + NULL


def stored(tokens: bytes, hashes: bytes = b"\x91\x01") -> bytes:
    return b"\x95" + pack("BlockStored") + hashes + NULL + tokens + pack(16)


def removed_by(rank: int | None) -> bytes:
    """A removal as TensorRT-LLM announces it."""
    event = {"event_id": None, "data": {"type": "removed", "block_hashes": [1]}}
    return pack(event if rank is None else {**event, "attention_dp_rank": rank})


def mapped(size: int) -> bytes:
    return b"\xdf" + struct.pack(">I", size // 3) + b"\xa1a\xc0" * (size // 3)


def most(size: int) -> int:
    """Events of a batch of about ``size`` bytes, or as many as may be."""
    return MOST_EVENTS if size > MOST_EVENTS * 60 else size // 20


KINDS: dict[str, Callable[[int], bytes]] = {
    "one event of many tokens": lambda size: batch(stored(listed(b"\xce\0\1\1\1", size // 5)), size, count=1),
    "one event of many hashes": lambda size: batch(
        stored(b"\x90", listed(b"\xcf\1" + bytes(7), size // 9)), size, count=1
    ),
    "one event of many fields": lambda size: batch(mapped(size), size, count=1),
    "many fields": mapped,
    "a deep stamp": lambda size: b"\x92" + b"\x91" * size + b"\xc0\x90",
    "a wide stamp": lambda size: b"\x92" + listed(NULL, size) + b"\x90",
    "clears": lambda size: batch(pack(["AllBlocksCleared"]), size),
    "clears, as many as may be": lambda size: batch(pack(["AllBlocksCleared"]), size, count=most(size)),
    "removals, as many as may be": lambda size: batch(pack(["BlockRemoved", [1]]), size, count=most(size)),
    "stores, as many as may be": lambda size: batch(stored(b"\x90"), size, count=most(size)),
    "unknown media": lambda size: batch(pack(["BlockRemoved", [1], "NEW"]), size, count=most(size)),
    "nulls": lambda size: batch(NULL, size),
    "nulls alone": lambda size: listed(NULL, size),
    "deep": lambda size: b"\x91" * size,
    "deep JSON": lambda size: b"[" * size,
    "numbers as JSON": lambda size: b"[1.0,[" + b"1," * (size // 2) + b"1]]",
    "lists as JSON": lambda size: b"[1.0,[" + b"[]," * (size // 3) + b"1]]",
    "TensorRT-LLM's": lambda size: listed(pack({"event_id": 1, "data": {"type": "created"}}), size // 40),
    "TensorRT-LLM's as JSON": lambda size: b"[" + b'{"event_id":1,"data":{"type":"created"}},' * (size // 41) + b"{}]",
    "TensorRT-LLM's, as many as may be": lambda size: listed(removed_by(None), most(size)),
    "TensorRT-LLM's of two ranks": lambda size: (
        b"\xdd" + struct.pack(">I", most(size) // 4 * 2) + (removed_by(1) + removed_by(2)) * (most(size) // 4)
    ),
    "TensorRT-LLM's as JSON, as many as may be": lambda size: (
        b"[" + b",".join([b'{"event_id":null,"data":{"type":"removed","block_hashes":[1]}}'] * most(size)) + b"]"
    ),
    "a list that isn't there": lambda size: b"\x93" + pack(1.0) + b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_is_read_or_refused_with_few_words(kind: str) -> None:
    for size in (LARGE // 2, 2 * LARGE):
        decoded = Decoder().decode(KINDS[kind](size))
        assert len(decoded.events) <= MOST_EVENTS
        assert len(decoded.problems) <= 2 * MOST_PROBLEMS
        assert decoded.events or decoded.problems


@pytest.mark.parametrize("kind", KINDS)
def test_no_circle_keeps_a_payload(kind: str) -> None:
    payload = KINDS[kind](LARGE + 1000)
    before = sys.getrefcount(payload)
    gc.disable()
    try:
        Decoder().decode(payload)
        assert sys.getrefcount(payload) == before
    finally:
        gc.enable()


def test_as_many_events_as_may_be() -> None:
    event = pack(["BlockRemoved", [1]])
    assert len(Decoder().decode(batch(event, 0, count=MOST_EVENTS)).events) == MOST_EVENTS
    beyond = Decoder().decode(batch(event, 0, count=MOST_EVENTS + 1))
    assert beyond.lossy and not beyond.events and "262144" in beyond.problems[0].reason


def test_harmless_problems_hide_no_loss() -> None:
    unknown, bad = pack(["BlockRemoved", [1], "NEW"]), pack(["BlockRemoved", "?"])
    events = [unknown] * (MOST_PROBLEMS + 5) + [bad]
    decoded = Decoder().decode(b"\x92" + pack(1.0) + b"\xdc" + struct.pack(">H", len(events)) + b"".join(events))
    assert decoded.lossy and len(decoded.problems) == MOST_PROBLEMS + 1
    assert not Decoder().decode(batch(unknown, 0, count=MOST_PROBLEMS + 5)).lossy


def test_what_was_applied_is_not_kept_until_the_next_message() -> None:
    with Wire() as wire, Served(block_size=16) as served:
        served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.stored(list(range(1, 3001)), list(range(48_000)), 16)
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 0)

        def kept() -> list[Update]:
            gc.unfreeze()
            return [each for each in gc.get_objects() if isinstance(each, Update) and each.events]

        eventually(lambda: not kept(), kept)


@pytest.mark.parametrize("size", [1, LARGE // 2])
def test_a_snapshot_without_end_is_given_up(size: int) -> None:
    subscription = Subscription("s", source=True, limits=Limits(snapshot_bytes=4 * MIB))
    subscription.start(0)
    (number,) = subscription.requests
    head = StreamHead(epoch=1, seq=5, digest=1, parts=1 << 30)
    part = batch(pack(["BlockRemoved", [1]]), size)
    subscription.reply(number, reply_parts(b"t", SNAPSHOT_WORD, write_head(head)), 0)
    tracemalloc.start()
    try:
        for _ in range(4 * 4 * MIB // max(size, 4096)):
            subscription.reply(number, reply_parts(b"t", PART_WORD, part), 0)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        assert tracemalloc.get_traced_memory()[0] < MIB, "what is of no use isn't kept"
    finally:
        tracemalloc.stop()
    subscription.reply(number, end_reply(), 0)
    (request,) = subscription.requests.values()
    assert request.kind is not RequestKind.SNAPSHOT


def test_topics_are_short_and_share_what_may_wait() -> None:
    limits = Limits(held_in_all=10_000)
    subscription = Subscription("s", source=True, limits=limits)
    subscription.message([b"t" * (TOPIC_BYTES + 1), bytes(8), pack([1.0, []])], 0)
    assert subscription.counters.malformed == 1 and not subscription.statuses()[1:]
    payload = batch(pack(["BlockRemoved", [1]]), 1500)
    for topic in range(100):
        for seq in (7, 9):
            subscription.message([b"%d" % topic, seq.to_bytes(8, "big"), payload], 0)
    held = sum(status.held for status in subscription.statuses())
    assert 0 < held * len(payload) <= limits.held_in_all + len(payload)
    assert len(subscription.statuses()) == 100


@pytest.fixture
def settled() -> Iterator[None]:
    """Garbage is collected as in a server's own process: no callback pays for a search through all that tests have made."""
    before = gc.get_threshold()
    garbage.settle()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.callbacks.remove(garbage.TIMES)


@pytest.mark.slow
@pytest.mark.usefixtures("settled")
def test_no_message_holds_the_loop(holds: LoopHolds) -> None:
    """Messages as large as may be."""
    for kind, payload in KINDS.items():
        data = payload(FRAME_BYTES - 64)[: FRAME_BYTES - 64]
        for _ in range(4):  # another process may have had the caches
            with Wire() as wire, Served(block_size=16) as served:
                served.register(instance_id=1, endpoint=wire.endpoint)
                eventually(lambda: served.get("/workers")[0]["status"] == "active")
                holds.longest, holds.where = 0.0, ""
                wire.payload(data)
                wire.cleared()
                eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 1)
                longest, where = holds.longest, holds.where
            if longest <= MOST_HOLD_S:
                break
        print(f"{kind}: {longest * 1000:.0f} ms in {where}", flush=True)
        if longest > MOST_HOLD_S:
            holds.failed.append(kind)
    assert not holds.failed


class Attacked:
    """An index service in a process of its own that follows a publisher."""

    def __init__(self, server: ServerProcess, wire: Wire, client: httpx.Client) -> None:
        self.server, self.wire, self._client = server, wire, client
        body = {"instance_id": "w", "endpoint": wire.endpoint, "model_name": "m", "block_size": 16}
        assert self._client.post("/register", json=body).status_code == 201
        eventually(lambda: self._workers()[0]["status"] == "active")
        for number in range(1, 4):  # as engines do, once so many that they are read in a thread
            wire.stored(list(range(number, 6000)), [1 << 20] * 16 * (6000 - number), 16)
            wire.removed(list(range(number, 6000)))
            wire.cleared()
            self.applied()

    def at_rest(self) -> int:
        """The fewest resident bytes of some seconds: it gives back what is free now and then."""
        looks, end = [self.server.rss], time.monotonic() + BACK_S / 2
        while time.monotonic() < end:
            time.sleep(0.5)
            looks.append(self.server.rss)
        return min(looks)

    def _workers(self) -> Any:
        return self._client.get("/workers").json()

    def applied(self) -> None:
        """Wait until all that was sent is applied."""
        seq = self.wire.seq - 1
        eventually(lambda: self._workers()[0]["listeners"]["0"]["sequence"] == seq, seconds=600)

    def receive(self, kind: str) -> None:
        """Have it receive a kind three times, and then a clear."""
        data = KINDS[kind](FRAME_BYTES - 64)[: FRAME_BYTES - 64]
        for _ in range(3):
            self.wire.payload(data)
        self.wire.cleared()
        self.applied()

    @property
    def most(self) -> int:
        """The most resident bytes that it ever had."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


@contextlib.contextmanager
def attacked() -> Iterator[Attacked]:
    with ServerProcess("index", "serve") as server, Wire() as wire:
        with httpx.Client(base_url=server.url, timeout=60.0, trust_env=False) as client:
            yield Attacked(server, wire, client)


def comes_back(service: Attacked, settled: int, what: str) -> str:
    """Wait until the service has given memory back; returns what is wrong, or nothing."""
    server, peak = service.server, service.server.rss
    end = time.monotonic() + BACK_S
    while server.rss > 1.1 * settled and time.monotonic() < end:
        time.sleep(0.5)
    outcome = f"{what}: {settled / MIB:.0f}, {peak / MIB:.0f}, {server.rss / MIB:.0f} MiB"
    print(outcome, flush=True)
    return outcome if server.rss > 1.1 * settled else ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_comes_back() -> None:
    with attacked() as service:
        settled = service.at_rest()
        failed = list[str]()
        for kind in KINDS:
            service.receive(kind)
            failed += filter(None, [comes_back(service, settled, kind)])
        assert not failed, failed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_comes_back_after_ten_rounds_of_many_events() -> None:
    """Python keeps a MiB for each small object that stays in it, so what lies between many events would add up."""
    with attacked() as service:
        settled = service.at_rest()
        for _ in range(10):
            for kind in ("removals, as many as may be", "stores, as many as may be"):
                service.receive(kind)
        assert not comes_back(service, settled, f"ten rounds, {service.most / MIB:.0f} MiB at most")
