"""Report of a fleet with roles: the time between prefill and decode, the network, and the cost of each role."""

from collections.abc import Iterable

from kvyard.clock import MS, SECOND
from kvyard.replay.fleet import Fleet
from kvyard.replay.report.fleet_report import HandoverReport, LinkUse, RoleReport
from kvyard.replay.report.numbers import share
from kvyard.replay.report.totals import RecordTotals
from kvyard.replay.split_placement import SplitPlacement
from kvyard.tiers.network import Network


def make_handovers(fleet: Fleet, totals: RecordTotals, duration: int) -> HandoverReport | None:
    """Report on the roles of ``fleet``; ``None`` without roles. ``duration`` is the run's, in nanoseconds."""
    placement = fleet.placement
    if not isinstance(placement, SplitPlacement):
        return None
    chosen = placement.handed_over + placement.kept
    return HandoverReport(
        decider=fleet.config.handover.decider,
        protocol=fleet.config.handover.protocol,
        handed_over=share(placement.handed_over, chosen, "requests sent to a prefill worker first / decisions"),
        stages={name: values.spread() for name, values in totals.stages.items()},
        bytes=totals.sent,
        waiting_ms=totals.queued / MS,
        network={name: _use(placement.handovers.network, kind, duration) for name, kind in _ways(fleet)},
        roles=_roles(fleet, duration),
    )


def _ways(fleet: Fleet) -> Iterable[tuple[str, str]]:
    yield "out of workers", "out"
    yield "into workers", "in"
    if fleet.config.handover.node_bandwidth is not None:
        yield "out of nodes", "node out"
        yield "into nodes", "node in"
    if fleet.config.handover.bus_bandwidth is not None:
        yield "out of devices", "bus out"
        yield "into devices", "bus in"


def _use(network: Network, kind: str, duration: int) -> LinkUse:
    """Return the use of the ports of a kind through which anything went."""
    ports = [
        port for port in network.ports if isinstance(port, tuple) and port[0] == kind and network.ports[port].bytes
    ]
    moved = sum(network.ports[port].bytes for port in ports)
    limits = [network.limit(port) for port in ports]
    whole = sum(limit for limit in limits if limit is not None)
    return LinkUse(
        links=len(ports),
        bytes=moved,
        busy=share(
            sum(network.busy_ns(port) for port in ports),
            duration * len(ports),
            "nanoseconds in which anything moved / nanoseconds of the run, times ways that were used",
        ),
        bandwidth=share(moved, whole * duration // SECOND, "bytes moved / bytes that could have moved in the run")
        if ports and None not in limits
        else None,
    )


def _roles(fleet: Fleet, duration: int) -> dict[str, RoleReport]:
    reports: dict[str, RoleReport] = {}
    for role in ("prefill", "decode", "both"):
        workers = [worker for worker in fleet.used if worker.role == role]
        if workers:
            busy = sum(max(core.busy_ns for core in worker.cores) for worker in workers)
            reports[role] = RoleReport(
                workers=len(workers),
                worker_seconds=len(workers) * duration / SECOND
                if fleet.autoscaler is None
                else fleet.autoscaler.on_seconds(role, fleet.now),
                busy=share(
                    busy, duration * len(workers), "nanoseconds in passes / nanoseconds of the run, times workers"
                ),
            )
    return reports
