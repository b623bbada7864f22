"""A roster: the scorer's answers by position, for a router that asks about the same workers repeatedly."""

from collections.abc import Sequence

from kvyard.events.types import Tier
from kvyard.index.backend import Rows
from kvyard.index.bits import mask_of
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
        """Tiers of the levels of an answer, closest first."""
        self.trust: list[tuple[float, int]] = []
        """Workers, as bits by position, that are trusted in part, by how far."""
        self._scorer = scorer
        self._views: Views | None = None
        self._standings: object = None
        self._folds: list[RowFold] = []
        """Per level."""
        self._plain = 0
        """The plain workers, as bits by position."""
        self._hybrid: list[tuple[int, WorkerView]] = []
        self.steps: list[tuple[int, int]] = []
        """Steps in tokens that prefixes come in, where these are larger than a block, each with the workers, as bits by
        position, for which that holds; 0 for those whose groups have rules of their own."""
        self._alike: list[HybridWorkers] | None = None
        """Workers with rules of their own, by layout, once ``reaches`` is asked."""

    def reaches(self, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]]:
        """Return per tier of ``tiers`` the longest usable prefixes from that tier and all closer ones, in blocks, longest
        first, each with the workers that have exactly that, as bits by position. Workers that have nothing are left out; it is
        empty where no place has anything. ``tokens`` is the prompt's length, where known: its last token is always computed.

        It costs by the rows of the prompt, and by what workers with rules of their own have of it, however many workers there
        are.
        """
        scorer = self._scorer
        views = scorer.views
        if views is not self._views or scorer.standings is not self._standings:
            self._look(views)
        rows = scorer.backend.lookup(keys, views.through_holes)
        if not rows or not views.tiers:
            return []
        size = scorer.block_size
        end = limit = len(keys) * size
        if tokens is not None and tokens - 1 < limit:
            limit = max(0, tokens - 1)
        levels = [self._level(fold, rows, limit // size) for fold in self._folds]
        if self.steps:
            levels = [self._in_steps(level) for level in levels]
            for alike in self._hybrids():
                for level, reaches in enumerate(alike.reaches(scorer, rows, limit, end)):
                    levels[level] = _together([*levels[level], *reaches.items()])
        return levels

    def _hybrids(self) -> list[HybridWorkers]:
        if self._alike is None:
            layouts: dict[GroupLayout, list[tuple[int, WorkerView]]] = {}
            for slot, view in self._hybrid:
                layouts.setdefault(view.layout, []).append((slot, view))
            self._alike = [HybridWorkers(members, len(self._folds)) for members in layouts.values()]
        return self._alike

    def _in_steps(self, level: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Workers whose blocks are larger can use whole ones of those."""
        size = self._scorer.block_size
        out: list[tuple[int, int]] = []
        for blocks, workers in level:
            for step, members in self.steps:
                stepped = workers & members
                if stepped:
                    out.append((blocks * size // step * step // size if step else 0, stepped))
                    workers ^= stepped
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
                workers = known.get(mask)
                if workers is None:
                    workers = fold.work_out(mask)
                have = workers & alive
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
        """Take over changed holders and places."""
        scorer = self._scorer
        self._views = views
        self._standings = scorer.standings
        self.tiers = views.tiers
        position = {worker: index for index, worker in enumerate(self.workers)}
        plain = [view for view in views.plain if view.worker in position]
        self._plain = mask_of([position[view.worker] for view in plain])
        self._folds = [
            RowFold([(position[view.worker], view.levels[level]) for view in plain])
            for level in range(len(views.tiers))
        ]
        self._hybrid = [(position[view.worker], view) for view in views.hybrid if view.worker in position]
        self._alike = None
        steps: dict[int, int] = {}
        for view in views.coarse:
            if view.worker in position:
                alignment = view.layout.alignment
                steps[alignment] = steps.get(alignment, 0) | 1 << position[view.worker]
        for index, _ in self._hybrid:
            steps[0] = steps.get(0, 0) | 1 << index
        self.steps = list(steps.items())
        trust: dict[float, int] = {}
        for worker, standing in scorer.standings.items():
            # Places of a stream without any trust don't count to begin with: its worker may have others that do.
            if 0 < standing.confidence < 1 and worker in position:
                trust[standing.confidence] = trust.get(standing.confidence, 0) | 1 << position[worker]
        self.trust = list(trust.items())


def _add(levels: list[tuple[int, int]], blocks: int, workers: int) -> None:
    """Append ``workers`` with a prefix of ``blocks``, no fewer than those before them."""
    if levels and levels[-1][0] == blocks:
        levels[-1] = (blocks, levels[-1][1] | workers)
    else:
        levels.append((blocks, workers))


def _together(levels: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return numbers of blocks with workers, most first, each number once, and without those that have nothing."""
    out: dict[int, int] = {}
    for blocks, workers in levels:
        if blocks:
            out[blocks] = out.get(blocks, 0) | workers
    return [(blocks, out[blocks]) for blocks in sorted(out, reverse=True)]
