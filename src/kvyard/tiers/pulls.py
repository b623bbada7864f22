"""Pulls: a prefix that only another worker has comes over the network into this worker's first tier, and isn't computed.

To the pulling worker its peers are one more tier behind its own (``PeerTier``): it is asked last, what it has is fetched into
the first tier like anything from below, and loaded from there. So events, eviction, copies for later requests and the choice
between loading and computing are those of any tier. Its content is what one other worker has, the *source*, which is chosen
with the request's worker, by what can be seen of caches then. What the source really has is known when the pull begins.

The source's pages are held while they are read, and room is made for them before the pull begins. A source that fails takes its
pulls with it: the room is freed, and the prompt is computed.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from kvyard.blocks import Request
from kvyard.blocks.pool import Pool
from kvyard.blocks.spans import Spans
from kvyard.blocks.table import BlockTable
from kvyard.hashing import Keys
from kvyard.tiers.copies import Copy
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.network import Flow
from kvyard.tiers.store import PageRange, TierStore, hold_pages


class PullSource(NamedTuple):
    """Expected source of one request when its worker is chosen."""

    source: str
    """The worker to pull from,"""
    tokens: int
    """with this many tokens of the prompt, as far as can be seen."""


class PeerPages:
    """Another worker's pages, as seen by the worker that pulls from it: the pages of a pool."""

    def __init__(self, pool: Pool, tokens: int, gone: bool = False) -> None:
        self.pool = pool
        self.expected = tokens
        """Tokens of the prompt that it should have."""
        self._gone = gone
        """True if the worker doesn't answer any more."""

    def resident(self, group: int, keys: Keys, limit: int) -> Spans:
        """Return the intervals of a chain's first ``limit`` pages that it has."""
        return () if self._gone else self.pool.maps[group].spans(keys, min(limit, len(keys)))[0]

    def hold(self, piece: PageRange) -> BlockTable:
        """Keep ``piece``, all of it there, while it is read."""
        return hold_pages(self.pool, piece)


class Pull:
    """Pull in flight."""

    __slots__ = ("copy", "flow", "source", "target")

    def __init__(self, source: "PeerTier", target: "PeerTier", copy: Copy) -> None:
        self.source = source
        self.target = target
        self.copy = copy
        self.flow: Flow | None = None


