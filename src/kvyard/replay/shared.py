"""Tiers that a fleet's workers share: one time line, announced once, credited to all of them."""

from collections.abc import Collection, Iterable

from kvyard.engine.config import EngineConfig
from kvyard.engine.together import begin_together
from kvyard.events.tier import LOWER_TIERS
from kvyard.index import Holder
from kvyard.index.runs import RunFeed, RunIndexer
from kvyard.replay.config import ReplayConfig
from kvyard.replay.worker import Worker
from kvyard.tiers.timeline import Timeline

POOL = Holder("shared", 0, True)
"""Holder of shared tiers."""


class SharedTiers:
    """The fleet's time line, if any of its tiers is shared."""

    def __init__(self, config: ReplayConfig, indexer: RunIndexer | None) -> None:
        engines = [kind.engine for kind in config.workers if kind.engine.tiers is not None and kind.engine.tiers.shared]
        self.active = bool(engines)
        self._indexer = indexer
        self._feed: RunFeed | None = None
        if not engines:
            return
        if indexer is not None:
            self._feed = indexer.attach(POOL, engines[0].specs, LOWER_TIERS[: config.depth])
        self._timeline = Timeline(self._feed)

    def timeline(self, engine: EngineConfig) -> Timeline | None:
        """Return the time line for an engine that shares tiers, ``None`` for one that doesn't."""
        return self._timeline if engine.tiers is not None and engine.tiers.shared else None

    def credit(self, members: Iterable[Holder]) -> None:
        """Let the index credit what is shared to each of ``members``."""
        if self.active and self._indexer is not None:
            self._indexer.share(POOL.name, members)

    def due(self) -> int | None:
        """Return the next landing in a tier of any worker that shares one."""
        return self._timeline.earliest()

    def begin(self, now: int, due: Collection[int], workers: Iterable[Worker]) -> None:
        """Let the workers begin that are ``due`` at ``now``, and all others plan no further than is certain then."""
        engines = {worker.number: worker.engine for worker in workers if worker.alive}
        begin_together(engines, due, now, self._timeline)
        self.settle(now)

    def land(self, now: int) -> None:
        """Let all workers see what has landed by ``now``, each copy from its own instant on."""
        timeline = self._timeline
        while (time := timeline.earliest()) is not None and time <= now:
            timeline.advance(time)
            self.settle(time)
        timeline.advance(now)
        self.settle(now)

    def settle(self, now: int) -> None:
        """Let the index see what has changed by ``now``."""
        if self._feed is not None:
            self._feed.end_iteration(now)
