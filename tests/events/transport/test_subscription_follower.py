"""The follower: gaps, repetitions, restarts and silence; what it asks, what it passes on, and when it owns up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.events.transport.world import TOPIC, World

from kvyard.clock import SECOND
from kvyard.events import Tier
from kvyard.events.faults import Faults
from kvyard.events.transport.frames import Frame, Reply, ReplyKind, StreamHead, read_reply
from kvyard.events.transport.phases import Signal
from kvyard.events.transport.state import Limits, Origin, State
from kvyard.events.transport.subscription import Follower

BAD = Limits(held_batches=5)


def begun(batches: int = 3, **options) -> World:
    """A world in which some batches have been published and followed."""
    world = World(**options)
    for at in range(batches):
        world.enter(at, 100 + at)
        world.iterate()
    world.settle(1)
    world.assert_honest()
    return world


def dropped(world: World, count: int = 1) -> None:
    """Publish batches that nobody hears."""
    for at in range(count):
        world.leave(at)
        world.enter(500 + world.batcher._seq)
        world.iterate(deliver=False)


@pytest.mark.parametrize("plain", [False, True], ids=["kvyard", "vllm"])
class TestWithReplay:
    def test_from_the_start(self, plain):
        world = begun(plain=plain)
        world.assert_whole()
        assert world.counters.gaps == 0

    def test_late_joiner(self, plain):
        world = World(plain=plain)
        dropped(world, 4)
        world.settle()
        world.assert_whole()
        assert world.counters.snapshots == (not plain)

    def test_gap(self, plain):
        world = begun(plain=plain)
        dropped(world, 2)
        world.enter(9)
        world.iterate()
        assert world.state == State.CATCHING_UP
        world.serve()
        world.assert_whole()
        counters = world.counters
        assert (counters.gaps, counters.missed, counters.replayed, counters.snapshots) == (1, 2, 2, 0)

    def test_loss_before_silence(self, plain):
        world = begun(plain=plain)
        dropped(world)
        assert world.state == State.FRESH and not world.equal
        world.settle()
        world.assert_whole()

    def test_restart_that_is_received_from_batch_0(self, plain):
        world = begun(plain=plain)
        world.restart()
        world.enter(77)
        world.iterate()
        world.settle(1)
        world.assert_whole()
        assert world.counters.restarts == 1 and world.updates[-1].epoch == 1

    def test_restart_that_hides_in_a_gap(self, plain):
        """The new publisher has overtaken the old one's numbers before anything of it is heard."""
        world = begun(plain=plain)
        world.restart()
        dropped(world, 6)
        world.enter(78)
        world.iterate()
        world.settle(1)
        world.assert_whole()
        assert world.counters.restarts == 1

    def test_restart_in_silence(self, plain):
        world = begun(plain=plain)
        world.restart()
        world.settle()
        world.assert_whole()
        assert world.mirror.held == {}

    def test_restart_that_goes_on_where_the_old_one_ended(self, plain):
        world = begun(plain=plain)
        world.restart()
        dropped(world, 3)
        world.enter(78)
        world.iterate()
        assert world.state == State.CATCHING_UP, "only the broken connection gives it away"
        world.settle(1)
        world.assert_whole()
        assert world.counters.restarts == 1

    def test_broken_connection_to_the_same_publisher(self, plain):
        world = begun(plain=plain)
        dropped(world)
        world.follower.recovery.handle(Signal.RECONNECTED, world.now)
        world.enter(7)
        world.iterate()
        assert world.state == State.CATCHING_UP
        world.settle(1)
        world.assert_whole()
        assert world.counters.restarts == 0 and world.counters.batches == 5

    def test_broken_connection_and_no_answer(self, plain):
        world = begun(plain=plain)
        world.deaf = True
        world.follower.recovery.handle(Signal.RECONNECTED, world.now)
        world.wait(20 * SECOND)
        assert world.state == State.STALE and world.equal, "not to be trusted, but kept"
        world.settle()
        world.assert_whole()

    def test_repetition_is_no_restart(self, plain):
        world = begun(plain=plain)
        world.enter(5)
        frame = world.send(world.batcher.end_iteration(0))
        world.enter(6)
        world.iterate()
        world.deliver(frame)
        assert world.state == State.FRESH and world.counters.duplicates == 1
        world.assert_whole()

    def test_reordered(self, plain):
        world = begun(plain=plain)
        world.enter(5)
        late = world.send(world.batcher.end_iteration(0), deliver=False)
        world.enter(6)
        world.iterate()
        assert world.state == State.CATCHING_UP
        world.deliver(late)
        world.assert_whole()
        assert world.counters.late == 1 and world.counters.replayed == 0

    def test_damaged_batch_is_fetched_again(self, plain):
        world = begun(plain=plain)
        world.enter(5)
        frame = world.send(world.batcher.end_iteration(0), deliver=False)
        world.deliver(Frame(frame.topic, frame.seq, frame.payload[:-3]))
        assert world.state == State.CATCHING_UP
        world.serve()
        world.assert_whole()
        assert world.counters.damaged == 1 and world.counters.replayed == 1

    def test_a_late_replay_resurrects_nothing(self, plain):
        """While a replay is on its way, the missing batch and a removal after it come live."""
        world = begun(plain=plain)
        world.enter(50)
        first = world.send(world.batcher.end_iteration(0), deliver=False)
        world.enter(51)
        world.iterate()
        ask = world.follower.inquiry.request
        answer = list(world.archive.answer(ask.word.to_bytes(8, "big")))
        world.deliver(first)
        world.leave(50)
        world.iterate()
        world.assert_whole()
        for message in answer:
            world.follower.reply(ask.number, read_reply(message), 0)
        world._collect()
        world.assert_whole()
        assert world.counters.late_replies == len(answer)

    def test_number_that_can_not_be(self, plain):
        world = begun(plain=plain)
        world.enter(5)
        frame = world.send(world.batcher.end_iteration(0), deliver=False)
        world.deliver(Frame(TOPIC, 1 << 40, frame.payload))
        world.settle(1)
        world.assert_whole()
        assert world.counters.impossible == 1

    def test_publisher_lost_something(self, plain):
        world = begun(plain=plain)
        world.enter(5)
        world.overflow()
        world.assert_whole()
        assert world.counters.healed == 1 and world.counters.gaps == 1

    def test_replies_go_missing(self, plain):
        world = begun(plain=plain)
        dropped(world, 30)
        world.reply_loss = 0.3
        world.enter(9)
        world.iterate()
        for _ in range(100):
            world.serve()
            world.wait(SECOND)
        world.reply_loss = 0.0
        world.settle(1)
        world.assert_honest()

    def test_nobody_answers(self, plain):
        world = begun(plain=plain)
        dropped(world)
        world.deaf = True
        world.enter(9)
        world.iterate()
        world.wait(20 * SECOND)
        assert world.state == State.STALE and "doesn't answer" in world.follower.log.status().reason
        world.enter(10)
        world.iterate()
        assert world.updates[-1].state == State.STALE and world.updates[-1].origin == Origin.LIVE
        world.deaf = False
        world.settle()
        world.assert_whole()

    def test_too_much_waits(self, plain):
        world = begun(plain=plain, limits=BAD)
        dropped(world)
        for name in range(8):
            world.enter(name, 60)
            world.iterate()
        assert world.state == State.STALE and world.counters.overflows == 1
        assert not world.follower.at.held
        world.settle()
        world.assert_whole()


