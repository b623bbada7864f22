"""Real managers, a real wire, a faulty channel and the transport's follower in front of the index (I12).

Once recovery has had its chance, the index says what the managers say, or it says that it can't be trusted and credits nothing.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.fleet import PRESETS, Engine, prompts_of
from tests.index.support import removed, stored

from kvyard.clock import SECOND
from kvyard.events.faults import Faults, Injector
from kvyard.events.transport import Follower, Frame, State
from kvyard.events.transport.frames import read_reply, request
from kvyard.events.transport.outlet import Archive
from kvyard.events.transport.phases import Signal
from kvyard.events.types import Cleared, EventBatch, Tier
from kvyard.events.wire import Encoder
from kvyard.index import Holder, Identity, Indexer, Source

TOPIC = b"kv@pod@model"
TEXT = list(range(100, 116))


class Link:
    """An engine's stream to an indexer, through whatever goes wrong on the way."""

    def __init__(self, indexer: Indexer, name: str, preset: str, faults: Faults, *, source: bool = True) -> None:
        self.indexer, self.name, self.preset = indexer, name, preset
        self.now = 0
        self.archive = Archive(topic=TOPIC, epoch=1, batches=40, integers=True)
        self.injector = Injector(faults)
        self.encoder = Encoder()
        self.restarts = 0
        self._begin()
        indexer.register(Source(stream=name, worker=name, groups=PRESETS[preset], clear_scope="all"))
        self.follower = Follower(name, source=source)
        self.follower.start(0)
        self._pass_on()

    def _begin(self) -> None:
        self.engine = Engine(self.name, PRESETS[self.preset], seed=ord(self.name) * 1000 + self.restarts)

    def step(self, prompts: list[list[int]]) -> None:
        batch = self.engine.step(prompts)
        if batch is None:
            return
        payload = self.encoder.encode(batch)
        self.archive.keep(batch.seq, payload, batch.events)
        for frame in self.injector.disturb(Frame(TOPIC, batch.seq, payload)):
            self.follower.live(frame, self.now)
            self._pass_on()

    def restart(self) -> None:
        self.restarts += 1
        self._begin()
        self.archive.restart(self.archive.epoch + 1)
        self.follower.recovery.handle(Signal.RECONNECTED, self.now)
        self._pass_on()

    def serve(self) -> None:
        answered, answer = None, iter(())
        while (ask := self.follower.inquiry.request) is not None:
            if answered != ask.number:
                answered, answer = ask.number, self.archive.answer(request(ask.word)[1])
            message = next(answer, None)
            if message is None:
                return
            reply = read_reply(message)
            assert not isinstance(reply, str)
            self.follower.reply(ask.number, reply, self.now)
            self._pass_on()

    def settle(self) -> None:
        for frame in self.injector.flush():
            self.follower.live(frame, self.now)
        self.serve()
        stop = self.now + 60 * SECOND
        while (due := self.follower.recovery.due) is not None and due <= stop:
            self.now = max(self.now, due)
            self.follower.recovery.tick(self.now)
            self.serve()
        self.now = stop
        self._pass_on()

    def _pass_on(self) -> None:
        while self.follower.updates:
            self.indexer.apply(self.follower.updates.popleft(), self.now)


def check(indexer: Indexer, links: list[Link], prompts: list[list[int]]) -> int:
    """Every worker's score is its manager's, or it is stale and has none; how many were fresh."""
    indexer.check_integrity()
    fresh = 0
    for link in links:
        trusted = link.follower.log.state == State.FRESH
        fresh += trusted
        for prompt in prompts:
            keys = indexer.identity.keys(prompt)
            match = indexer.score_keys(keys, len(prompt)).workers[Holder(link.name)]
            if trusted:
                assert match.tokens == link.engine.longest(prompt), (link.name, prompt, match)
            else:
                assert match.score == 0 and Holder(link.name) not in indexer.matches(keys), match
    return fresh


@pytest.mark.parametrize("preset", ["full", "full+window", "full+state"])
@given(
    seed=st.integers(0, 1 << 32),
    size=st.sampled_from([2, 4]),
    what=st.sampled_from(["drop", "duplicate", "reorder", "truncate", "corrupt", "stall", "restart", "all"]),
)
@settings(max_examples=15)
def test_whole_again_or_owned_up_to(preset: str, seed: int, size: int, what: str) -> None:
    rng = random.Random(seed)
    names = ["drop", "duplicate", "reorder", "truncate", "corrupt"] if what == "all" else [what]
    rates = {name: 0.15 for name in names if name not in ("restart", "stall")}
    faults = Faults(**rates, stall=0.05 if what == "stall" else 0.0, seed=seed, stall_frames=8, stall_room=2)
    indexer = Indexer(Identity(size))
    links = [Link(indexer, name, preset, faults) for name in ("a", "b")]
    prompts = prompts_of(rng)
    for _ in range(3):
        for _ in range(15):
            for link in links:
                link.step(prompts)
                if rng.random() < 0.5:
                    link.serve()
                if what in ("restart", "all") and rng.random() < 0.03:
                    link.restart()
        for link in links:
            link.settle()
        assert check(indexer, links, prompts[:4]) == 2


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=10)
def test_without_anybody_to_ask_a_loss_means_no_credit(seed: int) -> None:
    rng = random.Random(seed)
    indexer = Indexer(Identity(4))
    links = [
        Link(indexer, name, "full+window", Faults(drop=0.1, reorder=0.1, seed=seed), source=False)
        for name in ("a", "b")
    ]
    prompts = prompts_of(rng)
    for _ in range(4):
        for _ in range(12):
            for link in links:
                link.step(prompts)
        for link in links:
            link.settle()
            # A loss at the very end is seen with the next batch only, without anybody to ask.
            if link.follower.log.state != State.FRESH:
                check(indexer, [link], prompts[:3])


def test_a_gap_makes_every_tier_stale() -> None:
    """A batch that clears the device after a gap makes the stream whole again, and of other tiers nothing is known then."""
    indexer = Indexer(Identity(4))
    indexer.register(Source(stream="a", worker="a"))
    follower, encoder, now = Follower("a", source=False), Encoder(), 0
    follower.start(now)
    batches = [
        [stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2)],
        [removed(TEXT, 4, tier=Tier.G2)],
        [Cleared(), stored(TEXT, 4, 0, 2)],
    ]
    for seq, events in enumerate(batches):
        if seq != 1:
            payload = encoder.encode(EventBatch(stream="a", seq=seq, events=events))
            follower.live(Frame(TOPIC, seq, payload), now)
        while follower.updates:
            indexer.apply(follower.updates.popleft(), now)
    match = indexer.score(TEXT).workers[Holder("a")]
    assert match.state == State.FRESH
    assert {tier: found.blocks for tier, found in match.tiers.items()} == {Tier.G1: 2}
