"""A case: observations of one engine's stream, from connections to how much of the prompt it holds. No judgement here.

Every message goes two ways. A ``Checker`` notes what is odd about it. A subscription puts it in order, and its updates go into
two small indexes of the engine's own block size: one as announced, and one that is blind to adapters, salts and media. Where
only the blind one finds the prompt, the text was right and the rest wasn't. Both believe everything, even what a gap makes
doubtful: doubt is reported separately.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvyard.clock import MS, SECOND, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.events.check import Checker
from kvyard.events.recording import Recording
from kvyard.events.transport import fetch_replay
from kvyard.events.transport.frames import read_live
from kvyard.events.transport.state import Limits, State, Update
from kvyard.events.transport.subscriber import SubscriberSockets
from kvyard.events.transport.subscription import Subscription
from kvyard.events.types import Cleared, Event, Stored, Tier
from kvyard.hashing import PLAIN, Key, Namespace
from kvyard.index import Holder, Identity, Indexer, Source, WorkerMatch
from kvyard.index.scorer import Explanation

MOST_TEXTS = 2000
"""First blocks of prompts that are remembered, to see where ours parts from them."""


class Text(msgspec.Struct, frozen=True):
    """The beginning of a prompt that was announced."""

    tokens: tuple[int, ...]
    key: Key
    """The engine's hash of its first block."""
    size: int
    lora: str | None
    salted: bool
    media: bool
    tier: Tier = Tier.G1

    @property
    def plain(self) -> bool:
        return self.lora is None and not self.salted and not self.media


Place = tuple[Key | None, tuple[int, ...]]
"""A parent's hash and the tokens of the block behind it."""
Keys = tuple[str | None, str | None, tuple[object, ...]]
"""Adapter, salt and media of a block."""


class Case:
    """One stream, watched."""

    def __init__(
        self,
        name: str,
        *,
        replay: str | None,
        prompt: Sequence[int] | None,
        namespace: Namespace = PLAIN,
        topic: str = "",
        limits: Limits | None = None,
        live: bool = True,
    ) -> None:
        self.name = name
        self.replay = replay
        self.prompt = prompt
        self.namespace = namespace
        self.topic = topic
        self.live = live
        """True if it is a socket and not a recording."""
        self.checker = Checker()
        """Knows the stream as it was sent."""
        self.followed = Checker()
        """Knows what the subscription made of it: with earlier and missed batches, fetched by replay."""
        self.subscription = Subscription(name, source=replay is not None and live, prefix=topic, limits=limits)
        self.topics: Counter[str] = Counter()
        self.texts: list[Text] = []
        self.keys: dict[Place, set[Keys]] = {}
        """Adapters, salts and media under which the same block of text was stored."""
        self.clears: list[int] = []
        """Times of clears."""
        self.cleared_blocks = 0
        self.announced: Counter[int | None] = Counter()
        """Blocks stored per group."""
        self.most = 0
        """The longest match at any time, in tokens."""
        self.replay_answers: bool | None = None
        """True if the replay endpoint answered, if it was asked apart from the stream."""
        self.began = self.ended = 0
        self._held = 0
        self._seqs = 0
        self._named: Indexer | None = None
        self._blind: Indexer | None = None
        self._early: list[Update] = []

    # -- taking in --------------------------------------------------------------------------------------------------

    def start(self, now: int) -> None:
        """Begin."""
        self.began = self.ended = now
        self.subscription.start(now)

    def message(self, parts: Sequence[bytes], now: int) -> None:
        """Take in a message of the stream."""
        self.ended = now
        frame = read_live(parts)
        if not isinstance(frame, str):
            topic = frame.topic.decode("utf-8", "replace")
            self.topics[topic] += 1
            if not topic.startswith(self.topic):
                return
        self.checker.message(parts)
        if len(parts) > 1:
            self.subscription.message(parts, now)
        self.settle(now)

    def settle(self, now: int) -> None:
        """Apply what the subscription has ready."""
        updates = self.subscription.updates
        while updates:
            update = updates.popleft()
            self.followed.update(update)
            if update.events:
                self._look(update, now)
                self._apply(update)
        if self.prompt is not None and self._named is not None:
            self.most = max([self.most, *(match.tokens for match in self.matches())])

    def _look(self, update: Update, now: int) -> None:
        for event in update.events:
            if isinstance(event, Stored):
                self.announced[event.group] += len(event.hashes)
                self._held += len(event.hashes)
                self._note_keys(event)
                if event.parent is None and event.tokens and event.hashes and len(self.texts) < MOST_TEXTS:
                    self._remember(event)
            elif isinstance(event, Cleared) and not update.replaces:
                self.clears.append(now)
                self.cleared_blocks += self._held
                self._held = 0

    def _note_keys(self, event: Stored) -> None:
        if not event.tokens or not event.block_size:
            return
        place = event.parent, tuple(event.tokens[: event.block_size])
        if place in self.keys or len(self.keys) < MOST_TEXTS:
            self.keys.setdefault(place, set()).add((event.lora_name, event.salt, _media(event)))

    def _remember(self, event: Stored) -> None:
        assert event.tokens is not None
        items = _media(event)
        tokens, key, size = tuple(event.tokens[:1024]), event.hashes[0], event.block_size
        self.texts.append(
            Text(tokens, key, size, event.lora_name, salted=bool(event.salt), media=bool(items), tier=event.tier)
        )

    def _apply(self, update: Update) -> None:
        """Hand an update to both indexes; those wait for the first that says a block size."""
        self._early.append(update)
        if self._named is None:
            sizes = [event.block_size for event in update.events if isinstance(event, Stored) and event.block_size]
            if not sizes:
                return
            self._named, self._blind = Indexer(Identity(min(sizes))), Indexer(Identity(min(sizes)))
            for indexer in (self._named, self._blind):
                indexer.register(Source(stream=self.name, worker=self.name, by_rank=True))
        early, self._early = self._early, []
        for ready in early:
            self._carry(ready)

    def _carry(self, update: Update) -> None:
        """Hand an update to both indexes, numbered afresh and taken for whole."""
        assert self._named is not None and self._blind is not None
        update = msgspec.structs.replace(update, seq=self._seqs, epoch=0, state=State.FRESH, topic="")
        self._seqs += 1
        self._named.apply(update)
        self._blind.apply(msgspec.structs.replace(update, events=[_bare(event) for event in update.events]))

    # -- what there is to see ---------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int | None:
        """Return the engine's smallest block size, from its events."""
        return None if self._named is None else self._named.identity.block_size

    def matches(self) -> list[WorkerMatch]:
        """Return each rank's match of the prompt."""
        if self._named is None or self.prompt is None:
            return []
        return list(self._named.score(self.prompt, self.namespace).workers.values())

    def blind_match(self) -> int:
        """Return the tokens that would match if adapters, salts and media didn't matter."""
        if self._blind is None or self.prompt is None:
            return 0
        return max((match.tokens for match in self._blind.score(self.prompt).workers.values()), default=0)

    def explanations(self) -> list[tuple[Holder, Explanation]]:
        """Return per rank why it matches no more."""
        if self._named is None or self.prompt is None:
            return []
        self._named.refresh()
        ranks = [holder for holder in self._named.scorer.standings if not holder.shared]
        return [(rank, self._named.explain(self.prompt, rank, self.namespace)) for rank in ranks]

    def unknown_groups(self) -> list[str]:
        """Return why ranks can't be scored at all."""
        if self._named is None:
            return []
        self._named.refresh()
        return sorted(set(self._named.scorer.views.unknown.values()))

    def refused(self) -> list[str]:
        """Return why announced blocks could not be named."""
        if self._named is None:
            return []
        return sorted({feed.counters.last_refusal for _, feed in self._named.feeds() if feed.counters.refused})


