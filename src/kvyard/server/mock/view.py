"""The mock fleet as its dashboard shows it. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from kvyard.clock import MS, SECOND, Clock
from kvyard.engine.core import EngineCore
from kvyard.events.tier import LOWER_TIERS
from kvyard.events.transport.endpoint import reachable
from kvyard.server.dashboard import view as board
from kvyard.server.http import picked
from kvyard.server.mock.faults import MockFaults
from kvyard.server.mock.tally import Admission
from kvyard.server.mock.worker import MockWorker
from kvyard.tiers.copy_totals import CopyTotals
from kvyard.tiers.links.link import Direction

if TYPE_CHECKING:
    from kvyard.blocks.pool import Pool
    from kvyard.server.mock.fleet import MockFleet


SUMMED = ("finished", "failed", "refused", "cancelled", "prompt_tokens", "output_tokens")
"""Counters of a tally whose sums over workers are the fleet's."""


def fleet_view(fleet: MockFleet, wall: Clock, since: float) -> board.FleetView:
    """Return the fleet, now, which has been there ``since``."""
    workers, config = fleet.workers, fleet.config
    now = fleet.clock.now()
    recent = workers[0].tally.recent
    shown = [worker_view(worker, port.url) for worker, port in zip(workers, fleet.ports, strict=False)]
    tallies = [worker.tally for worker in workers]
    totals = board.Totals(
        **{name: sum(getattr(tally, name) for tally in tallies) for name in SUMMED},
        requests=sum(tally.came for tally in tallies),
        under_way=sum(worker.load for worker in workers),
        prompts={name: sum(worker.prompts[name] for worker in shown) for name in board.prompt_sources()},
        ttft=recent.first_tokens.latency(now),
    )
    return board.FleetView(
        kind="mock",
        at=wall.now() / SECOND,
        since=since,
        speed=config.speed,
        notes=_notes(workers),
        workers=shown,
        streams=[stream for worker in workers for stream in stream_views(worker, now)],
        transfers=[transfer for worker in workers for transfer in transfer_views(worker)],
        decisions=[_decision(admission, workers[0].block_size) for admission in reversed(recent.admissions)],
        totals=totals,
    )


def worker_view(worker: MockWorker, url: str) -> board.WorkerStatus:
    """Return the status of one worker."""
    tally = worker.tally
    state: board.WorkerState = "ready"
    reason = ""
    if not worker.alive:
        state, reason = "down", "killed; POST /admin/revive brings it back"
    elif worker.stalled:
        state, reason = "stalled", "stalled on request"
    return board.WorkerStatus(
        **picked(tally, "failed prompt_tokens output_tokens"),
        name=worker.name,
        model=worker.config.served_model_name,
        url=url,
        state=state,
        reason=reason,
        role=worker.role,
        ranks=len(worker.cores),
        running=sum(len(core.scheduler.running) for core in worker.cores),
        waiting=max(0, worker.waiting),
        requests=tally.finished + tally.failed + tally.refused + tally.cancelled,
        tiers=list(_tiers(worker.cores)),
        prompts=board.prompt_sources(tally.tiers, tally.computed),
    )


def _tiers(cores: list[EngineCore]) -> Iterator[board.TierView]:
    """Yield each tier, over all ranks."""
    pools: dict[str, list[tuple[Pool, int]]] = {"G1": [(core.scheduler.manager.pool, 1) for core in cores]}
    for core in cores:
        if core.offload is not None:
            for tier in core.offload.tiers:
                pools.setdefault(tier.store.tier.name, []).append((tier.store.pool, core.offload.layout.chunk))
    for name, tier_pools in pools.items():
        yield board.TierView(
            name=name,
            held=sum((pool.num_blocks - 1 - pool.free) * chunk for pool, chunk in tier_pools),
            idle=sum((pool.free - pool.unnamed) * chunk for pool, chunk in tier_pools),
            capacity=sum((pool.num_blocks - 1) * chunk for pool, chunk in tier_pools),
        )


