"""What people write to describe a replay: a fleet, how it is routed, and how the trace is driven. Values only."""

import math
from typing import Annotated, ClassVar

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.replay.traces.hinting import parse_hints
from kvyard.router import RouterConfig
from kvyard.router.policies import make_policy
from kvyard.settings import Setting, as_it_is, duration

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

    heading: ClassVar[str] = "Fleet"
    engine: EngineConfig = EngineConfig()
    count: Annotated[int, Setting("How many of them.")] = 1
    dp_size: Annotated[
        int, Setting("Data-parallel ranks of each worker.", also=("data_parallel_size", "dp", "-dp"), flag=True)
    ] = 1
    """They start every pass together."""
    name: Annotated[str, Setting("What the names of these workers begin with.")] = "w"
    start: Annotated[int, Setting("When they begin to take requests.", parse=duration)] = 0
    """In ns, as are the others."""
    drain: Annotated[int | None, Setting("When they stop taking new requests.", parse=duration)] = None
    fail: Annotated[int | None, Setting("When they fail.", parse=duration)] = None
    """What they had is lost, and their requests are routed again."""

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


class DrivingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trace is driven, simulated or live."""

    heading: ClassVar[str] = "Load"
    speedup: Annotated[float, Setting("Divide gaps between arrivals, and think times, by this.", flag=True)] = 1.0
    """Compute stays as it is."""
    jitter: Annotated[
        int,
        Setting(
            "Spread arrivals that were recorded together over up to this long, such as 3s.", flag=True, parse=duration
        ),
    ] = 0
    concurrency: Annotated[
        int | None,
        Setting("Closed loop: so many sessions (or requests) under way, whatever the recorded times.", flag=True),
    ] = None
    hints: Annotated[
        str | None,
        Setting("Hints made from the trace's future, such as session-end:recall=0.5,false=0.1.", flag=True),
    ] = None
    """Engines heed them. ``heed_hints`` alone is for those that the trace has."""
    limit: Annotated[int | None, Setting("Replay so many requests at most.", flag=True)] = None
    seed: Annotated[int, Setting("Of whatever is drawn.", flag=True)] = 0

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        for key, most in (("limit", self.limit), ("concurrency", self.concurrency)):
            if most is not None and most < 1:
                raise KvyardError(f"{key} must be at least 1, got {most}")
        if not 0 < self.speedup < math.inf:
            raise KvyardError(f"speedup must be a number above 0, got {self.speedup}")
        if self.hints is not None:
            parse_hints(self.hints)
        if self.jitter < 0:
            raise KvyardError(f"jitter must not be negative, got {self.jitter}")


class ReplayConfig(DrivingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole replay."""

    workers: Annotated[
        tuple[WorkerConfig, ...],
        Setting("Workers, 8 by default; in a file, a table for each kind of them.", flag=True, parse=as_it_is),
    ] = (WorkerConfig(),)
    router: RouterConfig = RouterConfig()
    event_lag: Annotated[
        int, Setting("Until the router sees what a worker announced, such as 50ms.", flag=True, parse=duration)
    ] = 0
    plans: Annotated[bool, Setting("Off: one pass at a time, for checking.")] = True
    """The same results, slowly."""
    samples: Annotated[int, Setting("About how many points the timeline has.")] = 150

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        super().check()
        if not self.workers:
            raise KvyardError("a fleet needs at least one worker")
        for kind in self.workers:
            kind.check()
        if all(kind.start > 0 for kind in self.workers):
            raise KvyardError("no worker is there at the start: let one start at 0")
        if self.samples < 2:
            raise KvyardError(f"samples must be at least 2, got {self.samples}")
        if self.event_lag < 0:
            raise KvyardError(f"event_lag must not be negative, got {self.event_lag}")
        sizes = {min(spec.block_size for spec in kind.engine.specs) for kind in self.workers}
        policy = make_policy(self.router)
        if len(sizes) > 1 and (policy.needs_index or policy.memory is not None):
            raise KvyardError(
                f"workers have block sizes {', '.join(map(str, sorted(sizes)))}: {self.router.policy} routing needs one"
            )
