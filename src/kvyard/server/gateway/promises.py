"""Promises: what a decision took the chosen engine to have of a prompt, and what the engine then said that it found.

Every promise ends once: delivered, or missing for one of ``CAUSES``. So by engine, once nothing is under way, tokens promised
are tokens delivered and tokens missing. It changes no route.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

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
    "block-size": "it found part of a block: its blocks have another size",
    "failed": "it failed or refused the request",
    "cut": "the answer broke off, or the client hung up",
    "unreported": "it doesn't report cached tokens",
    "unknown": "the reason isn't known",
}
"""Why promised tokens were not delivered, in words."""


class StreamMarks(NamedTuple):
    """Where an engine's streams stand; two looks at it show what happened in between."""

    resets: int = 0
    removed: int = 0
    whole: bool = True
    streams: int = 0


NO_MARKS = StreamMarks()


class EngineStreams:
    """The streams of one engine in the index, found once and again only when some stream came or went."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._of: Indexer | None = None
        self._known = -1
        self._streams: list[FollowedStream] = []

    def marks(self, indexer: Indexer | None) -> StreamMarks:
        """Where they stand now."""
        if indexer is None:
            return NO_MARKS
        if indexer is not self._of or len(indexer.streams) != self._known:
            self._of, self._known = indexer, len(indexer.streams)
            self._streams = [one for one in indexer.streams.values() if one.source.worker == self._name]
        resets = removed = 0
        whole = True
        for stream in self._streams:
            resets += stream.resets
            whole = whole and stream.state is State.FRESH
            for feed in stream.feeds.values():
                removed += feed.counters.removed
        return StreamMarks(resets, removed, whole, len(self._streams))


class PromiseTally(msgspec.Struct):
    """Prompt tokens of one engine, or of all, over all time."""

    promised: int = 0
    delivered: int = 0
    """Of those."""
    missing: Counter[str] = msgspec.field(default_factory=Counter)
    """Of those, by reason."""
    unpromised: int = 0
    """Found by engines beyond what was promised."""


class Promise(msgspec.Struct, frozen=True, eq=False):
    """What one decision promised of one engine."""

    decision: Decision
    block_size: int
    marks: StreamMarks
    downs: int
    """How often the engine had gone down before."""

    @property
    def tokens(self) -> int:
        return self.decision.overlap * self.block_size

    def settle(
        self, cached: int, prompt: int | None, marks: StreamMarks, downs: int, announces: bool
    ) -> tuple[int, dict[str, int]]:
        """How many tokens were delivered, and the missing ones by reason. The engine found ``cached`` tokens of a prompt of
        ``prompt``; ``marks`` and ``downs`` are of now; ``announces``: its events are listened to, here or elsewhere.
        """
        promised, size, decision = self.tokens, self.block_size, self.decision
        delivered = min(cached, promised)
        left = promised - delivered
        missing: dict[str, int] = {}
        if not left:
            return delivered, missing
        for reason, most in (
            ("last-block", max(0, promised - (decision.num_tokens - 1) // size * size)),
            (self._cause(cached, prompt, marks, downs, announces), left),
            ("in-flight", decision.predicted * size),
            ("evicted", left if marks.removed > self.marks.removed else 0),
            ("unknown", left),
        ):
            taken = min(left, most)
            if reason and taken:
                missing[reason] = missing.get(reason, 0) + taken
                left -= taken
        return delivered, missing

    def _cause(self, cached: int, prompt: int | None, marks: StreamMarks, downs: int, announces: bool) -> str:
        """What explains all that is missing, if anything does."""
        if prompt is not None and prompt != self.decision.num_tokens:
            return "tokens"
        if downs != self.downs or marks.resets > self.marks.resets:
            return "restarted"
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
        for reason, tokens in missing.items():
            tally.missing[reason] += tokens