def stream_views(worker: MockWorker, now: int) -> Iterator[board.StreamView]:
    """Yield the stream of each rank."""
    for rank, (publisher, sent) in enumerate(zip(worker.publishers, worker.tally.streams, strict=False)):
        failed = publisher.error is not None
        yield board.StreamView(
            name=f"{worker.name}@{rank}",
            worker=worker.name,
            endpoint=reachable(publisher.endpoint),
            state="failed" if failed else "sending",
            reason=f"{publisher.failures} batches couldn't be sent; all was announced again" if failed else "",
            seq=sent.seq,
            epoch=worker.deaths,
            batches=sent.sent,
            missed=sent.withheld,
            restarts=worker.deaths,
            age_s=None if sent.at < 0 else max(0, now - sent.at) / SECOND / worker.config.speed,
        )


def transfer_views(worker: MockWorker) -> Iterator[board.TransferView]:
    """Yield copies between tiers, by direction, over all ranks."""
    engines = [core.offload for core in worker.cores if core.offload is not None]
    depth = max((len(engine.tiers) for engine in engines), default=0)
    for level, direction in product(range(depth), Direction):
        flows: list[CopyTotals] = []
        bandwidth: float | None = 0.0
        source, target = "", ""
        for engine in engines:
            if level < len(engine.tiers):
                tier, counters = engine.tiers[level], engine.counters.tiers[level]
                source, target = tier.ends if direction == Direction.OUT else tier.ends[::-1]
                flows.append(counters.stores if direction == Direction.OUT else counters.loads)
                lane = tier.link.config.lanes[direction].bandwidth
                bandwidth = None if lane is None or bandwidth is None else bandwidth + lane
        if flows:
            yield board.TransferView(
                worker=worker.name,
                source=source,
                target=target,
                under_way=sum(flow.submitted - flow.landed for flow in flows),
                **{name: sum(getattr(flow, name) for flow in flows) for name in ("landed", "blocks", "bytes")},
                queued_ms=sum(flow.queued_ns for flow in flows) / MS,
                bandwidth=None if bandwidth is None else bandwidth * worker.config.speed,
            )


def _decision(admission: Admission, size: int) -> board.DecisionView:
    device, *lower = admission.tiers
    cached = sum(admission.tiers)
    parts = [f"{device} on the device"]
    parts += [f"{tokens} loaded from {tier.place}" for tier, tokens in zip(LOWER_TIERS, lower, strict=False) if tokens]
    had = f"Found {', '.join(parts)}" if cached else "Found nothing"
    return board.DecisionView(
        **picked(admission, "number at id worker tokens"),
        why=f"sent here, waited {admission.waited_ms:.0f} ms",
        blocks=admission.tokens // size,
        tiers=board.by_label([tokens // size for tokens in admission.tiers]),
        said=(
            f"{admission.id}: admitted at {admission.worker}, rank {admission.rank}, "
            f"after waiting {admission.waited_ms:.1f} ms of nominal time.\n"
            f"{had}, and {admission.tokens - cached} of {admission.tokens} tokens have to be computed."
        ),
    )


def _notes(workers: list[MockWorker]) -> list[str]:
    """Return faults that were asked for."""
    note_of = {worker.name: note for worker in workers if (note := _asked_for(worker.faults))}
    if len(note_of) == len(workers) > 1 and len(set(note_of.values())) == 1:
        return [f"every worker: {note_of[workers[0].name]}"]
    return [f"{name}: {note}" for name, note in note_of.items()]


def _asked_for(faults: MockFaults) -> str:
    """Return faults that differ from none, in one line."""
    none = msgspec.to_builtins(MockFaults())
    changed = {name: value for name, value in msgspec.to_builtins(faults).items() if value != none[name]}
    return ", ".join(f"{name} = {value}" for name, value in changed.items())