def test_sglang_replays_without_a_topic():
    world = begun(plain=True, topicless=True)
    dropped(world, 3)
    world.enter(9)
    world.iterate()
    world.serve()
    world.assert_whole()
    assert world.counters.replayed == 3


class TestReplayTooShort:
    def test_snapshot_then(self):
        world = begun(ring=2)
        dropped(world, 5)
        world.enter(9)
        world.iterate()
        world.serve()
        world.assert_whole()
        assert world.counters.snapshots == 1

    def test_stale_without_one(self):
        world = begun(ring=2, plain=True)
        dropped(world, 5)
        world.enter(9)
        world.iterate()
        world.serve()
        assert world.state == State.STALE
        assert "reach back" in world.follower.log.status().reason
        asked = world.asked
        world.settle()
        assert world.asked == asked + 2, (
            "a snapshot, after each cooldown: its reply may have been lost; replay can't help"
        )

    def test_a_clear_makes_it_fresh_again(self):
        world = begun(ring=2, plain=True)
        dropped(world, 5)
        world.enter(9)
        world.iterate()
        world.serve()
        world.map.clear()
        world.enter(3)
        world.iterate()
        world.assert_whole()

    def test_publisher_that_keeps_nothing(self):
        for probe in (0, SECOND):
            world = World(ring=0, plain=True, limits=Limits(probe=probe))
            world.settle(1)
            world.enter(1)
            world.iterate()
            assert world.equal
            world.settle()
            assert world.equal and world.state == (State.STALE if probe else State.FRESH)
            dropped(world)
            world.enter(2)
            world.iterate()
            world.settle(1)
            assert world.state == State.STALE


