"""Flow control of a simulated fleet: the queue before its router, for workers that may have a number of requests each."""

from array import array
from collections.abc import Sequence
from heapq import heappush, heapreplace

from kvyard.index import Holder
from kvyard.replay.placement import WholePlacement
from kvyard.replay.record import Record
from kvyard.replay.worker import Worker
from kvyard.router.flow import FlowQueue, FlowRequest, FlowWait, Waiting

SHOWN = 10
"""Requests whose reasons for waiting a report has."""


class FleetFlow:
    """Places requests, or has them wait, so that no worker has more than ``most``."""

    def __init__(
        self, queue: FlowQueue[Record], placement: WholePlacement, workers: Sequence[Worker], most: int
    ) -> None:
        self.queue = queue
        self.waited = array("q")
        """Nanoseconds, of requests that had to wait."""
        self.overtaken = 0
        """Number of times that a later request went before a waiting one."""
        self.longest = 0
        """Requests that waited at a time, at most."""
        self.refused: dict[str, int] = {}
        """Requests that weren't let in, by kind of refusal."""
        self.longest_waits: list[tuple[int, int, Record, FlowWait]] = []
        """A heap of the ten longest: nanoseconds, a number that tells equal ones apart, and why."""
        self._placement = placement
        self._workers = workers
        self._most = most
        self._full: set[Holder] = set()
        self._requests: dict[str, FlowRequest] = {}
        """Of requests that are in flight, by id."""

    def arrive(self, record: Record, now: int) -> str:
        """Place a request or let it wait; returns why it is refused, or nothing."""
        traced = record.request
        request = FlowRequest(
            traced.id,
            record.arrival,
            traced.input_length,
            None,  # nobody knows beforehand how long an answer gets
            traced.root or traced.session,
            record.tenant,
            traced.priority,
        )
        lost = self._requests.get(record.id)
        if lost is not None:  # its worker failed
            self.queue.returned(lost)
        self._requests[record.id] = request
        capped = self.queue.capped(request, self._placement.pool.open)
        if not capped and not self.queue and self._has_room() and self._placement.hold(record, now, self._full) is None:
            self.queue.sent(request, now)
            self._place(record, now)
            return ""
        refusal = self.queue.refusal(request, self._placement.pool.open)
        if refusal is not None:
            self.refused[refusal.kind] = self.refused.get(refusal.kind, 0) + 1
            del self._requests[record.id]
            return refusal.reason
        self.queue.push(request, record, now)
        waits = self._placement.pool.router.policy.waits or self.queue.config.limits_tenants
        if waits and not capped and self._has_room():
            self.grant(now)  # those before it wait for workers of their own, or for their tenants
        self.longest = max(self.longest, len(self.queue))
        return ""

    def ended(self, worker: int, record: Record, now: int) -> bool:
        """Note that a request ended at ``worker``; returns true if waiting requests may start."""
        request = self._requests.pop(record.id, None)
        if request is not None:
            reused = record.cached + sum(record.loaded) if record.admitted >= 0 else record.input
            self.queue.ended(request, record.input - reused, record.output, now)
        self._update(self._workers[worker])
        return len(self.queue) > 0

    def grant(self, now: int) -> None:
        """Place those that wait, as far as there is room. Also where workers came or went."""
        for worker in self._workers:
            self._update(worker)
        self.queue.grant(now, self._has_room, lambda waiting: self._grant(waiting, now), self._placement.pool.open)

    def wakes(self, now: int) -> int | None:
        """Return when a request that waits for a worker of its own is to be placed anyhow; ``None`` if none is."""
        if not self.queue or not self._placement.pool.router.policy.waits or not self._has_room():
            return None
        return self.queue.held_until(now)

    def drain(self) -> list[Record]:
        """Take out all that wait: there is no worker any more."""
        return self.queue.drain()

    def clear(self) -> None:
        """Count from now on."""
        self.waited, self.overtaken, self.longest, self.refused = array("q"), 0, 0, {}
        self.longest_waits = []

    def _grant(self, waiting: Waiting[Record], now: int) -> bool:
        full = self._full
        if waiting.is_held(full, now, lambda: self._placement.hold(waiting.item, now, full)):
            return False
        self.waited.append(now - waiting.came)
        wait = self.queue.explain(waiting, now)
        self.overtaken += wait.overtaken
        entry = (now - waiting.came, -waiting.serial, waiting.item, wait)
        if len(self.longest_waits) < SHOWN:
            heappush(self.longest_waits, entry)
        elif entry[:2] > self.longest_waits[0][:2]:
            heapreplace(self.longest_waits, entry)
        self._place(waiting.item, now)
        return True

    def _place(self, record: Record, now: int) -> None:
        record.waited = now - record.arrival
        self._update(self._placement.send(record, now, self._full))

    def _has_room(self) -> bool:
        return self._placement.pool.open > len(self._full)

    def _update(self, worker: Worker) -> None:
        if worker.alive and not worker.draining and len(worker.jobs) >= self._most:
            self._full.update(worker.holders)
        else:
            self._full.difference_update(worker.holders)
