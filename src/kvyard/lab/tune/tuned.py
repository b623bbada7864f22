"""What came of a search: all points, the best of them or the front, and the one that is the answer."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvyard.files import write_whole
from kvyard.lab.tune.cost import Prices
from kvyard.lab.tune.goals import Goal, Limit
from kvyard.lab.tune.look import Look
from kvyard.lab.tune.parts import TraceParts
from kvyard.lab.tune.space import Space


class Tuned(msgspec.Struct):
    """What came of a search so far."""

    trace: str
    folder: Path
    base: dict[str, object]
    """Settings that aren't searched."""
    space: Space
    goals: list[Goal]
    limits: list[Limit]
    prices: Prices
    parts: TraceParts
    seed: int
    looks: list[Look] = msgspec.field(default_factory=list)
    """All points, in the order in which they were asked for."""
    importance: dict[str, float] = msgspec.field(default_factory=dict)
    """Of settings: shares of 1."""
    found: int = 0
    """Points that were there from an earlier run."""
    interrupted: bool = False

    @property
    def met(self) -> bool:
        """Whether a point keeps all limits."""
        return any(one.met for one in self.looks)

    @property
    def replayed(self) -> int:
        """Points that needed a replay."""
        return sum(one.config is not None and one.state != "skipped" for one in _first_of_each(self.looks))

    @property
    def idle(self) -> int:
        """How many of the latest points needed no replay."""
        seen = {one.number for one in _first_of_each(self.looks) if one.config is not None and one.state != "skipped"}
        return len(self.looks) - max((at for at, one in enumerate(self.looks, 1) if one.number in seen), default=0)

    @property
    def exhausted(self) -> bool:
        """Whether every point there is was looked at."""
        size = self.space.size
        return size is not None and len(_first_of_each(self.looks)) >= size

    @property
    def best(self) -> list[Look]:
        """With one goal the best point, with several the front: none is better in all of them. Where no point keeps the
        limits, the one that comes closest. Empty where nothing was replayed.
        """
        done = [one for one in _first_of_each(self.looks) if one.state == "done"]
        if not self.met:
            return [min(done, key=lambda one: (one.violation, one.number))] if done else []
        kept = [one for one in done if one.met]
        if len(self.goals) == 1:
            return [
                min(
                    kept,
                    key=lambda one: (one.losses(self.goals), one.cost, one.figures.get("ttft_mean", 0.0), one.number),
                )
            ]
        losses = {one.number: one.losses(self.goals) for one in kept}
        front = [one for one in kept if not any(_better(losses[two], losses[one.number]) for two in losses)]
        return sorted(front, key=lambda one: losses[one.number])

    @property
    def answer(self) -> Look | None:
        """The one point that is written as settings: the best, or of a front the one nearest to the best of each goal."""
        best = self.best
        if len(best) < 2:
            return best[0] if best else None
        ends = [(min(column), max(column)) for column in zip(*(one.losses(self.goals) for one in best), strict=True)]

        def distance(one: Look) -> float:
            own = one.losses(self.goals)
            return sum(
                ((value - low) / (high - low)) ** 2 if high > low else 0.0 for value, (low, high) in zip(own, ends)
            )

        return min(best, key=lambda one: (distance(one), one.number))

    def settings(self, look: Look) -> dict[str, object]:
        """All settings of a point."""
        return {**self.base, **look.point}

    def show(self) -> None:
        """Print the answer."""
        from kvyard.lab.tune.table import print_tuned

        print_tuned(self)

    def save(self) -> list[Path]:
        """Write ``tune.csv``, ``tune.json``, ``tune.html`` and ``tune.toml``, the last two where there is an answer; returns
        where. Raises ``KvyardError``.
        """
        from kvyard.lab.tune.file import as_toml
        from kvyard.lab.tune.page import page
        from kvyard.lab.tune.table import as_csv, as_json

        made: dict[str, str | bytes] = {"tune.csv": as_csv(self), "tune.json": as_json(self)}
        if self.answer is not None:
            made |= {"tune.html": page(self), "tune.toml": as_toml(self)}
        for name in ("tune.html", "tune.toml"):
            if name not in made:  # an earlier search's answer isn't this one's
                (self.folder / name).unlink(missing_ok=True)
        for name, text in made.items():
            write_whole(self.folder / name, text)
        return [self.folder / name for name in made]


def _first_of_each(looks: Sequence[Look]) -> list[Look]:
    """Without points that were asked for again."""
    found: dict[str, Look] = {}
    for look in looks:
        found.setdefault(look.name, look)
    return list(found.values())


def _better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is better than ``other`` by some goal, and worse by none."""
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