def _media(event: Stored) -> tuple[object, ...]:
    """Return media of the first block."""
    extras = event.extra_keys[0] if event.extra_keys else None
    return tuple(item for item in extras or () if item not in (event.lora_name, event.salt))


def _bare(event: Event) -> Event:
    if isinstance(event, Stored):
        return msgspec.structs.replace(event, lora_name=None, lora_id=None, salt=None, extra_keys=None)
    return event


LIMITS = Limits(reply=SECOND, attempts=2, cooldown=2 * SECOND, probe=SECOND, probe_most=4 * SECOND)
"""Less patient than a service: a person waits for the doctor."""

LINGER = 200 * MS
"""Time to listen at once."""

BEYOND = (1 << 62) - 1
"""A sequence number that no stream has got to: the answer is that there is nothing, and that is an answer."""


def watch(
    cases: Sequence[Case], until: int, clock: Clock | None = None, busy: Callable[[], bool] = lambda: False
) -> None:
    """Listen to every case up to the time ``until``, and while requests are being sent (``busy``). Ctrl-C passes
    through, with all that came in by then taken in.

    Raises ``KvyardError`` where an endpoint can't be had.
    """
    clock = clock or WallClock()

    async def listen(case: Case) -> None:
        # Everything is subscribed to, whatever the topic: a topic that never matches is a finding.
        sockets = SubscriberSockets(case.name, replay=case.replay)
        sockets.open()
        try:
            case.start(clock.now())
            while (now := clock.now()) < until or busy():
                end = now + LINGER if now >= until else min(until, now + LINGER)
                await sockets.exchange(case.subscription, end, clock, case.message)
                case.settle(clock.now())
            case.ended = clock.now()
        finally:
            sockets.close()

    async def listen_to_all() -> None:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(listen(case))

    try:
        asyncio.run(listen_to_all())
    except* KvyardError as problems:
        raise problems.exceptions[0] from None


def ask_for_replay(cases: Sequence[Case]) -> None:
    """See whether replay endpoints answer at all: a stream that lost nothing has had no reason to ask."""
    for case in cases:
        if case.replay is None or any(
            status.counters.replayed or status.counters.snapshots for status in case.subscription.statuses()
        ):
            continue
        try:
            for _ in fetch_replay(case.replay, BEYOND, timeout=1.0):
                pass
            case.replay_answers = True
        except KvyardError:
            case.replay_answers = False


def play(case: Case, path: str) -> None:
    """Take in a recording. Raises ``KvyardError`` if it can't be read."""
    started = False
    for recorded in Recording(path):
        if not started:
            case.start(recorded.at)
            started = True
        case.subscription.tick(recorded.at)
        case.message(recorded.parts, recorded.at)
    if started:
        # A batch that is missing may only be late: let that time pass.
        case.subscription.tick(case.ended + LIMITS.patience + 1)
        case.settle(case.ended)
