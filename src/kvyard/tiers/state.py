"""Shared state of one worker's offload engine: its tiers, its counters, and a record per request."""

from collections import deque
from enum import Enum
from typing import NamedTuple

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import Use
from kvyard.tiers.config import OffloadConfig
from kvyard.tiers.copies import Copy, LinkedTier
from kvyard.tiers.copy_totals import CopyTotals
from kvyard.tiers.counters import OffloadCounters, TierCounters
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.pulls import PeerTier
from kvyard.tiers.store import TierStore, total_pages


class LoadStep(Enum):
    """Outcome of asking the lower tiers."""

    NOTHING = "nothing"
    """They have nothing that the device lacks: go on without them."""
    STARTED = "started"
    """A load is in flight and the request has its blocks: wait until ``tick`` returns it."""
    WAITING = "waiting"
    """Its pages are in flight to a closer tier: look it up and ask again when something has landed."""
    NO_ROOM = "no room"
    """The device has no room for the load: the same as a failed allocation."""


class LoadAnswer(NamedTuple):
    """The answer of ``onboard``."""

    step: LoadStep
    tokens: int = 0
    """Started: how many tokens the load brings, after the hit."""
    by_tier: tuple[int, ...] = ()
    """Started: the same by the tier that had them, closest to the device first."""
    deadline: int | None = None
    """Started, waiting: when the next copy lands, as things stand."""
    pulled: int = 0
    """Started: how many of the tokens came from another worker."""
    left: int = 0
    """Nothing, started: how many more tokens lower tiers have, which the load policy leaves there."""


NOTHING = LoadAnswer(LoadStep.NOTHING)
NO_ROOM = LoadAnswer(LoadStep.NO_ROOM)


class RequestState:
    """State of a request in the offload engine."""

    __slots__ = (
        "answer",
        "asked",
        "due",
        "fetch",
        "fetched",
        "keep",
        "left",
        "load",
        "pull_refused",
        "pulled",
        "stored",
        "tail",
        "used",
        "why",
    )

    def __init__(self, num_groups: int, num_tiers: int) -> None:
        self.stored = [0] * num_groups
        """Pages per group that have been offered to the first tier."""
        self.tail: Extent | None = None
        """End of the pages that were offered last in the first tier, if they were all of one group."""
        self.used = [0] * num_groups
        """Pages per group that were reported to the policy."""
        self.due = 0
        """The number of computed tokens at which there is something to offer again."""
        self.fetch: Copy | None = None
        """Copy in flight from one lower tier to a closer one for this request."""
        self.fetched = [0] * num_tiers
        """Per tier, how many tokens of the coming load had to be fetched from it or from one below it."""
        self.keep: list[tuple[TierStore, BlockTable]] = []
        """Pages kept for this request in lower tiers while the rest is fetched."""
        self.load: Copy | None = None
        self.pulled = 0
        """Tokens of the coming load that another worker had."""
        self.pull_refused = False
        """True if it went without a pull, which is counted once."""
        self.left = 0
        """Tokens that the load policy leaves in lower tiers, as of the last answer,"""
        self.why = ""
        """and for what reason."""
        self.asked: object = None
        """State that the latest answer depended on."""
        self.answer: LoadAnswer | None = None


class OffloadState:
    """One worker's side of its tiers."""

    def __init__(self, name: str, config: OffloadConfig, layout: PageLayout, tiers: list[LinkedTier]) -> None:
        self.name = name
        self.config = config
        self.layout = layout
        self.tiers = tiers
        """Below the device, closest first."""
        self.first = tiers[0].store
        """The store that the device's blocks are copied to and loaded from."""
        self.counters = OffloadCounters([TierCounters() for _ in tiers])
        self._stores: list[CopyTotals] = [counted.stores for counted in self.counters.tiers]
        self._loads: list[CopyTotals] = [counted.loads for counted in self.counters.tiers]
        self.inbox: deque[Copy] = deque()
        """Copies that have landed and wait for this worker to do its side of it."""
        self.requests: dict[Request, RequestState] = {}
        self.peers: PeerTier | None = None
        """The other workers, if it may pull from them."""
        self.pull_landings = 0
        """Pulls that have ended here."""
        self._learns = any(tier.store.pool.learner is not None for tier in tiers)

    def use_of(self, request: Request) -> Use | None:
        """Return the use of ``request`` for tiers; ``None`` if no eviction policy learns and no tenant is charged."""
        if self._learns or request.facts.tenant:
            return Use(request.id, request.num_tokens, request.facts)
        return None

    def of(self, request: Request) -> RequestState:
        """Return the record of ``request``, made if need be."""
        state = self.requests.get(request)
        if state is None:
            state = self.requests[request] = RequestState(self.layout.num_groups, len(self.tiers))
        return state

    def send(self, now: int, copy: Copy, blocks: int | None = None) -> None:
        """Submit ``copy``, of all its pages' blocks or of ``blocks``."""
        self.measure(copy, blocks)
        self._totals(copy).submitted += 1
        tier = self.tiers[copy.level]
        if copy.inward and tier.shared:
            self.counters.cross_worker_blocks += tier.foreign(copy) * self.layout.chunk
        tier.submit(now, copy)

    def measure(self, copy: Copy, blocks: int | None = None) -> None:
        """Set the size of ``copy``: all its pages' blocks, or ``blocks``."""
        layout = self.layout
        copy.blocks = total_pages(copy.pieces) * layout.chunk if blocks is None else blocks
        copy.nbytes = copy.blocks * layout.block_bytes

    def in_flight(self, level: int) -> list[Copy]:
        """This worker's copies on the link of tier ``level`` that have not been delivered."""
        copies = [copy for copy in self.tiers[level].in_flight.values() if copy.inbox is self.inbox]
        return copies + [copy for copy in self.inbox if copy.level == level]

    @property
    def landings(self) -> int:
        """Changes when anything lands in a tier of this worker, its own or another's."""
        landings = self.pull_landings
        for tier in self.tiers:
            landings += tier.landings
        return landings

    def count(self, copy: Copy) -> None:
        """Count ``copy``, which has landed."""
        totals = self._totals(copy)
        totals.landed += 1
        totals.blocks += copy.blocks
        totals.bytes += copy.nbytes
        totals.queued_ns += copy.queued

    def _totals(self, copy: Copy) -> CopyTotals:
        return self._loads[copy.level] if copy.inward else self._stores[copy.level]
