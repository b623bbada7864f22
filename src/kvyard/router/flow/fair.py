"""``fair``: token-weighted fair queueing by tenant.

Start-time fair queueing: a request begins, in virtual time, when the one before of its tenant ends, and takes its tokens
divided by the tenant's weight; the least beginning goes first. In a bounded queue a tenant has at most a share of the
places that are left (a dynamic threshold), so that a tenant that floods it leaves room for others.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest

MOST_TENANTS = 65_536


class FairQueueing(FlowPolicy):
    """Each tenant gets tokens by its weight while it has requests waiting."""

    OPTIONS: ClassVar[Options] = {
        "output_weight": Option(20.0, "Prompt tokens that a token of the answer costs as much as."),
        "output": Option(256.0, "Tokens of an answer whose length isn't known beforehand."),
        "places": Option(
            1.0, "Waiting requests that a tenant may have for each free place of a bounded queue.", positive=True
        ),
    }

    def __init__(self, config: FlowConfig, options: Mapping[str, float]) -> None:
        super().__init__(config, options)
        self._now = 0.0
        """Virtual time: the beginning of the latest request that was sent."""
        self._ends: OrderedDict[str, float] = OrderedDict()
        """By tenant, the end of its latest request in virtual time, those that were quiet the longest first. An end that lies
        in the past says nothing."""
        self._starts: dict[object, float] = {}
        """By request that waits."""
        self._waiting: Counter[str] = Counter()

    def _book(self, request: FlowRequest) -> float:
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        output = self.options["output"] if request.output is None else request.output
        cost = request.tokens + self.options["output_weight"] * output
        self._ends[request.tenant] = start + max(1.0, cost) / self.config.weights.get(request.tenant, 1.0)
        self._ends.move_to_end(request.tenant)
        while len(self._ends) > MOST_TENANTS or next(iter(self._ends.values())) <= self._now:
            self._ends.popitem(last=False)
        return start

    def __len__(self) -> int:
        """Return the number of tenants kept."""
        return len(self._ends)

    def came(self, request: FlowRequest, now: int) -> None:
        self._starts[request.id] = self._book(request)
        self._waiting[request.tenant] += 1

    def rank(self, request: FlowRequest, now: int) -> float:
        return self._starts.get(request.id, 0.0)

    def why(self, request: FlowRequest, now: int) -> str:
        ahead = max(0.0, self._starts.get(request.id, self._now) - self._now)
        return f"its tenant has had {ahead:,.0f} tokens more than that of the next request, by their weights"

    def refuses(self, request: FlowRequest, free: int) -> str:
        here = self._waiting[request.tenant]
        if here and here >= self.options["places"] * free:
            tenant = request.tenant or "without a name"
            return f"tenant {tenant} has {here:,} requests in the queue, with room for {free:,} more"
        return ""

    def sent(self, request: FlowRequest, now: int, waited: bool) -> None:
        if not waited:
            self._book(request)
            return
        self._now = max(self._now, self._starts.pop(request.id, self._now))
        self._gone(request)

    def left(self, request: FlowRequest) -> None:
        self._starts.pop(request.id, None)
        self._gone(request)

    def _gone(self, request: FlowRequest) -> None:
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
