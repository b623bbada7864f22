"""Prefetches of waiting requests from storage to the host, as SGLang's HiCache makes them.

A request that arrives, or comes back to the queue, asks storage for what follows what device and host have of it. Once a query
found enough pages, and the host has room, they are read. What is read becomes part of the host's tree when the read is over, or
when the request is next tried: ``best_effort`` takes what there is then, ``wait_complete`` waits for all of it, and ``timeout``
for a time that grows with the pages. The scheduler takes note of all this between passes only.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvyard.blocks import Hit, Request
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_pages import HostPages
from kvyard.blocks.radix import RadixGroup
from kvyard.clock import SECOND
from kvyard.tiers.copy_totals import CopyTotals
from kvyard.tiers.counters import TierCounters
from kvyard.tiers.page_files import PageFiles, Prefetch

Policy = Literal["best_effort", "wait_complete", "timeout"]


class PrefetchRules(NamedTuple):
    """SGLang's settings for prefetches."""

    policy: Policy
    threshold: int
    """Tokens below which nothing is prefetched."""
    timeout_base: float
    """Seconds that a request waits under ``timeout`` ..."""
    timeout_per_ki_token: float
    """... and for each 1,024 tokens that it asked for."""
    retry_interval: int
    """Passes after which a request that found nothing asks again; 0 for never."""
    retry_attempts: int
    """Times that it asks again at most."""


class Asking:
    """Queries of one waiting request."""

    __slots__ = ("attempts", "from_storage", "matched", "retry", "waits")

    def __init__(self) -> None:
        self.from_storage: int | None = None
        """Position of the first page that storage added to the host for it."""
        self.attempts = 0
        """Times that it asked again."""
        self.matched = 0
        """Tokens that device and host had of it when it last asked."""
        self.retry: Retry | None = None
        self.waits: Wait | None = None


class Retry:
    """A request that found nothing will ask again."""

    __slots__ = ("due", "known_until")

    def __init__(self, known_until: int) -> None:
        self.known_until = known_until
        """Tokens that storage is known to have of it; 0 if that isn't known."""
        self.due: int | None = None
        """The pass in which it does."""


class Wait:
    """A request that waits for a prefetch, under ``timeout``."""

    __slots__ = ("expired", "since", "timeout")

    def __init__(self, since: float, timeout: float) -> None:
        self.since = since
        self.timeout = timeout
        self.expired = False

    def over(self, now: int) -> bool:
        """True if it has waited too long. In seconds, rounded as SGLang's clock."""
        return self.expired or now / SECOND - self.since > self.timeout

    def deadline(self) -> int:
        """Return the first nanosecond at which it has waited too long."""
        end = int((self.since + self.timeout) * SECOND) - 2
        while not self.over(end):
            end += 1
        return end


