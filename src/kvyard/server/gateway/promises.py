"""Promises: the tokens of a prompt that a decision expected at the chosen engine, and those that the engine then found.

Every promise ends once: delivered, or missing for one of ``CAUSES``. So by engine, once nothing is in flight, tokens
promised are tokens delivered and tokens missing. It changes no route.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvyard.clock import MS
from kvyard.events.transport import State
from kvyard.index import Holder, Indexer
from kvyard.index.stream import FollowedStream
from kvyard.router import Decision

CAUSES = {
    "evicted": "the engine announced evictions in between",
    "stale": "its event stream had lost something",
    "no-events": "it announces nothing: what was sent there was taken to be cached",
    "in-flight": "another request with that prefix was still being computed",
    "restarted": "it was restarted, or went down, in between",
    "last-block": "the block with a prompt's last token is always computed",
    "tokens": "it made another number of tokens of the prompt",
    "block-size": "it found part of a block, or fewer and larger ones: its blocks have another size",
    "failed": "it failed or refused the request",
    "cut": "the answer broke off, or the client hung up",
    "unreported": "it doesn't report cached tokens",
    "phantom": "its events announce blocks that it doesn't have",
    "unknown": "the reason isn't known",
}
"""Why promised tokens were not delivered, in words."""


class StreamMarks(NamedTuple):
    """Positions of an engine's streams; two of them show what happened in between."""

    resets: int = 0
    removed: int = 0
    whole: bool = True
    streams: int = 0
    stored: int = 0


NO_MARKS = StreamMarks()
ENOUGH_ANSWERS = 16
"""Answers of an engine from which something is concluded about all of them."""
ENOUGH_VOTES = 4
ARRIVED = 250 * MS
"""Time after which events of a prompt have arrived."""
AWAITED = 8
"""Prompts whose events are awaited at a time."""
DISTRUSTED = "its events announce blocks that it doesn't have, as promised prompts show"
CROSSED = "its events announce what another engine computes, so they are that engine's"
"""Why a stream is no longer trusted."""


class EngineStreams:
    """The streams of one engine in the index, found once and again only when some stream came or went."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._of: Indexer | None = None
        self._known = -1
        self._streams: list[FollowedStream] = []

    def marks(self, indexer: Indexer | None) -> StreamMarks:
        """Return the current positions."""
        if indexer is None:
            return NO_MARKS
        if indexer is not self._of or len(indexer.streams) != self._known:
            self._of, self._known = indexer, len(indexer.streams)
            self._streams = [stream for stream in indexer.streams.values() if stream.source.worker == self._name]
        if not self._streams:
            return NO_MARKS
        resets = removed = stored = 0
        whole = True
        for stream in self._streams:
            resets += stream.resets
            whole = whole and stream.state is State.FRESH
            for feed in stream.feeds.values():
                removed += feed.counters.removed
                stored += feed.counters.stored
        return StreamMarks(resets, removed, whole, len(self._streams), stored)


class PromiseTally(msgspec.Struct):
    """Prompt tokens of one engine, or of all, over all time."""

    promised: int = 0
    delivered: int = 0
    """Of those."""
    missing: Counter[str] = msgspec.field(default_factory=Counter)
    """Of those, by reason."""
    unpromised: int = 0
    """Found by engines beyond what was promised."""
    kept: int = 0
    """Promises of which everything was delivered."""
    broken: int = 0
    """Promises of which something is missing."""
    founds: int = 0
    """Answers with tokens that were found."""
    step: int = 0
    """The largest number that all of these are multiples of."""

    def found(self, cached: int) -> None:
        """Note that an engine found ``cached`` tokens of a prompt."""
        if cached:
            self.founds += 1
            self.step = math.gcd(self.step, cached)

    @property
    def block_size(self) -> int:
        """The engine's block size as its answers show it; 0 while there are too few."""
        return self.step if self.founds >= ENOUGH_ANSWERS else 0


class _Computed(NamedTuple):
    """A prompt that one engine has computed, whose events are awaited."""

    engine: str
    keys: Sequence[int]
    holders: Callable[[Sequence[int]], dict[Holder, int]]
    """Blocks of a prompt that each worker has announced."""
    ended: int


