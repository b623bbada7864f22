"""A worker's site: what the two halves of its offload engine share. Depots, counters, and a record per request."""

from __future__ import annotations

from collections import deque

from kvyard.blocks import Request
from kvyard.blocks.limits import ENDLESS
from kvyard.blocks.table import Table
from kvyard.tiers.config import OffloadConfig
from kvyard.tiers.counters import Flow, OffloadCounters
from kvyard.tiers.depot import Copy, Depot, Kind
from kvyard.tiers.layout import Layout
from kvyard.tiers.outcome import Outcome
from kvyard.tiers.piece import total_pages


class Track:
    """What the engine remembers of a request."""

    __slots__ = ("answer", "asked", "due", "fetch", "keep", "load", "storage_tokens", "stored", "used")

    def __init__(self, num_groups: int) -> None:
        self.stored = [0] * num_groups
        """Pages per group that have been offered to the host."""
        self.used = [0] * num_groups
        """Pages per group that the policy was told of."""
        self.due = 0
        """The number of computed tokens at which there is something to offer again."""
        self.fetch: Copy | None = None
        """On its way from storage for this request."""
        self.keep: list[Table] = []
        """Pages of the host kept for this request while the rest is fetched."""
        self.load: Copy | None = None
        self.storage_tokens = 0
        """How many tokens of the coming load had to be fetched from storage."""
        self.asked: object = None
        """What the last answer depended on."""
        self.answer: Outcome | None = None

    def rest(self) -> None:
        """There is nothing to offer any more."""
        self.due = ENDLESS


class Site:
    """One worker's side of its tiers."""

    def __init__(self, name: str, config: OffloadConfig, layout: Layout, host: Depot, storage: Depot | None) -> None:
        self.name = name
        self.config = config
        self.layout = layout
        self.host = host
        self.storage = storage
        self.counters = OffloadCounters()
        self.inbox: deque[Copy] = deque()
        """Copies that have landed and wait for this worker to do its side of it."""
        self.tracks: dict[Request, Track] = {}
        counters = self.counters
        self.flows: tuple[Flow, ...] = (counters.stores, counters.loads, counters.spills, counters.fetches)
        """By ``Kind``."""

    def track(self, request: Request) -> Track:
        """The record of ``request``, made if need be."""
        track = self.tracks.get(request)
        if track is None:
            track = self.tracks[request] = Track(self.layout.num_groups)
        return track

    def send(self, now: int, copy: Copy, blocks: int | None = None) -> None:
        """Submit ``copy``, of all its pages' blocks or of ``blocks``."""
        layout, kind = self.layout, copy.kind
        copy.blocks = total_pages(copy.pieces) * layout.chunk if blocks is None else blocks
        copy.nbytes = copy.blocks * layout.block_bytes
        self.flows[kind].submitted += 1
        depot = self.depot_of(kind)
        if depot.origins is not None and (kind is Kind.LOAD or kind is Kind.FETCH):
            self.counters.cross_worker_blocks += depot.foreign(copy) * layout.chunk
        depot.submit(now, copy)

    def depot_of(self, kind: Kind) -> Depot:
        """The tier whose link copies of ``kind`` take."""
        if kind is Kind.STORE or kind is Kind.LOAD:
            return self.host
        assert self.storage is not None
        return self.storage

    @property
    def landings(self) -> int:
        """Changes when anything lands in a tier of this worker, its own or another's."""
        return self.host.landings + (self.storage.landings if self.storage is not None else 0)

    def count(self, copy: Copy) -> None:
        """``copy`` has landed."""
        flow = self.flows[copy.kind]
        flow.landed += 1
        flow.blocks += copy.blocks
        flow.bytes += copy.nbytes
        flow.queued_ns += copy.queued