class Pulls:
    """All pulls of a fleet. Its caller names the source of each pull, and lands what is due."""

    def __init__(
        self,
        fabric: Fabric,
        *,
        device: bool,
        min_lead: int,
        in_flight: int,
        settle: Callable[[int, int], None],
        changed: Callable[[int, int, int], None],
    ) -> None:
        """Sources are read in their first tier, or on the ``device``. ``min_lead`` tokens are worth a pull at least, and no
        more than ``in_flight`` go into one worker at a time. ``settle(worker, now)`` must bring a worker up to date, and
        ``changed(worker, now, by)`` is called when pages of it are held or free again because of worker ``by``.
        """
        self.fabric = fabric
        self.device = device
        self.min_lead = min_lead
        self.most_in_flight = in_flight
        self.settle = settle
        self.changed = changed
        self.members: dict[str, PeerTier] = {}
        self.expected: dict[str, PullSource] = {}
        """By request, until its pull begins or the request ends."""
        self.in_flight: dict[int, Pull] = {}
        """By the number of their flow."""
        self.watch: Callable[[Pull], None] | None = None
        """Called with each as it lands, while both its ends are held: for tests that keep contents."""

    def join(self, name: str, worker: int, first: TierStore, device: Pool) -> "PeerTier":
        """Let a worker take part, on both sides, with its ``first`` tier and its ``device``. ``worker`` is its number in the
        fabric. Returns its peers, as it sees them.
        """
        self.fabric.join(worker)
        tier = self.members[name] = PeerTier(self, worker, first, device if self.device else first.pool)
        return tier

    def expect(self, request_id: str, expectation: PullSource | None) -> None:
        """Note the worker from which a request may pull, or none."""
        if expectation is None:
            self.expected.pop(request_id, None)
        else:
            self.expected[request_id] = expectation

    def send(self, now: int, pull: Pull) -> None:
        """Start ``pull``: its copy holds both ends."""
        ports = self.ports(pull.source, pull.target)
        flow = pull.flow = self.fabric.send(now, ports, pull.copy.nbytes, self._arrived)
        self.in_flight[flow.number] = pull
        pull.target.incoming.append(pull)
        if pull.copy.far:
            pull.source.outgoing.append(pull)
            self.changed(pull.source.worker, now, pull.target.worker)

    def ports(self, source: "PeerTier", target: "PeerTier") -> list[Hashable]:
        """Return the ports of a pull: it ends in a host tier."""
        return self.fabric.ports(source.worker, target.worker, from_device=self.device, to_device=False)

    def _arrived(self, flow: Flow) -> None:
        pull = self.in_flight.pop(flow.number)
        assert flow.ended is not None
        pull.copy.queued = flow.queued
        if self.watch is not None:
            self.watch(pull)
        self._end(pull, flow.ended)

    def _end(self, pull: Pull, now: int) -> None:
        """Release the source; the target receives the copy when it next ticks."""
        source, target, copy = pull.source, pull.target, pull.copy
        copy.ended = now
        if copy.far:
            self.settle(source.worker, now)
            for held in copy.far:
                source.pool.holds.end(held)
            source.outgoing.remove(pull)
            self.changed(source.worker, now, -1)
        target.incoming.remove(pull)
        copy.inbox.append(copy)
        self.changed(target.worker, now, -1)

    def fail(self, worker: int, now: int) -> None:
        """End all pulls from ``worker``, which failed, now and later, and cancel its own."""
        for member in self.members.values():
            member.gone |= member.worker == worker
        for number, pull in list(self.in_flight.items()):
            if worker in (pull.source.worker, pull.target.worker):
                assert pull.flow is not None
                self.fabric.cancel(now, pull.flow)
                del self.in_flight[number]
                pull.copy.failed = True
                self._end(pull, now)

    def back(self, name: str) -> None:
        """Note that a failed worker is back."""
        self.members[name].gone = False

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every pull in flight holds both its ends (I6) and shares are fair (I7)."""
        self.fabric.network.check_integrity()
        for pull in self.in_flight.values():
            assert pull in pull.target.incoming, "I6: a pull that its target doesn't know of"
            first = pull.target.first
            assert all(held in first.reserved for held in pull.copy.near), "I6: a pull without room where it goes"
            assert all(held in pull.source.pool.holds.tables for held in pull.copy.far), (
                "I6: a pull has released its source"
            )


class PeerTier:
    """The other workers, as one worker's last tier."""

    def __init__(self, pulls: Pulls, worker: int, first: TierStore, pool: Pool) -> None:
        self._pulls = pulls
        self.worker = worker
        self.first = first
        """Destination of pulls."""
        self.pool = pool
        """Pool that others read."""
        self.gone = False
        """True if the worker doesn't answer others."""
        self.incoming: list[Pull] = []
        self.outgoing: list[Pull] = []

    @property
    def min_lead(self) -> int:
        """Tokens that are worth a pull."""
        return self._pulls.min_lead

    @property
    def full(self) -> bool:
        """Return true if no more pulls may begin now."""
        return len(self.incoming) >= self._pulls.most_in_flight

    def pages(self, request: Request, now: int) -> PeerPages | None:
        """Return the pages of the source of ``request``; ``None`` if there is none to pull from."""
        expected = self._pulls.expected.get(request.id)
        if expected is None:
            return None
        source = self._pulls.members.get(expected.source)
        if source is None or source is self:
            return None
        self._pulls.settle(source.worker, now)
        return PeerPages(source.pool, expected.tokens, source.gone)

    def forget(self, request: Request) -> None:
        """Forget ``request``: its pull is over, or not needed any more."""
        self._pulls.expected.pop(request.id, None)

    def foresee(self, request: Request, nbytes: int, now: int) -> int:
        """Return when a pull of ``nbytes`` for ``request`` that begins at ``now`` would have landed."""
        source = self._pulls.members[self._pulls.expected[request.id].source]
        fabric = self._pulls.fabric
        return fabric.network.foresee(now, self._pulls.ports(source, self), nbytes)

    def start(self, request: Request, copy: Copy, now: int) -> None:
        """Send ``copy``, which holds both its ends; it comes into the inbox when it has landed or failed."""
        source = self._pulls.members[self._pulls.expected[request.id].source]
        self.forget(request)
        copy.began = now
        self._pulls.send(now, Pull(source, self, copy))

    def earliest(self) -> int | None:
        """Return when the first of its pulls lands, at the rates that they have now."""
        network = self._pulls.fabric.network
        return min([network.landing(pull.flow) for pull in self.incoming if pull.flow is not None], default=None)

    def held(self, pool: Pool) -> list[BlockTable]:
        """Return the tables that pulls hold in ``pool``, the device's or the first tier's: those that come in, and those
        that read here."""
        tables: list[BlockTable] = []
        if pool is self.first.pool:
            tables += [held for pull in self.incoming for held in pull.copy.near]
        if pool is self.pool:
            tables += [held for pull in self.outgoing for held in pull.copy.far]
        return tables
