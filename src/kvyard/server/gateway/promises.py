"""Promises: the tokens of a prompt that a decision expected at the chosen engine, and those that the engine then found.

Every promise ends once: delivered, or missing for one of ``CAUSES``. So by engine, once nothing is in flight, tokens
promised are tokens delivered and tokens missing. It changes no route.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from kvyard.clock import MS
from kvyard.events.transport import State
from kvyard.index import Indexer
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
QUIET = 250 * MS
"""Time without a request before one whose events are watched: events of earlier requests have arrived by then."""
DISTRUSTED = "its events announce blocks that it doesn't have, as promised prompts show"
CROSSED = "its events rise when another engine computes a prompt, so they are that engine's"
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


class AnnouncedElsewhere:
    """Engines whose events rise when one engine alone computes a prompt: by requests that came to a quiet fleet and had it to
    themselves. After a request that just ended its own events may still be on their way, and would be taken for another's.
    """

    def __init__(self) -> None:
        self.votes: dict[str, Counter[str]] = {}
        """By engine, how often each engine's events rose, its own included."""
        self._watched = ""
        self._ended = 0
        """When the latest request ended."""
        self._stored: dict[str, int] = {}
        self._crossed: set[str] = set()

    def ended(self, now: int) -> None:
        """Note that a request ended."""
        self._ended = now

    def interrupted(self) -> None:
        """Note that a request was routed while another is in flight: event counts may be due to both from now on."""
        self._watched = ""

    def routed(self, engine: str, stored: Callable[[], dict[str, int]], now_ns: int) -> str:
        """Note a request that was routed to ``engine`` while no other is in flight. ``stored`` has the blocks that each
        engine's events have announced so far. Returns an engine that turns out to have another engine's events, the first time.
        """
        watched, self._watched = self._watched, ""
        quiet = now_ns - self._ended >= QUIET
        if not (watched or quiet):
            return ""
        now = stored()
        if watched:
            rose = [name for name, blocks in now.items() if blocks > self._stored.get(name, blocks)]
            if len(rose) == 1:
                self.votes.setdefault(watched, Counter())[rose[0]] += 1
        if quiet:
            self._watched, self._stored = engine, now
        if not watched or watched in self._crossed or not self.source(watched):
            return ""
        self._crossed.add(watched)
        return watched

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
