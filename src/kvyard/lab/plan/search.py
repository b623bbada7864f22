"""The search: for each shape of a worker the fewest workers that keep the SLO, the most promising shapes first.

A shape that can't be cheaper than the best fleet so far isn't replayed. One that might be is first replayed with as many
workers as the best fleet's price buys; only if those keep the SLO are fewer tried.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from math import ceil, floor

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.plan.ratios import DECODE, Ratios, slow_roles
from kvyard.lab.plan.shape import HOST, KV_DTYPES, Alone, Shape, alone, roomier
from kvyard.lab.plan.traffic import Traffic
from kvyard.lab.study.advice import AdviceOption, choose
from kvyard.lab.study.cost import Prices, cost
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Report
from kvyard.replay.report.metrics import COST
from kvyard.replay.report.slo import Limit
from kvyard.replay.settings import make_config

ROUTERS = ("least-time", "kv", "lmetric")
"""Routing policies to try; the first is the default one."""
SPARE = 1.15
"""The first fleet that is tried has this times the workers that would be busy all the time."""
SURE = 0.6
"""Fewer workers than this share of those that would be busy all the time aren't tried: they can't finish the work."""
GROW = 1.5
"""Each further try of a first fleet has this times the workers of the last."""
HELPS = 0.03
"""If the next step of workers reduces the violation by less than this share, more of them don't help."""
FINE = 0.03
"""Numbers of workers within this share of each other count as equal."""
MOST_WORKERS = 4096
CLOSE = 1.6
"""Variants are tried of shapes whose cheapest fleet costs at most this times the best one."""
MOST_VARIED = 3
"""Shapes whose variants are tried."""
ROUTED = 0.5
"""Other routers aren't tried if the default one misses the SLO by more than this share."""
UNREAD = 1e-4
"""Host memory that fewer than this share of the prompt tokens come from makes no difference."""
FROM_HOST = f"reuse_{HOST.label}"


class FleetOption(AdviceOption, kw_only=True):
    """One fleet that was replayed: its ``values`` are of the whole trace, its ``cost`` is per hour."""

    shape: Shape
    workers: int
    prefill: int = 0
    """Workers among them that only compute prompts; 0 if every worker does both."""
    router: str = ROUTERS[0]
    report: Report | None = None
    why: str = ""
    """Reason why it couldn't be replayed, or isn't a candidate."""
    max_model_len: int | None = None
    """Longest request that its cache holds, if that isn't the model's own length."""

    @property
    def met(self) -> bool:
        """True if it keeps the SLO."""
        return self.report is not None and self.violation <= 0

    @property
    def host_unread(self) -> bool:
        """True if it has host memory for nothing: what it does otherwise than the same fleet without is chance."""
        share = self.values.get(FROM_HOST)
        return self.shape.host_gib > 0 and share is not None and share < UNREAD

    @property
    def cards(self) -> int:
        """Number of cards."""
        return self.workers * self.shape.cards

    def settings(self) -> dict[str, object]:
        """Return the settings of this fleet's replay."""
        size: dict[str, object] = {"workers": self.workers}
        if self.prefill:
            size = {"prefill": self.prefill, "decode": self.workers - self.prefill}
        router = {} if self.router == ROUTERS[0] else {"router": self.router}
        length = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
        return {**self.shape.settings(), **size, **router, **length}


class Ruled(msgspec.Struct, frozen=True):
    """A shape that no number of workers makes good enough, or whose host memory isn't read, and why."""

    shape: Shape
    why: str
    floor: float = 0.0
    """Share of its limit by which the worst metric is missed at best; 0 if a worker of this shape is impossible."""


Steps = Generator[FleetOption, FleetOption, None]
"""A search of one shape: yields a fleet to replay, and receives it with its report."""


