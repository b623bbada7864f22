"""A figure of a policy's own for each worker, such as what it was sent, and workers in the order of it."""

from collections.abc import Iterator

from kvyard.router.ranking import Ranking, as_bytes, is_in


class Tally:
    """Figures by slot, 0 for one that has none. In a large fleet they are kept in order (``rank``)."""

    def __init__(self) -> None:
        self._figures: dict[int, float] = {}
        self._ranking: Ranking | None = None

    def of(self, slot: int) -> float:
        """The figure of a worker."""
        return self._figures.get(slot, 0.0)

    def add(self, slot: int, more: float) -> None:
        """A worker's figure is so much higher from now on."""
        figure = self._figures.get(slot, 0.0) + more
        self._figures[slot] = figure
        if self._ranking is not None:
            self._ranking.put(slot, 0, figure)

    def forget(self, slot: int) -> None:
        """The worker is gone, and another one that gets its number begins with 0; ``rank`` is called before that is asked."""
        self._figures.pop(slot, None)

    def rank(self, slots: int) -> None:
        """Keep so many workers in order from now on."""
        if self._ranking is None:
            self._ranking = Ranking()
        for slot in range(slots):
            self._ranking.put(slot, 0, self.of(slot))

    def least(self, among: int) -> tuple[float, int]:
        """The least figure of the set ``among``, which isn't empty, and the slots, as bits, that have it."""
        assert self._ranking is not None
        _, figure, slots = self._ranking.least(among)
        return figure, slots

    def in_order(self, among: int) -> Iterator[tuple[float, int, int]]:
        """The set ``among`` by figures, least first: each figure with the slot that has it and 0, or with -1 and the slots, as
        bits, of which there may be several.
        """
        assert self._ranking is not None
        row = as_bytes(among)
        for number in self._ranking.order:
            shelf = self._ranking.shelves[number]
            for figure, lone in zip(shelf.figures, shelf.lones):
                if lone >= 0:
                    if is_in(row, lone):
                        yield figure, lone, 0
                else:
                    slots = shelf.many(figure) & among
                    if slots:
                        yield figure, -1, slots