class AnnouncedElsewhere:
    """Engines whose prompts another engine's events announce: by prompts that were new to the index and came once, looked up
    a while after they were computed.
    """

    def __init__(self) -> None:
        self.votes: dict[str, Counter[str]] = {}
        """By engine, how often each engine's events announced what it computed, its own included."""
        self._awaited: deque[_Computed] = deque()
        self._crossed: set[str] = set()

    def awaits_more(self, now: int) -> bool:
        """True if the events of one more prompt can be awaited."""
        return len(self._awaited) < AWAITED or self._is_due(now)

    def _is_due(self, now: int) -> bool:
        return bool(self._awaited) and now - self._awaited[0].ended >= ARRIVED

    def routed(self, keys: Sequence[int]) -> None:
        """Note that a prompt was routed: one that is awaited may be computed by another engine, too, and shows nothing."""
        last = keys[-1] if keys else None
        if any(computed.keys[-1] == last for computed in self._awaited):
            self._awaited = deque(computed for computed in self._awaited if computed.keys[-1] != last)

    def computed(
        self, engine: str, keys: Sequence[int], holders: Callable[[Sequence[int]], dict[Holder, int]], now: int
    ) -> str:
        """Note that ``engine`` computed a prompt that no worker had announced. Returns an engine whose events turn out to be
        those of another engine, the first time.
        """
        crossed = ""
        if self._is_due(now):
            crossed = self._look(self._awaited.popleft())
        if keys and len(self._awaited) < AWAITED:
            self._awaited.append(_Computed(engine, keys, holders, now))
        return crossed

    def _look(self, computed: _Computed) -> str:
        engine, blocks = computed.engine, len(computed.keys)
        names = {holder.name for holder, found in computed.holders(computed.keys).items() if found == blocks}
        if engine in names:
            names = {engine}
        if len(names) != 1:
            return ""
        self.votes.setdefault(engine, Counter())[names.pop()] += 1
        source = self.source(engine)
        if not source or source in self._crossed:
            return ""
        self._crossed.add(source)
        return source

    def source(self, engine: str) -> str:
        """Return the other engine whose events are really those of ``engine``; empty if there is none."""
        votes = self.votes.get(engine)
        if not votes:
            return ""
        name, count = votes.most_common(1)[0]
        return name if name != engine and count >= ENOUGH_VOTES and count > 2 * votes[engine] else ""


class RecentPhantoms:
    """The latest promises of an engine: whether blocks were announced that it doesn't have."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=2 * ENOUGH_ANSWERS)

    def add(self, phantom: bool) -> bool:
        """Add an answer. True if most were phantoms, so that the engine's events can't be trusted; then counting starts
        anew."""
        latest = self._latest
        latest.append(phantom)
        if len(latest) < ENOUGH_ANSWERS or 4 * sum(latest) < 3 * len(latest):
            return False
        latest.clear()
        return True


class Promise(msgspec.Struct, frozen=True, eq=False):
    """Expectation of one decision at one engine."""

    decision: Decision
    block_size: int
    marks: StreamMarks
    downs: int
    """Number of times that the engine had gone down before."""

    @property
    def tokens(self) -> int:
        return self.decision.overlap * self.block_size

    def settle(
        self,
        cached: int,
        prompt: int | None,
        marks: StreamMarks,
        downs: int,
        announces: bool,
        block_size: int = 0,
    ) -> tuple[int, dict[str, int]]:
        """Return the tokens delivered, and the missing ones by reason. The engine found ``cached`` tokens of a prompt of
        ``prompt``; ``marks`` and ``downs`` are of now; ``announces``: its events are received, here or elsewhere.
        ``block_size`` is the engine's as its answers show it, 0 if they don't yet.
        """
        promised, size, decision = self.tokens, self.block_size, self.decision
        delivered = min(cached, promised)
        left = promised - delivered
        missing: dict[str, int] = {}
        last_block = min(left, promised - (decision.num_tokens - 1) // size * size)
        if last_block > 0:
            missing["last-block"] = last_block
            left -= last_block
        if not left:
            return delivered, missing
        cause = self._cause(cached, prompt, marks, downs, announces, block_size)
        in_flight = 0 if cause else min(left, decision.predicted * size)
        if in_flight:
            missing["in-flight"] = in_flight
            left -= in_flight
        if left:
            evicted = marks.removed > self.marks.removed
            missing[cause or ("evicted" if evicted else "phantom" if marks.streams else "unknown")] = left
        return delivered, missing

    def _cause(
        self, cached: int, prompt: int | None, marks: StreamMarks, downs: int, announces: bool, block_size: int
    ) -> str:
        """Return the cause of all that is missing, if there is one."""
        if prompt is not None and prompt != self.decision.num_tokens:
            return "tokens"
        if downs != self.downs or marks.resets > self.marks.resets:
            return "restarted"
        if block_size > self.block_size and self.tokens - cached < block_size:
            return "block-size"
        if not announces:
            return "no-events"
        if not marks.whole:
            return "stale"
        return "block-size" if cached % self.block_size else ""


def entered(tallies: Iterable[PromiseTally], promised: int, delivered: int, missing: dict[str, int]) -> None:
    """Enter a promise that has ended."""
    for tally in tallies:
        tally.promised += promised
        tally.delivered += delivered
        if missing:
            tally.broken += 1
            for reason, tokens in missing.items():
                tally.missing[reason] += tokens
        elif promised:
            tally.kept += 1
