"""Two ways from caches into an index, side by side: runs handed on directly, and events over the wire. They must agree.

``BothWays`` is the index; ``Tee`` stands where a holder's batcher stands and tells both.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.levels import by_slot

from kvyard.blocks import GroupSpec
from kvyard.events import Batcher, EventBatch
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.subscription import Follower
from kvyard.events.types import Tier
from kvyard.events.wire import Encoder
from kvyard.hashing import Run
from kvyard.hashing.keys import Keys
from kvyard.index import Holder, Identity, Indexer, MemoryIndex, Places, Rows, Scores, Source
from kvyard.index.runs import RunIndexer
from kvyard.router import PrefixIndex

TOPIC = b""


class Tee:
    """The sink of one holder's caches: a ``RunFeed``, and a batcher, an encoder and a follower."""

    def __init__(self, ways: BothWays, holder: Holder, groups: Sequence[GroupSpec], tiers: Sequence[Tier]) -> None:
        self._ways = ways
        self._feed = ways.runs.attach(holder, groups, tiers)
        whose = {"pool": holder.name} if holder.shared else {"worker": holder.name, "rank": holder.rank}
        ways.wire.register(Source(stream=str(holder), groups=tuple(groups), clear_scope="all", **whose))  # type: ignore[arg-type]
        self._batcher = Batcher([spec.meta for spec in groups], stream=str(holder), with_tokens=ways.with_tokens)
        self._encoder = Encoder()
        self._follower = Follower(str(holder))
        self._follower.start(0)
        # Its first word is that there is nothing: without it the index knows nothing of the stream.
        self._publish(EventBatch(stream=str(holder), seq=0, events=[]), 0)

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        self._feed.entered(run, group, tier, first)
        self._batcher.entered(run, group, tier, first)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        self._feed.left(run, group, tier, last, reason)
        self._batcher.left(run, group, tier, last, reason)

    def cleared(self, tier: Tier | None = None) -> None:
        self._feed.cleared(tier)
        self._batcher.cleared(tier)

    def end_iteration(self, now: int) -> bool:
        """Publish what happened, if anything did."""
        self._feed.end_iteration(now)
        batch = self._batcher.end_iteration(now)
        if batch is not None:
            self._publish(batch, 1)
        return batch is not None

    def _publish(self, batch: EventBatch, later: int) -> None:
        self._follower.live(Frame(TOPIC, batch.seq + later, self._encoder.encode(batch)), 0)
        while self._follower.updates:
            self._ways.wire.apply(self._follower.updates.popleft())


class BothWays:
    """``runs`` and ``wire``, fed the same. By tokens, the wire's index works out its own names for the text."""

    def __init__(self, block_size: int, *, with_tokens: bool = False) -> None:
        self.with_tokens = with_tokens
        self.runs = RunIndexer(block_size)
        self.wire = Indexer(Identity(block_size, direct=not with_tokens), MemoryIndex())

    def attach(self, holder: Holder, groups: Sequence[GroupSpec], tiers: Sequence[Tier] = (Tier.G1,)) -> Tee:
        return Tee(self, holder, groups, tiers)

    def share(self, pool: str, members: Sequence[Holder]) -> None:
        self.runs.share(pool, members)
        self.wire.share(pool, members)

    def agree(self, keys: Keys, tokens: Sequence[int] | int, rows: bool = True) -> Scores:
        """Ask both about a prompt, by its keys and its tokens or their number, and see that they say the same."""
        self.runs.flush(1 << 62)
        count = tokens if isinstance(tokens, int) else len(tokens)
        theirs = [keys[at] for at in range(len(keys))] if isinstance(tokens, int) else self.wire.identity.keys(tokens)
        scores = self.wire.score_keys(theirs, count)
        assert self.runs.scorer.score(keys, count) == scores  # type: ignore[arg-type]
        workers = [worker for worker in scores.workers if not worker.shared]
        assert reaches(self.runs, workers, keys, count) == reaches(self.wire, workers, theirs, count)
        if rows:
            assert named(self.runs.places, self.runs.backend.lookup(keys, True)) == named(
                self.wire.places, self.wire.backend.lookup(theirs, True)
            )
        return scores

    def check_integrity(self) -> None:
        self.runs.check_integrity()
        self.wire.check_integrity()


def reaches(index: PrefixIndex, workers: Sequence[Holder], keys: Keys, tokens: int) -> dict[Tier, list[int]]:
    """Return a router's view, for every tier there is: an index knows only announced tiers."""
    roster = index.roster(workers)
    reaches = index.reaches(roster, keys, tokens)  # type: ignore[arg-type]
    levels = [by_slot(level, len(workers)) for level in reaches]
    known = dict(zip(roster.tiers, levels, strict=bool(levels)))
    out: dict[Tier, list[int]] = {}
    for tier in Tier:
        out[tier] = known.get(tier) or (list(out.values())[-1] if out else [0] * len(workers))
    return out


def named(places: Places, rows: Rows) -> list[tuple[int, set[str]]]:
    """Rows with the places' names: their numbers depend on who came first."""
    return [(stop, {str(place) for place in places.names(mask)}) for stop, mask in rows]