class FleetSearch(msgspec.Struct):
    """A search that is running, and what it found."""

    base: Mapping[str, object]
    traffic: Traffic
    limits: Sequence[Limit]
    prices: Mapping[str, Prices]
    replay: Callable[[Sequence[FleetOption]], None]
    """Replays fleets, and fills in their results."""
    jobs: int = 1
    split: bool = True
    """Fleets with prefill and decode workers are tried too."""
    fleets: list[FleetOption] = msgspec.field(default_factory=list)
    """All that were replayed, in order."""
    ruled_out: list[Ruled] = msgspec.field(default_factory=list)
    alone: dict[Shape, Alone] = msgspec.field(default_factory=dict)
    known_prices: dict[Shape, tuple[float, float]] = msgspec.field(default_factory=dict)
    """Prices per hour that were needed so far: of what a fleet's workers share, and of each worker."""
    waiting: int = 0
    """Searches of shapes that have not ended."""

    @property
    def best(self) -> FleetOption | None:
        """The cheapest fleet that keeps the SLO."""
        return next(iter(choose([fleet for fleet in self.candidates if fleet.met], [COST])), None)

    @property
    def candidates(self) -> list[FleetOption]:
        """Those of ``fleets`` that may be the answer: host memory that isn't read is left out."""
        return [fleet for fleet in self.fleets if not fleet.host_unread]

    def run(self, plain: Iterable[Shape]) -> None:
        """Search ``plain`` shapes, then variants of the best. A KeyboardInterrupt goes on; what was replayed is kept."""
        shapes = [shape for shape in plain if self._possible(shape)]
        shapes.sort(key=lambda shape: self.least(shape) * self.price(shape))
        self._drive([self.fewest(shape) for shape in shapes])
        if self.best is None:
            self._drive([self.fewest(shape) for shape in self._smaller_caches(shapes)])
        if self.best is None:
            self._drive_splits(shapes)
        leading = self._leading()
        self._drive_splits([*leading, *filter(self._interrupted_by_prompts, shapes)])
        best = self.best
        if best is not None and best.prefill:
            self._drive_splits(self._smaller_caches([_plain(best.shape)]))
        for shape in leading:
            routers = ROUTERS[1:] if self._routing_may_do(shape) else ()
            steps = [self.fewest(shape, router) for router in routers]
            self._drive(steps + [self.fewest_roomier(ladder) for ladder in roomier(shape, self.base)])
        # A smaller cache costs nothing, and may be what a shape lacked that missed the SLO.
        tried = {fleet.shape for fleet in self.fleets if not fleet.prefill}
        smaller = [shape for shape in self._smaller_caches(shapes) if shape not in tried]
        self._drive([self.fewest(shape) for shape in smaller if _plain(shape) not in leading])

    def price(self, shape: Shape, workers: int = 1) -> float:
        """Return the price of a fleet per hour, with all memory and storage that was asked for."""
        shared, each = self._prices(shape)
        return shared + workers * each

    def _prices(self, shape: Shape) -> tuple[float, float]:
        """Return the prices per hour of what workers share, and of each worker."""
        if shape not in self.known_prices:
            one, two = (
                cost(settings, make_config(settings), self.prices[shape.gpu])
                for settings in ({**self.base, **shape.settings(), "workers": workers} for workers in (1, 2))
            )
            self.known_prices[shape] = (2 * one - two, two - one)
        return self.known_prices[shape]

    def least(self, shape: Shape) -> float:
        """Return the number of workers that would be busy all the time."""
        seconds = self.traffic.seconds
        return self.alone[shape].busy_s / seconds if seconds else 1.0

    def _too_few(self, shape: Shape) -> int:
        """Return a number of workers that surely can't finish the work."""
        return max(0, floor(self.least(shape) * SURE) - 1)

    def fewest(self, shape: Shape, router: str = ROUTERS[0]) -> Steps:
        """Find the fewest workers of ``shape`` that keep the SLO, if they may be cheaper than the best fleet so far."""
        low = self._too_few(shape)
        high = self.affordable(shape)
        if high is not None and high <= low:
            return
        first = max(1, ceil(self.least(shape) * SPARE))
        workers = first if high is None else high
        missed: FleetOption | None = None
        while True:
            fleet = yield self.fleet(shape, workers, router=router)
            if fleet.report is None:
                return
            if fleet.met:
                high = workers
                break
            if high is not None and workers >= high:
                return
            if missed is not None and fleet.violation > missed.violation * (1 - HELPS):
                return
            low, missed = workers, fleet
            workers = max(workers + 1, ceil(workers * GROW))
            if workers > MOST_WORKERS:
                return
        while high - low > max(1, floor(high * FINE)):
            middle = (low + high) // 2
            if missed is None and low < first < high:
                middle = first  # after a try at the highest price, the estimate is the best guess
                missed = fleet
            fleet = yield self.fleet(shape, middle, router=router)
            if fleet.met:
                high = middle
            else:
                low = middle

    def fewest_roomier(self, ladder: Sequence[Shape]) -> Steps:
        """Find the fewest workers of shapes that have more and more host memory, and with these the least memory."""
        ladder = [shape for shape in ladder if shape in self.alone or self._possible(shape)]
        if not ladder:
            return
        workers = self.affordable(ladder[0])
        while workers is not None and workers > self._too_few(ladder[0]):
            rungs = [shape for shape in ladder if (self.affordable(shape) or 0) >= workers]
            low, high = -1, len(rungs)
            while high - low > 1:
                middle = len(rungs) - 1 if high == len(rungs) else (low + high) // 2
                fleet = self._known(rungs[middle], workers) or (yield self.fleet(rungs[middle], workers))
                if fleet.host_unread:  # the same without host memory decides
                    fleet = self._known(rungs[0], workers) or (yield self.fleet(rungs[0], workers))
                if fleet.met and not fleet.host_unread:
                    high = rungs.index(fleet.shape)
                elif high == len(rungs):
                    return  # not even with the most memory that is affordable
                else:
                    low = middle
            workers = min(workers - 1, self.affordable(ladder[0]) or 0)

    def fewest_split(self, shape: Shape) -> Steps:
        """Find the fewest workers of ``shape`` with prompts and answers on different ones."""
        ratios = Ratios.estimated(self.alone[shape])
        low = max(1, self._too_few(shape))
        high = self.affordable(shape)
        first = max(2, low + 1, ceil(self.least(shape) * SPARE))
        workers = first if high is None else high
        missed: FleetOption | None = None
        while low < workers <= MOST_WORKERS:
            fleet = yield from self._best_ratio(shape, workers, ratios)
            if fleet is not None and fleet.report is None:
                return
            if fleet is not None and fleet.met:
                high = workers
            elif high is None:
                if fleet is not None:
                    if missed is not None and fleet.violation > missed.violation * (1 - HELPS):
                        return
                    missed = fleet
                low, workers = workers, max(workers + 1, ceil(workers * GROW))
                continue
            elif workers >= high:
                return  # not even with as many as are affordable
            else:
                low = workers
            low = max(low, ratios.fewest - 1)
            if high - low <= max(1, floor(high * FINE)):
                return
            workers = first if low < first < high else (low + high) // 2

    def _best_ratio(
        self, shape: Shape, workers: int, ratios: Ratios
    ) -> Generator[FleetOption, FleetOption, FleetOption | None]:
        """Try ratios of ``workers`` until one keeps the SLO, or more of one role aren't what it lacks; returns the last one, or
        ``None`` if all are known to miss it.
        """
        fleet = None
        while (prefill := ratios.choose(workers)) is not None:
            fleet = yield self.fleet(shape, workers, prefill)
            if fleet.report is None or fleet.met or not ratios.learn(fleet, slow_roles(fleet, self.limits)):
                return fleet
        return fleet

    def fleet(self, shape: Shape, workers: int, prefill: int = 0, router: str = ROUTERS[0]) -> FleetOption:
        """Return a fleet before its replay."""
        how = f"{prefill} prefill and {workers - prefill} decode workers" if prefill else f"{workers} workers"
        if workers == 1:
            how = "1 worker"
        name = f"{how}, {shape}" + (f", {router}" if router != ROUTERS[0] else "")
        fleet = FleetOption(
            name, {}, self.price(shape, workers), shape=shape, workers=workers, prefill=prefill, router=router
        )
        if shape in self.alone:
            fleet.max_model_len = self.alone[shape].max_model_len
        return fleet

    def _known(self, shape: Shape, workers: int) -> FleetOption | None:
        """Return the fleet if it was replayed already, with the default router."""
        for fleet in self.fleets:
            if (fleet.shape, fleet.workers, fleet.prefill, fleet.router) == (shape, workers, 0, ROUTERS[0]):
                return fleet
        return None

    def affordable(self, shape: Shape) -> int | None:
        """Return the number of workers of ``shape`` that cost less than the best fleet so far; ``None`` without one."""
        best = self.best
        if best is None:
            return None
        shared, each = self._prices(shape)
        return ceil((float(best.cost) - shared) / each - 1e-9) - 1

    def _possible(self, shape: Shape) -> bool:
        """Look at a worker of ``shape`` alone, and rule the shape out if it can't keep the SLO even so."""
        itl = min((limit.value for limit in self.limits if limit.name.startswith(("itl_", "tpot_"))), default=None)
        try:
            idle = self.alone[shape] = alone(shape, self.base, self.traffic, itl)
        except KvyardError as error:
            self.ruled_out.append(Ruled(shape, str(error)))
            return False
        for limit in self.limits:
            least = idle.floor(limit)
            if least is not None and limit.violation(least) > 0:
                why = f"{limit.name} is at least {least:,.0f} ms on a worker that does nothing else"
                self.ruled_out.append(Ruled(shape, why, limit.violation(least)))
                return False
        return True

    def _leave_out(self, fleets: Iterable[FleetOption]) -> None:
        """Note which of ``fleets`` have host memory that isn't read."""
        for fleet in fleets:
            if fleet.host_unread:
                size = f"{fleet.workers} worker{'s' if fleet.workers > 1 else ''}"
                fleet.why = f"in the replay of {size}, under {UNREAD:.2%} of the prompt tokens come from host memory"
                self.ruled_out.append(Ruled(fleet.shape, fleet.why))

    def _smaller_caches(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Return the shapes with an 8-bit KV cache, as far as its type is open and they can keep the SLO."""
        if self.base.get("kv_cache_dtype") is not None:
            return []
        found = [msgspec.structs.replace(shape, kv_cache_dtype=KV_DTYPES[-1]) for shape in shapes]
        return [shape for shape in found if shape in self.alone or self._possible(shape)]

    def _leading(self) -> list[Shape]:
        """Return the plain shapes with the cheapest fleets, whose variants are worth a try."""
        best = self.best
        if best is None:
            return []
        cheapest: dict[Shape, float] = {}
        for fleet in self.fleets:
            if fleet.met and not fleet.shape.host_gib:
                shape = _plain(fleet.shape)
                cheapest[shape] = min(fleet.cost, cheapest.get(shape, fleet.cost))
        close = [shape for shape, cost in cheapest.items() if cost <= best.cost * CLOSE]
        return sorted(close, key=lambda shape: cheapest[shape])[:MOST_VARIED]

    def _routing_may_do(self, shape: Shape) -> bool:
        """True if a better router may be all that the workers of ``shape`` lack that are affordable."""
        high = self.affordable(shape)
        if self.base.get("router") is not None or high is None or high < 2:
            return False
        whole = [fleet for fleet in self.fleets if fleet.shape == shape and not fleet.prefill]
        return max((fleet.violation for fleet in whole if fleet.workers >= high), default=0.0) <= ROUTED

    def _interrupted_by_prompts(self, shape: Shape) -> bool:
        """True if a fleet of ``shape`` missed nothing but limits between tokens: workers without prompts may keep those."""
        roles = [slow_roles(fleet, self.limits) for fleet in self.fleets if fleet.shape == shape and not fleet.prefill]
        return {DECODE} in roles

    def _drive_splits(self, shapes: Iterable[Shape]) -> None:
        """Search fleets with prefill and decode workers of those ``shapes`` that weren't searched for them before."""
        tried = {fleet.shape for fleet in self.fleets if fleet.prefill}
        wanted = [shape for shape in dict.fromkeys(shapes) if self.split and shape not in tried]
        self._drive([self.fewest_split(shape) for shape in wanted])

    def _drive(self, searches: Sequence[Steps]) -> None:
        """Run searches, as many at a time as there are jobs, each in the order in which they were given."""
        waiting = list(searches)
        running: list[tuple[Steps, FleetOption]] = []
        while waiting or running:
            self.waiting = len(waiting) + len(running)
            while waiting and len(running) < self.jobs:
                steps = waiting.pop(0)
                wanted = next(steps, None)
                if wanted is not None:
                    running.append((steps, wanted))
            fleets = [wanted for _, wanted in running]
            if fleets:
                self.replay(fleets)
                self.fleets += fleets
                self._leave_out(fleets)
            going: list[tuple[Steps, FleetOption]] = []
            for steps, done in running:
                try:
                    going.append((steps, steps.send(done)))
                except StopIteration:
                    continue
            running = going


def _plain(shape: Shape) -> Shape:
    return msgspec.structs.replace(shape, kv_cache_dtype="auto", host_gib=0)


def fleet_config(base: Mapping[str, object], fleet: FleetOption) -> ReplayConfig:
    """Return the configuration of a fleet's replay. Raises ``KvyardError``."""
    return make_config({**base, **fleet.settings()})
