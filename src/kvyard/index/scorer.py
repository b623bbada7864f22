"""The scorer: from a prompt's rows to the longest prefix that each worker can use, tier by tier.

A prefix is usable where every attention group of the worker can use it; tiers are taken closest first, since an engine
loads only what comes after the prefix it has. For workers with nothing but full attention, which is most, a level is one
walk over the rows with all workers at once, as sets of bits; others are asked one by one with the block manager's rules.

It reads the backend and changes nothing. Of streams it knows only the trust in them.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvyard.events.transport import State
from kvyard.events.types import Tier
from kvyard.index.backend import Rows, RowSource
from kvyard.index.catalog import Catalog
from kvyard.index.places import Holder, Places
from kvyard.index.views import Views, WorkerView

DEFAULT_WEIGHTS: Mapping[Tier, float] = {tier: tier.entry.credit for tier in Tier}
"""Worth of a block on each tier, against computing it. A tier that isn't listed earns nothing."""


class TierMatch(msgspec.Struct, frozen=True):
    """Addition of one tier to the match. Tiers are taken closest first, each continuing where the closer ones end."""

    blocks: int
    """Blocks of the index beyond what closer tiers reach."""
    tokens: int
    reach: int
    """Tokens of the longest usable prefix from this tier and all closer ones."""


class WorkerMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer."""

    worker: Holder
    blocks: int = 0
    tokens: int = 0
    """The longest prefix it could use, from all tiers that count."""
    score: float = 0.0
    """Blocks, weighted by tier and confidence."""
    tiers: dict[Tier, TierMatch] = msgspec.field(default_factory=dict)
    limited_by: int | None = None
    """The attention group that ended the match, where one did before the prompt did."""
    state: State = State.FRESH
    """The worst state of any stream that reports for it."""
    confidence: float = 1.0
    age: int = 0
    """Nanoseconds since its least recent stream sent anything."""
    reason: str = ""
    """Why it earns nothing, where something other than its cache is the cause."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Every known worker's answer for one prompt."""

    blocks: int
    """Full blocks of the prompt."""
    tokens: int
    workers: dict[Holder, WorkerMatch]

    def best(self) -> WorkerMatch | None:
        """Return the highest score, the first by name if several have it; ``None`` where no worker has any."""
        top = max(self.workers.values(), key=lambda match: match.score, default=None)
        if top is None or top.score <= 0:
            return None
        return min((m for m in self.workers.values() if m.score == top.score), key=lambda match: match.worker)


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Weight of a stream's reports in each state. A stale stream always has none (I12)."""

    catching_up: float = 0.0
    """From 0 to 1. While something is missing rows may be wrong either way, so nothing unless asked for."""

    def of(self, state: State) -> float:
        """Return the confidence in the announcements of a stream in ``state``."""
        return 1.0 if state == State.FRESH else self.catching_up if state == State.CATCHING_UP else 0.0


class HolderTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Combined trust in a holder's streams."""

    state: State = State.FRESH
    confidence: float = 1.0
    heard: int = 0
    """Time at which the least recent stream last sent anything."""
    reason: str = ""


