"""Bounds in bytes and in time: batches that are large and valid, and messages that are too large."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.support import PATIENCE, Served
from tests.server.wire import Wire

from kvyard.clock import pause
from kvyard.events.transport import subscriber
from kvyard.events.wire.decoder import Decoded, Decoder
from kvyard.server.indexer import listener

pytestmark = pytest.mark.zmq

TEXT = list(range(16))


def large(size: int) -> bytes:
    """A valid batch of about ``size`` bytes, of stores of one block."""
    event = {
        "type": "BlockStored",
        "block_hashes": [0],
        "parent_block_hash": None,
        "token_ids": [70_000] * 16,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    count = size // 190
    events = [{**event, "block_hashes": [(1 << 60) + at], "token_ids": [at, *[70_000] * 15]} for at in range(count)]
    return msgspec.msgpack.encode([1.0, events, 0])


@pytest.mark.parametrize("size", [3 << 20, pytest.param(55 << 20, marks=pytest.mark.slow)])
def test_others_are_answered_while_a_large_batch_is_applied(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns, and not after all of it: between the first and the last turn others get answers. Not by the clock, which goes
    on while a busy machine does something else.
    """
    payload = large(size)
    answers, at_turns = 0, list[int]()

    async def counted() -> None:
        at_turns.append(answers)
        await pause()

    with Wire() as wire, Served(block_size=16) as served:
        served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.stored([1], TEXT, 16)
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 0)
        done = threading.Event()

        def ask() -> None:
            nonlocal answers
            while not done.is_set():
                served.get("/health")
                answers += 1

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: answers)
        monkeypatch.setattr(listener, "pause", counted)
        wire.payload(payload)
        try:
            for _ in range(10):  # a busy machine may take minutes for the largest
                with contextlib.suppress(AssertionError):
                    eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 1)
                    eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["state"] == "fresh")
                    break
        finally:
            done.set()
            asking.join(PATIENCE)
        print(f"{len(payload)} bytes in {len(at_turns)} turns, {at_turns[-1] - at_turns[0]} answers meanwhile")
        assert len(at_turns) >= 5 and at_turns[-1] - at_turns[0] >= 2, at_turns
        assert served.get("/health")["status"] == "ok"
        (model,) = served.service.models.values()
        assert model.indexer.backend.usage().blocks > size // 200


def test_a_large_message_is_read_in_a_thread_though_it_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []
    read = Decoder._read

    def watched(self: Decoder, payload: object) -> Decoded:
        readers.append(threading.current_thread())
        return read(self, payload)

    monkeypatch.setattr(Decoder, "_read", watched)
    monkeypatch.setattr(subscriber, "LARGE", 1000)
    with Wire() as wire, Served(block_size=16) as served:
        served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.payload(large(4000))
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 0)
        assert len(readers) == 1 and readers[0].name.startswith("events")


def test_a_message_that_is_too_large_costs_the_connection_and_not_the_memory() -> None:
    with Wire() as wire, Served(block_size=16, streams={"frame_bytes": 1 << 16}) as served:
        served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.stored([1], TEXT, 16)
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["state"] == "fresh")
        (model,) = served.service.models.values()
        (listening,) = model.listeners.values()
        wire.payload(b"\0" * (1 << 17))
        eventually(lambda: listening.subscriber.counters.disconnections)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")

        def said() -> bool:
            wire.removed([99])
            return bool(served.get("/workers")[0]["listeners"]["0"]["state"] == "stale")

        eventually(said)
        wire.cleared()
        wire.stored([1], TEXT, 16)
        eventually(lambda: served.get("/health")["status"] == "ok")


def test_no_more_waits_than_has_room() -> None:
    from kvyard.events.transport.replay_socket import QUEUE_BYTES
    from kvyard.events.transport.subscriber import SubscriberSockets

    for frame in (1 << 16, 1 << 20, 64 << 20):
        sockets = SubscriberSockets("tcp://127.0.0.1:1", replay=None, hwm=100_000, frame_bytes=frame)
        assert sockets._hwm * frame <= QUEUE_BYTES and sockets._hwm >= 16
