"""A roster: the scorer's answers by position, for a router that asks about the same workers time and again."""

from collections.abc import Sequence

from kvyard.events.types import Tier
from kvyard.index.backend import Rows
from kvyard.index.bits import bits, mask_of
from kvyard.index.catalog import GroupLayout
from kvyard.index.hybrids import HybridWorkers
from kvyard.index.places import Holder
from kvyard.index.scorer import Scorer
from kvyard.index.views import RowFold, Views, WorkerView


class Roster:
    """Answers of one scorer about ``workers``, by position. Ask through ``Indexer.reaches``, which keeps trust up to date.

    For callers that ask about the same workers time and again and add figures of their own: a router. The answers are those of
    ``Scorer.score``; what is left out is all that costs time to write down.
    """

    def __init__(self, scorer: Scorer, workers: Sequence[Holder]) -> None:
        self.workers = tuple(workers)
        self.tiers: list[Tier] = []
        """What the levels of an answer stand for, closest first."""
        self.alignments: list[int] = []
        """Per worker the tokens that a prefix comes in steps of; 0 where attention groups have rules of their own."""
        self.confidence: list[float] | None = None
        """Per worker; ``None`` while all that is counted is trusted in full."""
        self._scorer = scorer
        self._views: Views | None = None
        self._standings: object = None
        self._folds: list[RowFold] = []
        """Per level."""
        self._plain = 0
        """The plain workers, as bits by position."""
        self._coarse: list[tuple[int, int]] = []
        self._hybrid: list[tuple[int, WorkerView]] = []
        self.steps: list[tuple[int, int]] = []
        """Steps in tokens that prefixes come in, where these are larger than a block, each with the workers, as bits by
        position, for which that holds; 0 for those whose groups have rules of their own."""
        self._alike: list[HybridWorkers] | None = None
        """Workers with rules of their own, by layout, once ``levels`` is asked."""

    def reaches(self, keys: Sequence[int], tokens: int | None = None) -> list[list[int]]:
        """Per tier of ``tiers`` and worker: blocks of the longest usable prefix from that tier and all closer ones.

        Empty where none has anything. ``tokens`` is the prompt's length, where known: its last token is always computed.
        """
        scorer = self._scorer
        views = scorer.views
        if views is not self._views or scorer.standings is not self._standings:
            self._look(views)
        rows = scorer.backend.lookup(keys, views.through_holes)
        if not rows or not views.tiers:
            return []
        size = scorer.block_size
        end = len(keys) * size
        limit = end if tokens is None else max(0, min(end, tokens - 1))
        longest = limit // size
        count = len(self.workers)
        out: list[list[int]] = []
        for level, fold in enumerate(self._folds):
            known = fold.known
            reach = [0] * count
            alive = self._plain
            start = 0
            for stop, mask in rows:
                have = known.get(mask)
                if have is None:
                    have = fold.work_out(mask)
                have &= alive
                if have != alive:
                    if start:
                        for at in bits(alive ^ have):
                            reach[at] = start
                    alive = have
                    if not alive:
                        break
                start = stop if stop < longest else longest
            if alive:
                for at in bits(alive):
                    reach[at] = start
            for at, alignment in self._coarse:
                reach[at] = reach[at] * size // alignment * alignment // size
            for at, view in self._hybrid:
                reach[at] = scorer.reach(view, rows, level, limit, end) // size
                if out and out[-1][at] > reach[at]:
                    reach[at] = out[-1][at]
            out.append(reach)
        return out

    @property
    def flat(self) -> bool:
        """Whether ``levels`` has an answer: all that is counted is trusted in full."""
        views = self._scorer.views
        if views is not self._views or self._scorer.standings is not self._standings:
            self._look(views)
        return bool(self._folds) and self.confidence is None

    def levels(self, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]] | None:
        """``reaches`` the other way round: per tier of ``tiers`` the longest usable prefixes from it and all closer ones, in
        blocks, longest first, each with the workers that have just so much, as bits by position. Those that have nothing are
        left out; ``None`` where no place has anything.

        It costs by the rows of the prompt, and by what workers with rules of their own have of it, however many workers there
        are. The roster must be ``flat``.
        """
        scorer = self._scorer
        rows = scorer.backend.lookup(keys, self._views is not None and self._views.through_holes)
        if not rows:
            return None
        size = scorer.block_size
        end = limit = len(keys) * size
        if tokens is not None and tokens - 1 < limit:
            limit = max(0, tokens - 1)
        found = [self._level(fold, rows, limit // size) for fold in self._folds]
        if self.steps:
            found = [self._in_steps(level) for level in found]
            for alike in self._hybrids():
                for level, reaches in enumerate(alike.reaches(scorer, rows, limit, end)):
                    found[level] = _together([*found[level], *reaches.items()])
        return found

    def _hybrids(self) -> list[HybridWorkers]:
        if self._alike is None:
            layouts: dict[GroupLayout, list[tuple[int, WorkerView]]] = {}
            for at, view in self._hybrid:
                layouts.setdefault(view.layout, []).append((at, view))
            self._alike = [HybridWorkers(members, len(self._folds)) for members in layouts.values()]
        return self._alike

    def _in_steps(self, level: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Workers whose blocks are larger can use whole ones of those."""
        size = self._scorer.block_size
        out: list[tuple[int, int]] = []
        for blocks, workers in level:
            for step, members in self.steps:
                found = workers & members
                if found:
                    out.append((blocks * size // step * step // size if step else 0, found))
                    workers ^= found
            if workers:
                out.append((blocks, workers))
        return _together(out)

    def _level(self, fold: RowFold, rows: Rows, longest: int) -> list[tuple[int, int]]:
        known, same = fold.known, fold.same
        out: list[tuple[int, int]] = []
        alive = self._plain & fold.counted if same else self._plain
        start = 0
        for stop, mask in rows:
            if same:
                have = mask & alive
            else:
                found = known.get(mask)
                if found is None:
                    found = fold.work_out(mask)
                have = found & alive
            if have != alive:
                if start:
                    _add(out, start, alive ^ have)
                alive = have
                if not alive:
                    break
            start = stop if stop < longest else longest
        if alive and start:
            _add(out, start, alive)
        out.reverse()
        return out

    def _look(self, views: Views) -> None:
        """Note who is where: something changed."""
        scorer = self._scorer
        size = scorer.block_size
        self._views = views
        self._standings = scorer.standings
        self.tiers = views.tiers
        position = {worker: at for at, worker in enumerate(self.workers)}
        plain = [view for view in views.plain if view.worker in position]
        self._plain = mask_of([position[view.worker] for view in plain])
        self._folds = [
            RowFold([(position[view.worker], view.levels[level]) for view in plain])
            for level in range(len(views.tiers))
        ]
        self._coarse = [
            (position[view.worker], view.layout.alignment) for view in views.coarse if view.worker in position
        ]
        self._hybrid = [(position[view.worker], view) for view in views.hybrid if view.worker in position]
        self._alike = None
        self.alignments = [size] * len(self.workers)
        for at, alignment in self._coarse:
            self.alignments[at] = alignment
        for at, _ in self._hybrid:
            self.alignments[at] = 0
        steps: dict[int, int] = {}
        for at, alignment in self._coarse:
            steps[alignment] = steps.get(alignment, 0) | 1 << at
        for at, _ in self._hybrid:
            steps[0] = steps.get(0, 0) | 1 << at
        self.steps = list(steps.items())
        standings = scorer.standings
        sure = [standings[worker].confidence if worker in standings else 0.0 for worker in self.workers]
        # Places of a stream without any trust don't count to begin with: its worker may have others that do.
        self.confidence = [value or 1.0 for value in sure] if any(0 < value < 1 for value in sure) else None


def _add(levels: list[tuple[int, int]], blocks: int, workers: int) -> None:
    """``workers`` have so many blocks, no fewer than those before them."""
    if levels and levels[-1][0] == blocks:
        levels[-1] = (blocks, levels[-1][1] | workers)
    else:
        levels.append((blocks, workers))


def _together(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Numbers of blocks with workers, most first, each number once, and without those that have nothing."""
    out: dict[int, int] = {}
    for blocks, workers in found:
        if blocks:
            out[blocks] = out.get(blocks, 0) | workers
    return [(blocks, out[blocks]) for blocks in sorted(out, reverse=True)]
