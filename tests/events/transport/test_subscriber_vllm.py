"""With the real vLLM on the other side: its publisher into our subscriber, ours into a reader built on its types."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.events.transport.live import LOOPBACK, Engine, Reader
from tests.peers import peer_python, why_not
from tests.ports import free_ports

from kvyard.events import Mirror, Tier
from kvyard.events.faults import Faults
from kvyard.events.transport import Origin, State
from kvyard.events.transport.endpoint import reachable
from kvyard.events.transport.relay import FaultProxy
from kvyard.events.wire import Decoder

# Not marked zmq: what is missing, if they are skipped, is vLLM.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEER = Path(__file__).with_name("vllm_peer.py")
PYTHON = peer_python("vllm")


class Peer:
    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def line(self) -> str:
        while True:
            line = self.process.stdout.readline()
            assert line, f"the peer ended: {self.process.poll()}"
            if line.startswith(("{", "ready", "sent")):  # vLLM logs to standard output as well
                return line.strip()

    def has_line(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0.01)[0])

    def send(self, *events: dict) -> None:
        self.process.stdin.write(json.dumps(events) + "\n")
        self.process.stdin.flush()
        assert self.line() == "sent"


@contextmanager
def peer(*arguments: object) -> Iterator[Peer]:
    """The script, running with vLLM and ready."""
    if PYTHON is None:
        pytest.skip(why_not("vllm"))
    process = subprocess.Popen(
        [PYTHON, str(PEER), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    try:
        it = Peer(process)
        assert it.line() == "ready"
        yield it
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(20)
        process.stdout.close()


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU") -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(2 * len(hashes))),
        "block_size": 2,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": 0,
    }


def removed(*hashes: int) -> dict:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


G1, G2 = (0, Tier.G1), (0, Tier.G2)


def test_vllm_into_ours():
    """Joined late, with gaps, with a ring that rolled over, and cleared: each with one import of vLLM, which is slow."""
    port = free_ports(2)
    here, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    with peer("publish", f"tcp://*:{port}", f"tcp://*:{port + 1}") as vllm:
        for at in range(10):
            vllm.send(stored(2 * at, 2 * at + 1))
        vllm.send(removed(3), stored(100, parent=1, medium="CPU"))
        held = {G1: set(range(20)) - {3}, G2: {100}}

        with Reader(here, replay) as late:
            late.until(lambda: late.mirror.held == held and late.state == State.FRESH)
            assert {update.origin for update in late.updates if update.events} == {Origin.REPLAY}
            assert late.counters.replayed == 11 and late.counters.snapshots == 0
            last = late.updates[-2]
            assert (last.topic, last.rank, last.ts, last.dialect) == ("kv@vllm", 0, 1.5, "map")
            vllm.send(stored(200))
            late.until(lambda: 200 in late.mirror.held[G1])

        with FaultProxy(here, LOOPBACK, Faults(drop=0.4, seed=2)) as proxy, Reader(proxy.endpoint, replay) as lossy:
            lossy.until(lambda: lossy.state == State.FRESH)
            for at in range(1000, 1030):
                vllm.send(stored(at), removed(at - 1))
            expected = {G1: (held[G1] | {200, 1029}) - {999}, G2: {100}}
            lossy.until(lambda: lossy.mirror.held == expected and lossy.state == State.FRESH)
            assert lossy.counters.replayed > 10 and lossy.counters.restarts == 0

        for at in range(60):
            vllm.send(stored(5000 + at))
        with Reader(here, replay) as too_late:
            too_late.until(lambda: too_late.state == State.STALE and too_late.counters.gave_up)
            assert "reach back" in too_late.subscriber.statuses()[0].reason
            vllm.send({"type": "AllBlocksCleared"}, stored(1))
            too_late.until(lambda: too_late.state == State.FRESH)
            assert too_late.mirror.held == {G1: {1}}


def test_vllm_restarts():
    """Another vLLM at the same place: nothing of the old one is left, though the numbers of the new one run on."""
    port = free_ports(2)
    arguments = ("publish", f"tcp://*:{port}", f"tcp://*:{port + 1}")
    with Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}") as reader:
        with peer(*arguments) as vllm:
            for at in range(5):
                vllm.send(stored(at))
            reader.until(lambda: reader.state == State.FRESH and reader.mirror.held == {G1: set(range(5))})
        with peer(*arguments) as vllm:
            for at in range(100, 110):
                vllm.send(stored(at))
            reader.until(lambda: reader.state == State.FRESH and reader.mirror.held == {G1: set(range(100, 110))})
        assert reader.counters.restarts == 1 and reader.updates[-1].epoch == 1


def test_ours_into_vllm():
    """vLLM's types read what we publish, after a gap too; what they read adds up to the map."""
    with Engine(topic="kv@ours", rank=0) as engine:
        for name in range(5):
            engine.step(name, name + 10)
        engine.flush()
        replay = reachable(engine.publisher.replay_endpoint)
        with peer("read", reachable(engine.publisher.endpoint), replay) as vllm:
            for name in range(100, 156):
                engine.step(name, name + 1000)
                if name % 3 == 0:
                    engine.leave(name, name + 1000)
                    engine.enter(name + 5000, tier=Tier.G2)
                    engine.iterate()
            while not vllm.has_line():
                engine.step(engine.batcher._seq)  # until it is heard
            held = engine.map.held()
            engine.map.clear()
            engine.iterate()
            lines = [json.loads(vllm.line()) for _ in range(engine.batcher._seq)]
        assert [line["seq"] for line in lines] == list(range(engine.batcher._seq))
        mirror = Mirror()
        for line in lines[:-1]:
            assert line["rank"] == 0
            decoded = Decoder().decode([1.0, line["events"], 0])
            assert not decoded.problems, decoded
            mirror.apply(decoded.events)
        assert mirror.held == held and mirror.unknown == mirror.repeated == 0
