"""Workers of hybrid models, scored for a router many at a time."""

from collections.abc import Sequence

from kvyard.index.backend import Rows
from kvyard.index.scorer import Scorer
from kvyard.index.views import RowFold, WorkerView


class HybridWorkers:
    """Workers of one layout. What one of them can use of a prompt follows from the rows that each of its groups has: so it is
    worked out once for all that have the same ones.
    """

    def __init__(self, members: Sequence[tuple[int, WorkerView]], levels: int) -> None:
        """``members`` have positions; ``levels`` is the number of levels, each a tier and all closer ones."""
        self._views = dict(members)
        self.all = 0
        """Their positions, as bits."""
        for position, _ in members:
            self.all |= 1 << position
        self._able: list[int] = []
        """Per level those that have places for each of their groups: others can use nothing."""
        self._folds: list[list[RowFold]] = []
        """Per level and group."""
        groups = range(len(members[0][1].layout.groups))
        for level in range(levels):
            able = 0
            for position, view in members:
                if all(view.levels[level]):
                    able |= 1 << position
            self._able.append(able)
            self._folds.append(
                [RowFold([(position, (view.levels[level][group],)) for position, view in members]) for group in groups]
            )

    def reaches(self, scorer: Scorer, rows: Rows, limit: int, end: int) -> list[dict[int, int]]:
        """Return, per level, the workers (as bits) by the length of their longest usable prefix in the index's blocks; see
        ``Scorer.reach``.
        """
        size = scorer.block_size
        out: list[dict[int, int]] = []
        before = {0: self.all}
        for level, folds in enumerate(self._folds):
            by_reach: dict[int, int] = {}
            for least, members in before.items():
                for part in self._split(folds, rows, members & self._able[level]):
                    view = self._views[(part & -part).bit_length() - 1]
                    reach = max(least, scorer.reach(view, rows, level, limit, end) // size)
                    by_reach[reach] = by_reach.get(reach, 0) | part
                unable = members & ~self._able[level]
                if unable:
                    by_reach[least] = by_reach.get(least, 0) | unable
            out.append(by_reach)
            before = by_reach
        return out

    def _split(self, folds: Sequence[RowFold], rows: Rows, members: int) -> list[int]:
        """Return ``members`` by which of the rows they have in which group."""
        parts = [members] if members else []
        for fold in folds:
            for _, row in rows:
                have = fold.known.get(row)
                if have is None:
                    have = fold.work_out(row)
                if not have & members:
                    continue
                finer: list[int] = []
                for part in parts:
                    inside = part & have
                    if inside:
                        finer.append(inside)
                    if inside != part:
                        finer.append(part ^ inside)
                parts = finer
        return parts