class TestWithoutReplay:
    def test_from_the_start(self):
        world = begun(source=False)
        world.assert_whole()

    def test_joined_late(self):
        world = World(source=False)
        dropped(world, 2)
        world.enter(1)
        world.iterate()
        assert world.state == State.STALE and "before 2" in world.follower.log.status().reason
        assert world.updates[-1].events

    def test_gap_is_stale_after_a_while(self):
        world = begun(source=False)
        dropped(world)
        world.enter(9)
        world.iterate()
        assert world.state == State.CATCHING_UP
        world.wait(SECOND)
        assert world.state == State.STALE and world.updates[-1].seq == 4

    def test_reordered(self):
        world = begun(source=False)
        world.enter(5)
        late = world.send(world.batcher.end_iteration(0), deliver=False)
        world.enter(6)
        world.iterate()
        world.deliver(late)
        world.assert_whole()

    def test_too_late(self):
        """What was given up must not be applied over what came after it."""
        world = begun(source=False)
        world.enter(5)
        late = world.send(world.batcher.end_iteration(0), deliver=False)
        world.leave(5)
        world.iterate()
        world.wait(SECOND)
        held = dict(world.mirror.held)
        world.deliver(late)
        assert world.mirror.held == held and world.counters.restarts == 0 and world.state == State.STALE

    def test_restart(self):
        world = begun(source=False)
        world.restart()
        world.enter(7)
        world.iterate()
        world.assert_whole()
        assert world.counters.restarts == 1

    def test_restart_that_is_received_late(self):
        world = begun(5, source=False)
        world.restart()
        dropped(world)
        world.enter(7)
        world.iterate()
        assert world.state == State.STALE and world.counters.restarts == 1

    def test_publisher_lost_something(self):
        world = begun(source=False)
        world.enter(5)
        world.overflow()
        world.assert_whole()


def test_restart_behind_a_proxy_that_keeps_the_connection():
    """The numbers fit and no connection broke: the epoch in the publisher's head tells."""
    world = begun()
    world.follower.recovery.handle(Signal.LOOK, world.now)
    world.serve()
    world.restart(noticed=False)
    dropped(world, 3)
    world.enter(78)
    world.iterate()
    assert world.state == State.FRESH and not world.equal
    world.settle()
    world.assert_whole()


class TestSilentDamage:
    def test_found_by_the_digest(self):
        """A payload that is wrong and reads well: only a publisher that tells its digest gives it away."""
        world = begun()
        world.enter(5)
        batch = world.batcher.end_iteration(0)
        frame = world.send(batch, deliver=False)
        other = World()
        other.enter(6)
        wrong = other.send(other.batcher.end_iteration(0), deliver=False)
        world.deliver(Frame(TOPIC, frame.seq, wrong.payload))
        assert world.state == State.FRESH and not world.equal
        world.settle()
        world.assert_whole()
        assert world.counters.mismatches == 1

    def test_unreadable_at_the_source(self):
        """A batch that replay brings just as unreadable: a snapshot makes up for it, or the stream is stale."""
        for plain in (False, True):
            world = begun(plain=plain)
            world.enter(5)
            batch = world.batcher.end_iteration(0)
            world.archive.keep(batch.seq, b"\x93oh", batch.events)
            world.deliver(Frame(TOPIC, batch.seq, b"\x93oh"))
            world.settle(1)
            if plain:
                assert world.state == State.STALE
            else:
                world.assert_whole()
            world.settle()
            world.assert_honest()


RATE = st.sampled_from([0.0, 0.0, 0.1, 0.4])
OPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "leave", "leave", "end", "end", "end", "serve", "wait", "clear", "odd"]),
        st.integers(0, 5),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from(Tier),
    ),
    max_size=60,
)


@st.composite
def troubles(draw) -> dict:
    plain, source = draw(st.sampled_from([(False, True), (True, True), (True, False)]))
    faults = Faults(
        drop=draw(RATE),
        duplicate=draw(RATE),
        reorder=draw(RATE),
        truncate=draw(RATE),
        # What is wrong but reads well is noticed only where the publisher tells its digest.
        corrupt=0.0 if plain else draw(RATE),
        stall=draw(st.sampled_from([0.0, 0.1])),
        stall_frames=5,
        stall_room=2,
        seed=draw(st.integers(0, 1 << 16)),
    )
    return {
        "plain": plain,
        "source": source,
        "faults": faults,
        "topicless": plain and draw(st.booleans()),
        "ring": draw(st.sampled_from([0, 1, 3, 1000])),
        "limits": Limits(held_batches=draw(st.sampled_from([2, 1000]))),
        "seed": draw(st.integers(0, 1 << 16)),
    }