class GroupReach(msgspec.Struct, frozen=True, kw_only=True):
    """Reach of one group alone, and the reason for its end."""

    group: int | None
    kind: str
    tokens: int
    why: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer and its reasons."""

    match: WorkerMatch
    groups: list[GroupReach]
    summary: str


MOST_NAMES = 4
_each = dict.fromkeys
UNHEARD = HolderTrust(state=State.STALE, confidence=0.0, reason="no stream speaks for it")


class Scorer:
    """Answers for one index. Not for several threads at once."""

    def __init__(
        self,
        places: Places,
        catalog: Catalog,
        backend: RowSource,
        block_size: int,
        weights: Mapping[Tier, float] | None = None,
    ) -> None:
        """``weights``: credit of a block on each tier. Blocks on other tiers don't count."""
        self.weights = dict(DEFAULT_WEIGHTS if weights is None else weights)
        self.block_size = block_size
        self._places = places
        self._catalog = catalog
        self.backend = backend
        self.standings: dict[Holder, HolderTrust] = {}
        """Trust in every worker and pool."""
        self._untrusted = 0
        self._views: Views | None = None
        self._version = -1

    def trust(self, standings: Mapping[Holder, HolderTrust], untrusted: int) -> None:
        """Answer for these workers from now on, and count nothing of the ``untrusted`` places."""
        if untrusted != self._untrusted or standings.keys() != self.standings.keys():
            self._views = None
        self.standings = dict(standings)
        self._untrusted = untrusted

    def join(self, holder: Holder, standing: HolderTrust) -> None:
        """Answer for ``holder`` too from now on."""
        self.standings[holder] = standing
        self._views = None

    def leave(self, holder: Holder) -> None:
        """Answer for ``holder`` no more."""
        del self.standings[holder]
        self._views = None

    @property
    def views(self) -> Views:
        """Return the view of every worker."""
        views = self._views
        version = self._places.version + self._catalog.version  # both only go up
        if views is None or version != self._version:
            self._version = version
            views = self._views = Views(
                self._places,
                self._catalog,
                [holder for holder in self.standings if not holder.shared],
                sorted(self.weights),
                self._untrusted,
                self.block_size,
            )
        return views

    def matches(self, keys: Sequence[int]) -> dict[Holder, int]:
        """Only how many blocks of the prompt each worker could use, from any tier; workers that have none are left out.

        The short answer, for callers that ask often. Confidence isn't weighed, but stale streams earn nothing here either.
        """
        views = self.views
        rows = self.backend.lookup(keys, views.through_holes)
        if not rows or not views.tiers:
            return {}
        reached = self._walk(views, rows, len(views.tiers) - 1) if views.plain else {}
        size = self.block_size
        for view in views.coarse:
            blocks = reached.get(view.worker)
            if blocks is not None:
                reached[view.worker] = blocks = blocks * size // view.layout.alignment * view.layout.alignment // size
                if not blocks:
                    del reached[view.worker]
        for view in views.hybrid:
            tokens = self.reach(view, rows, len(views.tiers) - 1, len(keys) * size, len(keys) * size)
            if tokens >= size:
                reached[view.worker] = tokens // size
        return reached

    def score(
        self, keys: Sequence[int], tokens: int | None = None, workers: Iterable[Holder] | None = None, now: int = 0
    ) -> Scores:
        """Return the scores of every worker, or of ``workers``.

        ``tokens`` is the prompt's length if it is known: its last token is always computed, as engines do, so a prompt
        that is cached to its end matches one block less.
        """
        views = self.views
        size = self.block_size
        end = len(keys) * size
        limit = end if tokens is None else max(0, min(end, tokens - 1))
        rows = self.backend.lookup(keys, views.through_holes)
        walks = [self._walk(views, rows, level) for level in range(len(views.tiers))] if views.plain else []
        out: dict[Holder, WorkerMatch] = {}
        for worker in self.standings if workers is None else workers:
            view = views.all.get(worker)
            standing = self.standings.get(worker, UNHEARD)
            if view is None:
                out[worker] = self._nothing(worker, standing, now)
                continue
            if view.plain:
                align = view.layout.alignment
                reach = [min(walk.get(worker, 0) * size, limit) // align * align for walk in walks]
            else:
                reach = [self.reach(view, rows, level, limit, end) for level in range(len(views.tiers))]
            out[worker] = self._match(view, views.tiers, rows, reach, limit, standing, now)
        return Scores(blocks=len(keys), tokens=end if tokens is None else tokens, workers=out)

    def explain(self, keys: Sequence[int], tokens: int, worker: Holder, now: int = 0) -> Explanation:
        """Return text that explains where the match of ``worker`` ends, group by group. Changes nothing.

        Silent zeros are what people ask about most. So for every group of a worker this names the first block that it lacked
        and what the index knows of that block. It can't know the past: a block that was evicted and one that was never
        computed look the same.
        """
        match = self.score(keys, tokens, [worker], now).workers[worker]
        view = self.views.all.get(worker)
        size = self.block_size
        end = len(keys) * size
        if view is None:
            return Explanation(match=match, groups=[], summary=f"{worker} earns nothing: {match.reason}")
        if not keys:
            return Explanation(match=match, groups=[], summary=f"{tokens} tokens don't fill one block of {size}")
        # All of the prompt, since what comes after a hole may explain it.
        rows = self.backend.lookup(keys, True)
        limit = max(0, min(end, tokens - 1))
        groups: list[GroupReach] = []
        for index, (group, spec, mask) in enumerate(
            zip(view.layout.groups, view.layout.specs, view.widest, strict=True)
        ):
            spans = view.spans(index, rows, mask)
            reach = spec.rule().match(spans, limit, view.layout.alignment, spec.eagle).tokens
            if reach + view.layout.alignment > limit:
                why = "it has all that could be used"
            elif not spec.is_full and spans:
                held = ", ".join(f"{low * spec.block_size}..{high * spec.block_size}" for low, high in spans[-3:])
                why = f"of the tokens it needs it has only {held}"
            else:
                why = self._why_missing(view, rows, reach // size, mask)
            groups.append(GroupReach(group=group, kind=spec.kind, tokens=reach, why=why))
        return Explanation(match=match, groups=groups, summary=_summary(match, groups, limit))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _walk(self, views: Views, rows: Rows, level: int) -> dict[Holder, int]:
        """Return the length of each plain worker's unbroken prefix, in our blocks."""
        reached: dict[Holder, int] = {}
        fold, named = views.folds[level], views.named
        known = fold.known
        start = 0
        alive = -1
        for stop, mask in rows:
            have = known.get(mask)
            if have is None:
                have = fold.work_out(mask)
            if have != alive:
                have &= alive
                if start and have != alive:
                    gone = alive ^ have
                    if reached:
                        reached |= _each(named.get(gone) or views.names(gone), start)
                    else:
                        reached = _each(named.get(gone) or views.names(gone), start)
                alive = have
                if not alive:
                    return reached
            start = stop
        if alive > 0:
            reached |= _each(named.get(alive) or views.names(alive), start)
        return reached

    def reach(self, view: WorkerView, rows: Rows, level: int, limit: int, end: int) -> int:
        """Return the longest usable prefix of a worker with rules of its own."""
        masks = view.levels[level]
        if not all(masks) or not rows:
            return 0
        return view.agreement.longest([view.spans(group, rows, mask) for group, mask in enumerate(masks)], limit, end)

    def _match(
        self,
        view: WorkerView,
        counted: Sequence[Tier],
        rows: Rows,
        reach: list[int],
        limit: int,
        standing: HolderTrust,
        now: int,
    ) -> WorkerMatch:
        size = self.block_size
        tiers: dict[Tier, TierMatch] = {}
        longest, score = 0, 0.0
        for tier, tokens in zip(counted, reach, strict=True):
            if tokens > longest:
                tiers[tier] = TierMatch(tokens // size - longest // size, tokens - longest, tokens)
                score += self.weights[tier] * (tokens - longest) / size
                longest = tokens
        return WorkerMatch(
            worker=view.worker,
            blocks=longest // size,
            tokens=longest,
            score=score * standing.confidence,
            tiers=tiers,
            limited_by=None if longest + view.layout.alignment > limit else view.limiting(rows, limit),
            state=standing.state,
            confidence=standing.confidence,
            age=max(0, now - standing.heard),
            reason=standing.reason,
        )

    def _nothing(self, worker: Holder, standing: HolderTrust, now: int) -> WorkerMatch:
        why = self.views.unknown.get(worker, "it isn't registered")
        return WorkerMatch(
            worker=worker,
            state=standing.state,
            confidence=0.0,
            age=max(0, now - standing.heard),
            reason="; ".join(filter(None, (standing.reason, why))),
        )

    def _why_missing(self, view: WorkerView, rows: Rows, block: int, mask: int) -> str:
        """Describe the first block that a group lacks."""
        places = self._places
        row = next((held for stop, held in rows if block < stop), 0)
        name = f"block {block}"
        if not row:
            return f"no worker holds {name}: never computed, evicted, or another adapter, salt or medium"
        holders = [view.worker, *places.pools(view.worker)]
        mine = [place for place in places.names(row & ~mask) if place.holder in holders]
        for place in mine:
            if place.tier not in self.weights:
                return f"{name} is on {place.tier.name}, which earns nothing here"
        if mine:
            if any(row & other for other in view.widest):
                return f"{name} is there for another group but not for this one"
            return f"{name} is there by a stream that can't be trusted now"
        others = sorted({str(place.holder) for place in places.names(row)})
        more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
        return f"{name} is on {', '.join(others[:MOST_NAMES])}{more}"


def _summary(match: WorkerMatch, groups: list[GroupReach], limit: int) -> str:
    text = f"{match.worker} could use {match.tokens} of {limit} tokens"
    if not match.confidence:
        return f"{text}, but earns nothing: {match.reason}"
    short = [detail for detail in groups if detail.group == match.limited_by]
    return f"{text}; {short[0].kind} group: {short[0].why}" if short and match.tokens < limit else text