class Prefetches:
    """Prefetches of one engine's waiting requests."""

    def __init__(self, tree: RadixGroup, host: HostPages, files: PageFiles, rules: PrefetchRules) -> None:
        self.tree = tree
        self.host = host
        host.persist = self.persist
        self.files = files
        self._rules = rules
        self._page = tree.block_size
        self._most = host.pool.num_blocks - 1
        self.occupied = 0
        """Pages asked for. With half of the host's pages or more, nothing else is asked for."""
        self.in_flight: dict[Request, Prefetch] = {}
        self._asking: dict[Request, Asking] = {}
        self.counters = TierCounters()
        self.now = 0
        self._pass = 0
        self._inbox: list[tuple[Request, bool]] = []
        """Requests that arrived, or ended, since the last pass."""
        self._released: list[Extent] = []
        """Pages of the host that are free from the next pass on."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Note that ``request`` has arrived: the scheduler sees it before the next pass."""
        self._inbox.append((request, False))

    def ended(self, request: Request) -> None:
        """Note that ``request`` has ended in some way."""
        if request in self._asking or self._inbox:
            self._inbox.append((request, True))

    def receive(self, now: int) -> None:
        """See to what arrived and ended since the last pass, and to what storage has done by ``now``."""
        self.now = now
        inbox, self._inbox = self._inbox, []
        for request, ended in inbox:
            if ended:
                self._give_up(request)
            else:
                self.ask(request)
        self.files.advance(now)

    def retracted(self, request: Request) -> None:
        """``request`` is back in the queue and begins anew."""
        asking = self._asking_of(request)
        asking.attempts = asking.matched = 0
        self.ask(request)

    def admitted(self, request: Request) -> None:
        """``request`` has left the queue."""
        asking = self._asking.get(request)
        if asking is not None:
            asking.waits = asking.retry = None

    def _give_up(self, request: Request) -> None:
        self._asking.pop(request, None)
        prefetch = self.in_flight.get(request)
        if prefetch is None:
            return
        prefetch.end(self.now)
        own = prefetch.own
        self._retire(request)
        if own is not None and prefetch.read:
            self._released.append(self._front(prefetch, prefetch.read))

    def _asking_of(self, request: Request) -> Asking:
        return self._asking.setdefault(request, Asking())

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, known_until: int = 0) -> None:
        """Ask storage for what follows what device and host have of ``request``. ``known_until``: tokens of it that storage is
        known to have.
        """
        asking, tree, page = self._asking_of(request), self.tree, self._page
        tokens = request.num_tokens - 1
        hit = tree.match(request, tokens)
        anchor = self._anchor(hit)
        matched = asking.matched = self.matched(hit)
        if matched and anchor is None:
            return  # storage has what the host had
        asking.retry = None
        if (asking.waits is not None and asking.waits.expired) or request in self.in_flight:
            return
        tokens -= tree.pairs
        known = matched < known_until <= tokens
        if known:
            tokens = known_until
        start, stop = matched // page, tokens // page
        known = known and stop * page == known_until
        if (stop - start) * page < self._rules.threshold:
            return
        if self.occupied * page >= self._most * page // 2:
            asking.retry = Retry(known_until)
            return
        prefetch = Prefetch(request, tree.chain_of(request).keys, start, stop, known=known)
        if anchor is not None:
            prefetch.anchor = self.host.lock(anchor)
        self.files.query(self.now, prefetch)
        self.in_flight[request] = prefetch
        self.occupied += stop - start

    def matched(self, hit: Hit) -> int:
        """Return tokens that device and host have, of which ``hit`` is the latest match."""
        return hit.tokens + self.tree.beyond.tokens

    def _anchor(self, hit: Hit) -> Node | None:
        """Return the host's node that ends the latest match, if there is one."""
        beyond, nodes = self.tree.beyond.nodes, hit.groups[0].parts()
        if beyond:
            return beyond[-1]
        return self.host.below(nodes[-1]) if nodes else None

    def begin_pass(self, waiting: Sequence[Request]) -> None:
        """Have requests that found nothing ask again when they are due, in the order of the queue."""
        self._pass += 1
        rules, due = self._rules, []
        for place, request in enumerate(waiting):
            asking = self._asking.get(request)
            retry = asking.retry if asking is not None else None
            if asking is None or retry is None:
                continue
            if not place or asking.attempts >= rules.retry_attempts or rules.retry_interval <= 0:
                asking.retry = None  # who is next isn't held up
                continue
            if retry.due is None:
                retry.due = self._pass + rules.retry_interval
            if retry.due <= self._pass:
                asking.retry = None
                due.append((request, asking, retry.known_until))
        for request, asking, known_until in due:
            asking.attempts += 1
            self.ask(request, known_until)

    # -- admission ----------------------------------------------------------------------------------------------------

    def ready(self, request: Request) -> bool:
        """Return true if ``request`` may be tried: it doesn't wait for a prefetch, or no longer."""
        prefetch = self.in_flight.get(request)
        if prefetch is None:
            return True
        policy = self._rules.policy
        if prefetch.ended_at is None:
            asking = self._asking_of(request)
            if policy == "wait_complete":
                return False
            if policy == "timeout":
                if not self._overdue(prefetch, asking):
                    if asking.waits is None:
                        asking.waits = Wait(self.now / SECOND, self._timeout(prefetch))
                    return False
                asking.retry = None
                assert asking.waits is not None
                prefetch.expired = asking.waits.expired = True
        prefetch.end(self.now)
        if prefetch.own is not None:
            self._finish(prefetch)
            return True
        if not prefetch.expired:
            self._asking_of(request).retry = Retry(0)
        self._retire(request)
        return True

    def lost(self, request: Request, hit: Hit) -> bool:
        """Return true if device and host have less of ``request``, of which ``hit`` is the latest match, than when it last
        asked, so that it has asked again.
        """
        asking = self._asking.get(request)
        if asking is None or self.matched(hit) >= asking.matched:
            return False
        if asking.attempts >= self._rules.retry_attempts:
            asking.matched = self.matched(hit)
            return False
        asking.attempts += 1
        self.ask(request)
        return True

    def take_tokens(self, request: Request, nodes: Sequence[Node]) -> int:
        """Return tokens of ``nodes``, which are loaded for ``request``, that storage added to the host for it."""
        asking = self._asking.get(request)
        if asking is None or asking.from_storage is None:
            return 0
        first, asking.from_storage = asking.from_storage, None
        return sum([node.stop - max(node.start, first) for node in nodes if node.stop > first]) * self._page

    def _timeout(self, prefetch: Prefetch) -> float:
        per_page = self._page / 1024 * self._rules.timeout_per_ki_token
        return self._rules.timeout_base + (prefetch.stop - prefetch.start) * per_page

    def _overdue(self, prefetch: Prefetch, asking: Asking) -> bool:
        if prefetch.own is not None and prefetch.read >= prefetch.found:
            return False
        return asking.waits is not None and asking.waits.over(self.now)

    # -- the host -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take note of what storage has done since the last pass."""
        files, released = self.files, self._released
        self._released = []
        answered, files.answered = files.answered, []
        for prefetch in answered:
            self._answer(prefetch)
        progress, files.progress = files.progress, []
        for prefetch, read in progress:
            current = self.in_flight.get(prefetch.request) is prefetch
            if read >= 0:
                prefetch.read = read if current else prefetch.read
                continue
            self._count(self.counters.loads, prefetch.read)
            if current:
                self._finish(prefetch)
            if prefetch.own is not None:
                self._released.append(prefetch.own)
                prefetch.own = None
        written, files.written = files.written, []
        for held in written:
            self._count(self.counters.stores, held.length - held.starts[0])
            self.host.unlock(held)
        self.host.pool.release(released)

    def _count(self, totals: CopyTotals, pages: int) -> None:
        totals.landed += 1
        totals.blocks += pages
        totals.bytes += pages * self.files.page_bytes

    def _answer(self, prefetch: Prefetch) -> None:
        """Storage has been asked: read what it has, unless that is too little."""
        request = prefetch.request
        current = self.in_flight.get(request)
        if current is None:
            return
        asking, page = self._asking_of(request), self._page
        if prefetch.ended_at is not None or prefetch.found * page < self._rules.threshold:
            if not prefetch.expired:
                asking.retry = Retry(0)
            self._retire(request)
            return
        pool, pages = self.host.pool, prefetch.found
        if pool.unnamed < pages:
            self.host.evict(pages)
        room = min(pages, pool.unnamed)
        if room < pages and room * page < self._rules.threshold:
            asking.retry = Retry((prefetch.start + pages) * page)
            self._retire(request)
            self.counters.no_room += 1
            return
        prefetch.found = room
        prefetch.own = Extent(pool.take(room), prefetch.start)
        self.files.read(self.now, prefetch)
        self.counters.loads.submitted += 1

    def _finish(self, prefetch: Prefetch) -> None:
        """Make what was read part of the host's tree."""
        anchor = prefetch.anchor
        above = anchor.settle()[-1].node if anchor is not None else None
        own = self._front(prefetch, prefetch.read) if prefetch.read else None
        new = self.tree.insert_on_host(prefetch.request, above, own)
        if new is not None:
            self._asking_of(prefetch.request).from_storage = new
        self._retire(prefetch.request)

    def _front(self, prefetch: Prefetch, pages: int) -> Extent:
        """Return the first ``pages`` pages that it reads into; the rest stays its own until the read is over."""
        own = prefetch.own
        assert own is not None
        if pages == len(own.ids):
            prefetch.own = None
            return own
        front = own.split_front(pages)
        front.forget_neighbours()
        return front

    def _retire(self, request: Request) -> None:
        prefetch = self.in_flight.pop(request)
        self.occupied -= prefetch.stop - prefetch.start
        if prefetch.anchor is not None:
            self.host.unlock(prefetch.anchor)

    def persist(self, node: Node) -> None:
        """Write ``node`` of the host to storage."""
        keys = [node.keys[index] for index in range(node.start, node.stop)]
        self.files.write(self.now, keys, self.host.lock(node))
        self.counters.stores.submitted += 1

    # -- time and checks ----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """True if only time changes anything: no request counts passes, and no pages are about to be free."""
        return not self._released and not any(asking.retry is not None for asking in self._asking.values())

    def next_end(self) -> int | None:
        """Return when storage has next done something, or a request has waited too long for it."""
        now = self.now
        end = self.files.next_end()
        ends = [max(end, now + 1)] if end is not None else []
        for request in self.in_flight:
            waits = self._asking_of(request).waits
            if waits is not None and not waits.expired and (deadline := waits.deadline()) > now:
                ends.append(deadline)
        return min(ends, default=None)

    def held(self) -> list[Extent]:
        """Return the host's pages that prefetches have."""
        reading = {*self.in_flight.values(), *self.files.reads(), *(prefetch for prefetch, _ in self.files.progress)}
        return [prefetch.own for prefetch in reading if prefetch.own is not None] + self._released
