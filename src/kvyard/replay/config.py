"""What people write to describe a replay: a fleet, how it is routed, and how the trace is driven. Values only."""

from __future__ import annotations

import math

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.router import RouterConfig
from kvyard.router.policies import make_policy

LEFT_OUT = {
    "prefill_workers": "prefill/decode disaggregation is not modelled: every worker does both",
    "decode_workers": "prefill/decode disaggregation is not modelled: every worker does both",
    "disaggregation_mode": "prefill/decode disaggregation is not modelled: every worker does both",
    "autoscaling": "autoscaling is not modelled: give workers a start, drain or fail time instead",
    "planner": "autoscaling is not modelled: give workers a start, drain or fail time instead",
}
"""What this replay refuses by name."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of one kind."""

    engine: EngineConfig = EngineConfig()
    count: int = 1
    dp_size: int = 1
    """Data-parallel ranks of each; they start every pass together."""
    name: str = "w"
    """What their names begin with."""
    start: int = 0
    """When they begin to take requests, in ns."""
    drain: int | None = None
    """When they stop taking new requests, in ns."""
    fail: int | None = None
    """When they fail, in ns: what they had is lost, and their requests are routed anew."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        if self.count < 1 or self.dp_size < 1:
            raise KvyardError(f"workers {self.name!r}: count and dp_size must be at least 1")
        if self.start < 0:
            raise KvyardError(f"workers {self.name!r} can't start before the replay does, at {self.start} ns")
        for key in ("drain", "fail"):
            when = getattr(self, key)
            if when is not None and when <= self.start:
                raise KvyardError(f"workers {self.name!r} {key} at {when} ns, before they start at {self.start}")
        self.engine.check()


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole replay."""

    workers: tuple[WorkerConfig, ...] = (WorkerConfig(),)
    router: RouterConfig = RouterConfig()
    event_lag: int = 0
    """Nanoseconds until the router sees what a worker announced."""
    speedup: float = 1.0
    """Divides the gaps between arrivals and think times; compute stays as it is."""
    concurrency: int | None = None
    """Closed loop: so many sessions (or requests) under way at any time, whatever the recorded times."""
    limit: int | None = None
    """Requests at most."""
    seed: int = 0
    plans: bool = True
    """Off: one pass at a time. The same results, slowly; for checking."""
    samples: int = 150
    """About how many points the timeline has."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        if not self.workers:
            raise KvyardError("a fleet needs at least one worker")
        for kind in self.workers:
            kind.check()
        if all(kind.start > 0 for kind in self.workers):
            raise KvyardError("no worker is there at the start: let one start at 0")
        if self.limit is not None and self.limit < 1:
            raise KvyardError(f"limit must be at least 1, got {self.limit}")
        if self.samples < 2:
            raise KvyardError(f"samples must be at least 2, got {self.samples}")
        if not 0 < self.speedup < math.inf:
            raise KvyardError(f"speedup must be a number above 0, got {self.speedup}")
        if self.event_lag < 0:
            raise KvyardError(f"event_lag must not be negative, got {self.event_lag}")
        sizes = {min(spec.block_size for spec in kind.engine.specs) for kind in self.workers}
        policy = make_policy(self.router)
        if len(sizes) > 1 and (policy.needs_index or policy.memory is not None):
            raise KvyardError(
                f"workers have block sizes {', '.join(map(str, sorted(sizes)))}: {self.router.policy} routing needs one"
            )
