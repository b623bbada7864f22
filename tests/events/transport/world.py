"""A publisher, a faulty channel and a follower, without sockets and in virtual time."""

from random import Random

from tests.events.fake_map import FakeMap, token_chain

from kvyard.clock import SECOND
from kvyard.events import Batcher, EventBatch, GroupMeta, Mirror, Tier
from kvyard.events.faults import Faults, Injector
from kvyard.events.transport.frames import Frame, read_reply, request
from kvyard.events.transport.outlet import Archive
from kvyard.events.transport.phases import Signal
from kvyard.events.transport.state import Limits, State
from kvyard.events.transport.subscription import Follower
from kvyard.events.wire import Encoder
from kvyard.hashing import Run

GROUPS = (GroupMeta(block_size=1, kind="full_attention"), GroupMeta(block_size=1, kind="sliding_window", window=4))
TOPIC = b"kv@pod@model"


class World:
    def __init__(
        self, *, plain=False, source=True, ring=1000, faults=None, limits=None, seed=0, topicless=False
    ) -> None:
        self.now = 0
        self.random = Random(seed)
        self.archive = Archive(topic=TOPIC, epoch=1, batches=ring, plain=plain)
        self.injector = Injector(faults or Faults())
        self.limits = limits or Limits()
        self.answers = source and (ring > 0 or not plain)
        """True if anybody can be asked for missed batches."""
        self.encoder = Encoder()
        self.mirror = Mirror()
        self.updates = []
        self.answer = None
        self.asked = None
        self.deaf = False
        """True if requests go unanswered."""
        self.reply_loss = 0.0
        self.topicless = topicless
        """True if replies lack the topic, as SGLang's do."""
        self.in_flight: list[Frame] = []
        self._engine()
        self.follower = Follower("s", source=source, limits=self.limits)
        self.follower.start(0)
        self._collect()

    def _engine(self) -> None:
        self.map = FakeMap()
        self.map.sink = self.batcher = Batcher(GROUPS, snapshot=self.map.snapshot)

    # -- the publisher ----------------------------------------------------------------------------------------------

    def enter(self, *names: int, group: int = 0, tier: Tier = Tier.G1) -> None:
        self.map.enter(Run(token_chain(*names)), group, tier)

    def leave(self, *names: int, group: int = 0, tier: Tier = Tier.G1, keep: int = 0) -> None:
        self.map.leave(Run(token_chain(*names))[keep:], group, tier)

    def iterate(self, deliver: bool = True) -> EventBatch | None:
        """End an iteration; whatever changed is sent."""
        batch = self.batcher.end_iteration(self.now)
        if batch is not None:
            self.send(batch, deliver)
        return batch

    def send(self, batch: EventBatch, deliver: bool = True) -> Frame:
        payload = self.encoder.encode(batch)
        self.archive.keep(batch.seq, payload, batch.events)
        frame = Frame(TOPIC, batch.seq, payload)
        if deliver:
            self.deliver(*self.injector.disturb(frame))
        return frame

    def overflow(self) -> None:
        """The publisher's queue lost something: a gap, a clear and the map."""
        self.send(self.batcher.resync(self.now))

    def restart(self, noticed: bool = True) -> None:
        """Another publisher takes over; ``noticed`` by a broken connection, unless something stands in between."""
        self._engine()
        self.archive.restart(self.archive.epoch + 1)
        if noticed:
            self.follower.recovery.handle(Signal.RECONNECTED, self.now)
            self._collect()

    # -- the channel ------------------------------------------------------------------------------------------------

    def deliver(self, *frames: Frame) -> None:
        for frame in frames:
            self.follower.live(frame, self.now)
            self._collect()

    def serve(self, most: int = 1 << 30) -> bool:
        """Let the publisher answer what is asked, up to ``most`` messages. Returns whether anything was said."""
        said = False
        for _ in range(most):
            ask = self.follower.inquiry.request
            if ask is None or self.deaf:
                return said
            if self.asked != ask.number:
                self.asked, self.answer = ask.number, self.archive.answer(request(ask.word)[1])
            message = next(self.answer, None)
            if message is None:
                return said
            if self.reply_loss and self.random.random() < self.reply_loss:
                continue
            reply = read_reply([message[0], *message[2:]] if self.topicless else message)
            assert not isinstance(reply, str), reply
            self.follower.reply(ask.number, reply, self.now)
            self._collect()
            said = True
        return said

    def wait(self, ns: int, served: bool = False) -> None:
        """Let time pass; requests are answered at once if ``served``, else not at all."""
        stop = self.now + ns
        while (due := self.follower.recovery.due) is not None and due <= stop:
            self.now = max(self.now, due)
            self.follower.recovery.tick(self.now)
            self._collect()
            if served:
                self.serve()
        self.now = stop

    def settle(self, rounds: int = 12) -> None:
        """Nothing more is sent and nothing more goes wrong: recovery has its chance, silence included."""
        self.reply_loss, self.deaf = 0.0, False
        self.deliver(*self.injector.flush())
        self.serve()
        self.wait(rounds * 5 * SECOND, served=True)

    def _collect(self) -> None:
        updates = self.follower.updates
        while updates:
            update = updates.popleft()
            self.updates.append(update)
            self.mirror.apply(update.events)

    # -- judgement --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.follower.log.state

    @property
    def counters(self):
        return self.follower.log.status().counters

    @property
    def equal(self) -> bool:
        return self.mirror.held == self.map.held()

    def assert_whole(self) -> None:
        status = self.follower.log.status()
        assert self.state == State.FRESH, status
        assert self.equal, f"{self.mirror.held} is not {self.map.held()}: {status}"

    def assert_honest(self) -> None:
        """The mirror is the map, or the stream says that it can't be trusted."""
        if self.state != State.STALE:
            self.assert_whole()