def run_troubled(options: dict, ops: list, reply_loss: float) -> World:
    world = World(**options)
    world.reply_loss = reply_loss
    restarts = world.answers
    for op, name, length, group, tier in ops:
        chain = [name, *range(10 + name, 10 + name + length)]
        if op == "enter":
            world.enter(*chain, group=group, tier=tier)
        elif op == "leave":
            world.leave(*chain, group=group, tier=tier, keep=length // 2)
        elif op == "end":
            world.iterate()
        elif op == "serve":
            world.serve(most=1 + 3 * name)
        elif op == "wait":
            world.wait(name * name * SECOND // 5)
        elif op == "clear":
            world.map.clear(None if name < 3 else tier)
            world.iterate()
        elif name == 0 and restarts:
            # Where nobody can be asked, numbers that fit by chance can't be told from those that belong.
            world.restart()
        elif name == 1:
            world.overflow()
        elif name == 2:
            world.deaf = not world.deaf
        world.follower.at.check_integrity()
    world.iterate()
    return world


def assert_recovers(world: World) -> None:
    world.settle()
    if not world.answers:
        # A loss shows in what follows it.
        world.enter(999)
        frame = world.send(world.batcher.end_iteration(world.now), deliver=False)
        world.deliver(frame)
        world.settle(1)
    world.assert_honest()


@given(options=troubles(), ops=OPS, reply_loss=RATE)
@settings(max_examples=300)
def test_mirror_after_faults(options, ops, reply_loss):
    """I4 across a bad channel: once recovery is done, the mirror is the map, or the stream says that it is stale."""
    assert_recovers(run_troubled(options, ops, reply_loss))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(options=troubles(), ops=OPS, reply_loss=RATE)
@settings(max_examples=10_000)
def test_mirror_after_faults_for_long(options, ops, reply_loss):
    assert_recovers(run_troubled(options, ops, reply_loss))


@given(options=troubles(), ops=OPS, reply_loss=RATE)
def test_with_snapshots_nothing_stays_stale(options, ops, reply_loss):
    """Where the publisher has snapshots, recovery always gets there."""
    options = {**options, "plain": False, "source": True}
    world = run_troubled(options, ops, reply_loss)
    world.settle()
    world.assert_whole()


def _some_frames() -> list[Frame]:
    world = World(source=False)
    frames = []
    for name in range(4):
        world.enter(name)
        frames.append(world.send(world.batcher.end_iteration(name), deliver=False))
    world.map.clear()
    return [*frames, world.send(world.batcher.end_iteration(9), deliver=False)]


PAYLOADS = [b"", b"\xc1", b"\x93\x01\x90\xc0", *(frame.payload for frame in _some_frames())]
SEQS = st.one_of(st.integers(0, 8), st.sampled_from([1 << 40, (1 << 63) - 1]))
TOPICS = st.sampled_from([None, TOPIC, b"other"])
HEADS = st.builds(
    StreamHead, epoch=st.integers(0, 2), seq=st.integers(-1, 8), digest=st.integers(0, 2), parts=st.integers(0, 3)
)
REPLIES = st.builds(
    Reply, st.sampled_from(ReplyKind), TOPICS, SEQS, st.sampled_from(PAYLOADS), st.one_of(st.none(), HEADS)
)
INPUTS = st.lists(
    st.one_of(
        st.tuples(st.just("live"), st.builds(Frame, st.just(TOPIC), SEQS, st.sampled_from(PAYLOADS))),
        st.tuples(st.just("reply"), REPLIES),
        st.tuples(st.just("old reply"), REPLIES),
        st.tuples(st.just("wait"), st.integers(0, 40)),
        st.tuples(st.just("reconnected"), st.none()),
    ),
    max_size=60,
)


@given(inputs=INPUTS, source=st.booleans())
@settings(max_examples=500)
def test_nothing_that_arrives_breaks_it(inputs, source):
    """Whatever a publisher says, true or not: no exception, bounded room, and requests that go on being numbered."""
    follower = Follower("s", source=source, limits=Limits(held_batches=3, remembered=4))
    follower.start(0)
    now, asked = 0, 0
    for kind, value in inputs:
        if kind == "live":
            follower.live(value, now)
        elif kind == "reply":
            follower.reply(follower.inquiry.request.number if follower.inquiry.request else 0, value, now)
        elif kind == "old reply":
            follower.reply(max(0, asked - 1), value, now)
        elif kind == "wait":
            now += value * SECOND
            follower.recovery.tick(now)
        else:
            follower.recovery.handle(Signal.RECONNECTED, now)
        follower.at.check_integrity()
        assert len(follower.at.held) <= 3
        if follower.inquiry.request is not None:
            assert follower.inquiry.request.number >= asked and source
            asked = follower.inquiry.request.number
        if follower.log.state == State.FRESH:
            assert follower.recovery.whole and not follower.at.held
