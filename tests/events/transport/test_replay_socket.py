"""What waits of an answer is bounded in bytes, and an answer with long messages arrives all the same."""

import asyncio
import struct

import pytest
from tests.events.transport.live import LOOPBACK, Engine, Reader

from kvyard.events.transport import Subscriber, replay_socket
from kvyard.events.transport.replay_socket import QUEUE_BYTES, Room, rooms

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytestmark = pytest.mark.zmq

MIB = 1 << 20


@pytest.mark.parametrize("frame", [1 << 10, 1 << 16, 1 << 20, 64 << 20])
def test_no_room_has_more_bytes_than_another(frame: int) -> None:
    found = rooms(frame)
    assert all(room.messages * room.each <= QUEUE_BYTES for room in found)
    assert found[-1].each == frame
    assert [room.each for room in found] == sorted({room.each for room in found})
    assert found[0].messages >= 10_000  # what vLLM keeps by default has room by number, where messages are short


def test_an_answer_that_isnt_read_takes_no_more_memory_than_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MiB are offered to a reader that asked and then stands still: 8 MiB of room, and what the kernel's buffers hold."""
    monkeypatch.setattr(replay_socket, "QUEUE_BYTES", 8 * MIB)
    offered, taken = 128, 0
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 1)
        router.setsockopt(zmq.SNDBUF, 1 << 16)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say that there is no room, instead of dropping
        router.setsockopt(zmq.SNDTIMEO, 500)
        router.setsockopt(zmq.LINGER, 0)
        port, replay = pub.bind_to_random_port("tcp://127.0.0.1"), router.bind_to_random_port("tcp://127.0.0.1")

        async def ask() -> int:
            """Ask, and then let no message be read while the other side sends."""
            sent = 0
            subscriber = Subscriber(f"tcp://127.0.0.1:{port}", replay=f"tcp://127.0.0.1:{replay}", frame_bytes=MIB)
            async with subscriber:
                sockets = subscriber._sockets
                sockets._room = len(sockets._rooms) - 1  # where one message may be as long as any
                while not sockets._dealers:
                    await subscriber.receive(0.05)
                peer, *_ = router.recv_multipart()
                for number in range(offered):
                    try:
                        router.send_multipart([peer, b"", b"", struct.pack(">Q", number), bytes(MIB - 64)])
                    except zmq.Again:
                        break
                    sent += 1
            return sent

        taken = asyncio.run(ask())
    assert 0 < taken <= 8 + 24, f"{taken} MiB went out to a reader that reads nothing"


def test_messages_too_long_for_the_first_room_arrive_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_socket, "QUEUE_BYTES", 2 * MIB)
    assert rooms(MIB) == [Room(10_000, 209), Room(1_000, 2097), Room(2, MIB)]
    with Engine(LOOPBACK, LOOPBACK, snapshots=False) as engine:
        engine.step(*range(500))  # some kilobytes
        engine.step(1000)
        engine.flush()
        with Reader(**engine.endpoints, frame_bytes=MIB) as reader:
            reader.until_whole(engine)
            assert reader.subscriber.inner._sockets._room == 2
