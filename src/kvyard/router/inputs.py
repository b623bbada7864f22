"""The input of a routing policy."""

from collections.abc import Sequence
from random import Random

from kvyard.clock import MS
from kvyard.index.bits import bits
from kvyard.router.active import ActiveLoads
from kvyard.router.matches import CachedPrefixes, Match, longest_of, matches_of
from kvyard.router.pace import Pace
from kvyard.router.ranking import Levels, lowest, most, nth_slot, of_slot
from kvyard.router.request import Choice, Prompt
from kvyard.router.search import Bound, Cost, Search
from kvyard.router.worker import WorkerLoad


class RoutingInput:
    """One request to route: the workers that may be chosen, their load, and the prefix that each has cached."""

    __slots__ = (
        "_matches",
        "_shared",
        "_splits_shared",
        "blocks",
        "eligible",
        "loads",
        "now",
        "num_tokens",
        "prefixes",
        "request",
        "rng",
        "speeds",
        "workers",
    )

    def __init__(
        self,
        request: Prompt,
        now: int,
        workers: Sequence[WorkerLoad],
        eligible: int,
        loads: ActiveLoads,
        prefixes: CachedPrefixes | None,
        shared: Levels,
        rng: Random,
        speeds: Sequence[tuple[Pace, int]] = (),
        splits_shared: bool = False,
    ) -> None:
        self.request = request
        """The request itself, as a ``RouteRequest`` has it; not to be kept."""
        self.num_tokens = request.num_tokens
        """Tokens of its prompt."""
        self.blocks = len(request.keys)
        """Full blocks of the prompt."""
        self.now = now
        """Nanoseconds."""
        self.workers = workers
        """Workers that may be chosen, by slot; at least one."""
        self.eligible = eligible
        """Their slots, as bits."""
        self.rng = rng
        """The router's seeded generator: all chance comes from here."""
        self.loads = loads
        """Everyone's books, including workers that may not be chosen."""
        self.prefixes = prefixes
        """Contents of caches; ``None`` if no worker has any of the prompt. Policies read ``matches``."""
        self._shared = shared
        self.speeds = speeds
        """Every pace with the slots, as bits, of the workers that have it; for policies with ``needs_pace``."""
        self._splits_shared = splits_shared
        self._matches: list[Match] | None = None

    @property
    def matches(self) -> list[Match]:
        """All workers that may be chosen, grouped by cached prefix."""
        if self._matches is None:
            shared = self._shared if self._splits_shared else []
            self._matches = matches_of(
                self.prefixes, self.eligible, self.num_tokens, self.loads.block_size, shared, self.speeds
            )
        return self._matches

    @property
    def longest_matches(self) -> list[Match]:
        """Return the ``matches`` with the most cached tokens."""
        return longest_of(self.matches)

    @property
    def mean_requests(self) -> float:
        """Mean number of requests in flight, over the workers that may be chosen."""
        requests = len(self.loads.active) - sum([worker.requests for worker in self.closed()])
        return requests / len(self.workers)

    def match_of(self, slot: int) -> Match:
        """Return the match of one worker that may be chosen."""
        return next(match for match in self.matches if match.slots >> slot & 1)

    def workers_of(self, matches: Sequence[Match]) -> list[WorkerLoad]:
        """Return the workers of some matches."""
        workers = self.loads.workers
        return [workers[slot] for match in matches for slot in bits(match.slots)]

    def closed(self) -> list[WorkerLoad]:
        """Return workers that may not be chosen: excluded, draining or gone."""
        workers = self.loads.workers
        if len(self.workers) == len(workers):
            return []
        return [workers[slot] for slot in bits(((1 << len(workers)) - 1) ^ self.eligible)]

    def tiers(self, slot: int) -> tuple[int, ...]:
        """Return cached blocks of the prompt at a worker, by tier; empty where no worker has any."""
        return self.prefixes.of(slot) if self.prefixes is not None else ()

    def longest_prefix(self) -> tuple[int, int]:
        """Return the most cached blocks of the prompt, all tiers together, that any worker has which may be chosen, and the
        slots of those, as bits.
        """
        return self.prefixes.longest(self.eligible) if self.prefixes is not None else (0, 0)

    def shared_blocks(self, slot: int) -> int:
        """Return blocks of the prompt that requests in flight hold at a worker."""
        return of_slot(self._shared, slot)

    @property
    def most_shared_blocks(self) -> int:
        """The most that these are at any worker that may be chosen."""
        return most(self._shared, self.eligible)[0]

    def mean_age_ms(self, worker: WorkerLoad) -> float:
        """Return mean milliseconds that the requests in flight on a worker have been there."""
        return self.loads.mean_age(worker, self.now) / MS

    def cheapest(
        self,
        cost: Cost,
        why: str,
        matches: Sequence[Match] | None = None,
        bound: Bound | None = None,
        same_rank_same_cost: bool = False,
    ) -> Choice:
        """Return the worker of least cost, of all or of some ``matches``; of equals each has the same chance. ``bound`` and
        ``same_rank_same_cost`` are a policy's, if it has a rank.
        """
        search = Search(self.loads, cost, bound, same_rank_same_cost)
        search.look(self.matches if matches is None else matches)
        return self.draw(search.tied, search.best, why)

    def least(self, cost: Cost, matches: Sequence[Match] | None = None) -> tuple[float, int]:
        """Return the least cost, and the slots, as bits, of the workers that have it."""
        search = Search(self.loads, cost, None, False)
        search.look(self.matches if matches is None else matches)
        return search.best, search.tied

    def draw(self, slots: int, cost: float, why: str) -> Choice:
        """Return one of equally good workers, given as bits, each with the same chance."""
        count = slots.bit_count()
        if count == 1:
            return Choice(lowest(slots), cost, 1, why)
        return Choice(nth_slot(slots, _draw(count, self.rng)), cost, count, why)


def _draw(count: int, rng: Random) -> int:
    """Draw like ``rng.randrange(count)``, without the checks that it makes in Python: ties are frequent."""
    bits = count.bit_length()
    drawn = rng.getrandbits(bits)
    while drawn >= count:
        drawn = rng.getrandbits(bits)
    return drawn
