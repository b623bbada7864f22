"""The window of a run: the part after the warm-up, which is counted.

Counters of engines, tiers and networks aren't reset, since some parts read them. ``CounterMarks`` notes their values when the
window begins and subtracts them at the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.replay.split_placement import SplitPlacement

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet


COPY_COUNTERS = ("submitted", "landed", "blocks", "bytes", "queued_ns")
LANE_COUNTERS = ("submitted", "landed", "cancelled", "bytes", "queued_ns")


class CounterMarks:
    """Counters of a fleet where its window begins."""

    def __init__(self, fleet: Fleet) -> None:
        self._marks: list[tuple[Any, str, int]] = []
        for owner, names in _counters(fleet):
            self._marks += [(owner, name, getattr(owner, name)) for name in names]
        self._tables = [(table, dict(table)) for table in _tables(fleet)]
        for worker in fleet.workers:
            for core in worker.cores:
                for tier in core.offload.tiers if core.offload is not None else ():
                    tier.link.leave_out_busy()

    def subtract(self) -> None:
        """Take what was counted before the window off the counters. The run must be over: parts of it read them."""
        for owner, name, before in self._marks:
            setattr(owner, name, getattr(owner, name) - before)
        for table, counts in self._tables:
            for name, count in counts.items():
                table[name] -= count


def _counters(fleet: Fleet) -> Iterator[tuple[Any, Iterable[str]]]:
    """Yield objects that count, and the names of their counters."""
    links: dict[int, Any] = {}
    for worker in fleet.workers:
        for recorder in worker.recorders:
            yield recorder, ("computed",)
        for core in worker.cores:
            yield core, ("passes", "busy_ns")
            yield core.scheduler.jobs, ("preemptions",)
            yield core.scheduler.manager.pool, ("evicted",)
            if core.offload is None:
                continue
            counters = core.offload.counters
            yield counters, _integers(counters)
            yield counters.pulls, _integers(counters.pulls)
            for tier in counters.tiers:
                yield tier, ("tokens", "no_room")
                for totals in (tier.stores, tier.loads):
                    yield totals, COPY_COUNTERS
            links |= {id(tier): tier for tier in core.offload.tiers}
    for tier in links.values():
        yield tier.store, ("evicted",)
        yield from ((account, LANE_COUNTERS) for account in tier.link.accounts)
    placement = fleet.placement
    if isinstance(placement, SplitPlacement):
        yield placement, ("handed_over", "kept")
    if fleet.fabric is not None:
        yield from ((port, ("bytes", "busy_ns", "queued_ns")) for port in fleet.fabric.network.ports.values())


def _tables(fleet: Fleet) -> Iterator[dict[str, int]]:
    """Yield counters by name."""
    for worker in fleet.workers:
        for core in worker.cores:
            if core.offload is not None:
                yield core.offload.counters.left_tokens
                yield core.offload.counters.pulls.refused


def _integers(counters: msgspec.Struct) -> list[str]:
    return [name for name, value in msgspec.structs.asdict(counters).items() if isinstance(value, int)]
