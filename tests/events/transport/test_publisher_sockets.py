"""Publisher and subscriber over real sockets: joining, gaps, slow readers, restarts, and nothing left behind."""

import asyncio
import threading
from random import Random

import pytest
from tests.events.transport.live import LOOPBACK, PATIENCE, QUICK, Engine, Reader, read_until
from tests.ports import free_ports
from tests.waiting import eventually

from kvyard.errors import KvyardError
from kvyard.events import Mirror, Tier
from kvyard.events.faults import Faults
from kvyard.events.transport import Limits, Origin, Publisher, State, Subscriber
from kvyard.events.transport.frames import END_SEQUENCE, SNAPSHOT_WORD
from kvyard.events.transport.relay import FaultProxy

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytestmark = pytest.mark.zmq


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test gives back its threads and sockets."""
    threads = set(threading.enumerate())
    context = zmq.Context.instance()
    yield
    assert set(threading.enumerate()) <= threads
    # Terminating waits for open sockets, for ever: a leak shows as a time-out here.
    done = threading.Thread(target=context.term, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive(), "a socket was left open"
    zmq.Context._instance = None


class TestJoining:
    def test_late_reader_gets_a_snapshot(self):
        with Engine(topic="kv@pod@model", rank=3) as engine:
            for name in range(20):
                engine.step(name, name + 100)
            engine.leave(3, 103)
            engine.iterate()
            engine.flush()
            with Reader(**engine.endpoints) as reader:
                reader.until_whole(engine)
                (snapshot,) = [update for update in reader.updates if update.events]
                assert (snapshot.origin, snapshot.rank, snapshot.seq) == (Origin.SNAPSHOT, 3, 20)
                engine.step(7, 8)
                reader.until_whole(engine)
                last = reader.updates[-1]
                assert (last.origin, last.rank, last.topic, last.seq) == (Origin.LIVE, 3, "kv@pod@model", 21)
                (status,) = reader.subscriber.statuses()
                assert status.publisher_epoch == engine.publisher.epoch and status.epoch == 0

    def test_without_snapshots_replay_from_the_start(self):
        with Engine(snapshots=False) as engine:
            for name in range(20):
                engine.step(name)
            engine.flush()
            with Reader(**engine.endpoints) as reader:
                reader.until_whole(engine)
                assert reader.counters.replayed == 20 and reader.counters.snapshots == 0

    def test_without_anybody_to_ask_it_is_stale(self):
        with Engine(replay=None) as engine:
            engine.step(1)
            engine.flush()
            with Reader(engine.publisher.endpoint) as reader:
                names = iter(range(2, 10_000))
                reader.until(lambda: reader.mirror.held, lambda: engine.step(next(names)))
                assert reader.state == State.STALE
                assert "missed" in reader.subscriber.statuses()[0].reason

    def test_reader_first(self):
        port = free_ports(2)
        here, there = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        with Reader(here, there, limits=Limits(reply=100_000_000)) as reader:
            reader.pump(0.05)
            with Engine(_bound(here), _bound(there)) as engine:
                names = iter(range(10_000))
                reader.until(lambda: reader.mirror.held, lambda: engine.step(next(names)))
                reader.until_whole(engine)

    def test_topics_of_no_interest(self):
        with Engine(topic="kv@mine") as engine:
            with Reader(**engine.endpoints, topic="kv@other") as other, Reader(**engine.endpoints, topic="kv@") as mine:
                mine.until_whole(engine)
                engine.step(1)
                mine.until_whole(engine)
                assert mine.subscriber.statuses()[0].topic == "kv@mine"
                other.until(lambda: other.counters.foreign)
                assert other.counters.frames == 0 and other.mirror.held == {}

    def test_publishers_that_come_to_the_reader(self):
        with Reader("tcp://*:0", limits=QUICK) as reader:
            port = reader.subscriber.endpoint.rpartition(":")[2]
            with Engine(f"tcp://127.0.0.1:{port}", None, topic="kv@a") as a:
                with Engine(f"tcp://127.0.0.1:{port}", None, topic="kv@b") as b:
                    names = iter(range(10_000))

                    def both() -> None:
                        name = next(names)
                        a.step(name)
                        b.step(name)

                    reader.until(lambda: len(reader.subscriber.statuses()) == 2, both)
                    assert {status.topic for status in reader.subscriber.statuses()} == {"kv@a", "kv@b"}


class TestGaps:
    @pytest.mark.parametrize("snapshots", [True, False])
    def test_lost_on_the_way(self, snapshots):
        with Engine(snapshots=snapshots) as engine:
            faults = Faults(drop=0.2, duplicate=0.1, reorder=0.1, truncate=0.05, seed=1)
            with FaultProxy(engine.publisher.endpoint, LOOPBACK, faults) as proxy:
                with Reader(proxy.endpoint, engine.publisher.replay_endpoint) as reader:
                    reader.until_whole(engine)
                    for name in range(200):
                        engine.step(name)
                        if name > 5:
                            engine.leave(name - 5)
                            engine.iterate()
                        reader.pump(0)
                    reader.until_whole(engine)
                    # How often it mended by replay and how often by a snapshot is a matter of who ran when.
                    assert reader.counters.gaps > 0 and reader.counters.replayed + reader.counters.snapshots > 1
                    # A message that came twice is a duplicate, or covered by a snapshot that arrived in between.
                    assert reader.counters.duplicates + reader.counters.covered > 0 and reader.counters.damaged > 0

    def test_ring_too_short(self):
        with Engine(buffer_steps=3) as engine:
            with Reader(**engine.endpoints) as reader:
                reader.until_whole(engine)
                with FaultProxy(engine.publisher.endpoint, LOOPBACK, Faults(drop=1.0)):
                    pass
                reader.subscriber._sockets._sub.setsockopt(zmq.UNSUBSCRIBE, b"")
                for name in range(50):
                    engine.step(name)
                engine.flush()
                reader.until_whole(engine)  # by asking, since nothing is heard
                assert reader.counters.snapshots == 2 and reader.counters.frames < 50

    def test_queue_overflow_is_a_gap_then_a_clear_then_the_map(self):
        """The words are plain: a reader that knows nothing of us ends up whole."""
        with Engine(replay=None, max_events=3) as engine:
            sub = zmq.Context.instance().socket(zmq.SUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(engine.publisher.endpoint)
            reader = Reader(engine.publisher.endpoint)
            with reader:
                names = iter(range(100_000, 200_000))
                reader.until(lambda: reader.mirror.held, lambda: engine.step(next(names)))
                while not engine.publisher.counters()["overflows"]:
                    for _ in range(50):
                        engine.step(next(names))
                reader.until_whole(engine)
                assert reader.counters.healed >= 1 and reader.state == State.FRESH
            sub.close(linger=0)

    @pytest.mark.slow
    def test_reader_that_stays_away(self):
        with Engine(hwm=5) as engine, Reader(**engine.endpoints, hwm=5) as reader:
            reader.until_whole(engine)
            for name in range(2000):
                engine.step(name, *range(10_000, 10_100))
                engine.leave(name, *range(10_000, 10_100))
                engine.iterate()
            engine.step(1)
            reader.until_whole(engine)
            assert reader.counters.gaps >= 1


class TestRestart:
    def test_same_place_new_publisher(self):
        with Engine() as engine:
            endpoint, replay = engine.publisher.endpoint, engine.publisher.replay_endpoint
            with Reader(endpoint, replay) as reader:
                engine.step(1, 2)
                engine.step(3)
                reader.until_whole(engine)
                engine.publisher.close()
                with Engine(_bound(endpoint), _bound(replay)) as other:
                    other.step(9)
                    reader.until_whole(other)
                    assert reader.counters.restarts == 1 and reader.subscriber.counters.disconnections >= 1
                    assert reader.updates[-1].epoch == 1
                    for name in range(30):
                        other.step(name)
                    reader.until_whole(other)

    def test_without_replay(self):
        with Engine(replay=None) as engine:
            endpoint = engine.publisher.endpoint
            with Reader(endpoint) as reader:
                names = iter(range(10_000))
                reader.until(lambda: reader.mirror.held, lambda: engine.step(next(names)))
                for _ in range(2000):
                    engine.step(next(names))
                reader.until(lambda: reader.updates[-1].seq >= 2000)
                engine.publisher.close()
                with Engine(_bound(endpoint), None) as other:
                    names = iter(range(50_000, 52_000))  # what is heard of it goes back
                    reader.until(lambda: reader.counters.restarts, lambda: other.step(next(names)))
                    assert any(update.origin == Origin.RESET for update in reader.updates)


def _bound(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "*")


class TestAnswers:
    """The replay socket word for word, as a plain vLLM client would use it."""

    def ask(self, engine: Engine, *frames: bytes) -> list[list[bytes]]:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        try:
            dealer.connect(engine.publisher.replay_endpoint)
            dealer.send_multipart(frames)
            replies = []
            while dealer.poll(1000 * PATIENCE if frames[0] == b"" else 300):
                replies.append(dealer.recv_multipart())
                if replies[-1][-2] == END_SEQUENCE:
                    break
            return replies
        finally:
            dealer.close(linger=0)

    def test_replay(self):
        with Engine(topic="t") as engine:
            for name in range(5):
                engine.step(name)
            engine.flush()
            replies = self.ask(engine, b"", (2).to_bytes(8, "big"))
            assert [reply[:3] for reply in replies[:-1]] == [[b"", b"t", seq.to_bytes(8, "big")] for seq in (2, 3, 4)]
            assert replies[-1] == [b"", b"", b"\xff" * 8, b""]

    def test_beyond_the_end(self):
        with Engine() as engine:
            engine.step(1)
            assert self.ask(engine, b"", (99).to_bytes(8, "big")) == [[b"", b"", b"\xff" * 8, b""]]

    def test_nonsense_is_ignored_and_counted(self):
        with Engine() as engine:
            assert self.ask(engine, b"x", b"y", b"z") == []
            eventually(lambda: engine.publisher.counters()["malformed_requests"] == 1)
            assert len(self.ask(engine, b"", b"no such word")) == 1

    def test_snapshot(self):
        with Engine() as engine:
            for name in range(3):
                engine.step(name)
            engine.flush()
            head, *parts, end = self.ask(engine, b"", SNAPSHOT_WORD)
            assert head[2] == SNAPSHOT_WORD and len(parts) == 1 and end[2] == END_SEQUENCE

    def test_slow_asker_holds_nobody_up(self):
        with Engine() as engine:
            for name in range(3000):
                engine.step(name, *range(20_000, 20_010))
            engine.flush()
            dealer = zmq.Context.instance().socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(engine.publisher.replay_endpoint)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            assert dealer.poll(1000 * PATIENCE)
            with Reader(**engine.endpoints) as reader:
                reader.until_whole(engine)
                engine.step(1, 1)
                reader.until_whole(engine)
            count = 0
            while dealer.poll(1000 * PATIENCE) and dealer.recv_multipart()[2] != END_SEQUENCE:
                count += 1
            assert count == 3000, "every reply came, however slowly it was read"
            dealer.close(linger=0)


class TestAsyncio:
    def test_joins_and_recovers(self):
        async def run() -> None:
            engine = Engine()
            async with engine.publisher:
                for name in range(10):
                    engine.step(name)
                with FaultProxy(engine.publisher.endpoint, LOOPBACK, Faults(drop=0.3, seed=3)) as proxy:
                    replay = engine.publisher.replay_endpoint
                    async with Subscriber(proxy.endpoint, replay=replay, limits=QUICK) as reader:
                        mirror = Mirror()

                        def whole() -> bool:
                            return reader.state == State.FRESH and mirror.held == engine.map.held()

                        await read_until(reader, mirror, whole)
                        for name in range(100):
                            engine.step(name, 5)
                            await asyncio.sleep(0)
                        await read_until(reader, mirror, whole)
                        (status,) = reader.statuses()
                        assert status.counters.gaps > 0

        asyncio.run(run())

    def test_cancelling_loses_nothing(self):
        async def run() -> None:
            engine = Engine()
            async with engine.publisher, Subscriber(**engine.endpoints, limits=QUICK) as reader:
                mirror = Mirror()

                def whole() -> bool:
                    return reader.state == State.FRESH and mirror.held == engine.map.held()

                await read_until(reader, mirror, whole)
                for name in range(20):
                    engine.step(name)
                    with pytest.raises(asyncio.TimeoutError):
                        # Cancelled while it waits for something that comes now and then.
                        await asyncio.wait_for(asyncio.sleep(10), 0.001)
                    try:
                        update = await asyncio.wait_for(reader.receive(), 0.001)
                        mirror.apply(update.events)
                    except TimeoutError:
                        pass
                await read_until(reader, mirror, whole)

        asyncio.run(run())

    def test_iteration_ends_when_closed(self):
        async def run() -> int:
            engine = Engine()
            async with engine.publisher:
                engine.step(1)
                reader = Subscriber(**engine.endpoints, limits=QUICK).open()
                count = 0
                async for _ in reader:
                    count += 1
                    if count == 3:
                        reader.close()
                return count

        assert asyncio.run(run()) == 3


class TestLifeCycle:
    def test_closing_twice_and_using_after(self):
        with Engine() as engine:

            async def run() -> None:
                subscriber = Subscriber(**engine.endpoints).open()
                subscriber.close()
                subscriber.close()
                with pytest.raises(KvyardError, match="not open"):
                    await subscriber.receive(0)
                with pytest.raises(KvyardError, match="opens once"):
                    subscriber.open()

            asyncio.run(run())
            engine.publisher.close()
            engine.publisher.close()
            engine.enter(1)
            with pytest.raises(KvyardError, match="not running"):
                engine.iterate()

    def test_address_in_use(self):
        with Engine() as engine:
            other = Publisher(_bound(engine.publisher.endpoint), lambda now: None)
            with pytest.raises(KvyardError, match="can't bind"):
                other.start()
            both = Publisher(LOOPBACK, lambda now: None, replay=_bound(engine.publisher.endpoint))
            with pytest.raises(KvyardError, match="can't bind"):
                both.start()

    def test_closing_sends_what_waits(self):
        with Engine() as engine, Reader(**engine.endpoints) as reader:
            reader.until_whole(engine)
            for name in range(500):
                engine.step(name)
            engine.publisher.close()
            assert engine.publisher.counters()["sent"] == 500

    def test_failure_in_the_thread_is_made_up_for(self):
        with Engine() as engine, Reader(**engine.endpoints) as reader:
            reader.until_whole(engine)
            encode = engine.publisher._encoder.encode

            def fail(batch):
                engine.publisher._encoder.encode = encode
                raise RuntimeError("no")

            engine.publisher._encoder.encode = fail
            engine.step(1)
            while not engine.publisher.failures:
                pass
            engine.step(2)
            reader.until_whole(engine)
            assert isinstance(engine.publisher.error, RuntimeError)

    def test_ranks_have_ports_of_their_own(self):
        port = free_ports(4)
        with Engine(f"tcp://*:{port}", f"tcp://*:{port + 2}", rank=1) as engine:
            assert engine.endpoints == {"endpoint": f"tcp://*:{port + 1}", "replay": f"tcp://*:{port + 3}"}
            with Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 2}", rank=1) as reader:
                engine.step(1)
                reader.until_whole(engine)

    def test_inproc(self):
        with Engine("inproc://a", "inproc://b", rank=2) as engine:
            engine.step(1)
            with Reader("inproc://a", "inproc://b", rank=2) as reader:
                reader.until_whole(engine)


class TestProxy:
    def test_restarts(self):
        """Behind a proxy that restarts the publisher now and then, a reader ends up with what the last one holds."""
        with Engine() as engine:
            faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, restart=0.03, corrupt=0.1, stall=0.02, seed=5)
            with FaultProxy(engine.publisher.endpoint, LOOPBACK, faults, replay=LOOPBACK) as proxy:
                with Reader(proxy.endpoint, proxy.replay_endpoint) as reader:
                    names = iter(range(10_000))
                    reader.until(lambda: proxy.faults.frames, lambda: engine.step(next(names)))
                    for _ in range(300):
                        engine.step(next(names))
                        reader.pump(0)
                    reader.until(lambda: proxy.faults.frames > 300)
                    reader.until(
                        lambda: reader.state == State.FRESH and reader.mirror.held == proxy.outlet.archive.mirror.held,
                    )
                    assert proxy.faults.restarts > 1 and reader.counters.restarts >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_mirror_after_faults_over_sockets(seed):
    """I4 over real sockets: every fault at once, the publisher restarted for real, a short ring, a queue that overflows."""
    random = Random(seed)
    faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, truncate=0.05, corrupt=0.05, stall=0.01, seed=seed)
    options = {
        "buffer_steps": random.choice([2, 20, 10_000]),
        "max_events": random.choice([3, 100_000]),
        "dialect": random.choice(["vllm", "vllm-array"]),
    }
    engine = Engine(**options)
    engine.publisher.start()
    endpoint, replay = engine.publisher.endpoint, engine.publisher.replay_endpoint
    with FaultProxy(endpoint, LOOPBACK, faults) as proxy, Reader(proxy.endpoint, replay) as reader:
        for step in range(600):
            name = random.randrange(40)
            group, tier = random.randrange(2), random.choice(list(Tier))
            if random.random() < 0.6:
                engine.enter(name, name + 100, group=group, tier=tier)
            else:
                engine.leave(name, name + 100, group=group, tier=tier)
            engine.now = step
            engine.iterate()
            if random.random() < 0.004:
                engine.publisher.close()
                engine = Engine(_bound(endpoint), _bound(replay), **options).__enter__()
            if random.random() < 0.3:
                reader.pump(0)
        try:
            reader.until_whole(engine)
        finally:
            engine.publisher.close()
