"""What a fleet with roles says beyond others: where time went between prefill and decode, the network, and the cost of each
role.
"""

from collections.abc import Iterable

from kvyard.clock import MS, SECOND
from kvyard.replay.record import Record
from kvyard.replay.report.numbers import spread
from kvyard.replay.report.report import HandoverReport, LinkUse, RoleReport, share
from kvyard.replay.report.words import STAGES
from kvyard.replay.split_fleet import SplitFleet

_EARLY = ("room", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step")


def stage_times(record: Record) -> list[tuple[str, int]]:
    """Nanoseconds that a finished request, which was handed over, spent in each stage; together they are its TTFT."""
    stages = record.stages
    assert stages is not None
    arrived = (stages.activated, stages.entered, record.first_token)
    names: Iterable[str] = STAGES
    marks = (record.admitted, stages.held, stages.reserved, *arrived)
    if stages.reserved < stages.held:  # room was made first, and the prompt waited for that
        names, marks = _EARLY, (stages.reserved, record.admitted, stages.held, *arrived)
    return [(name, mark - before) for name, before, mark in zip(names, (record.arrival, *marks), marks)]


def make_handovers(fleet: SplitFleet, duration: int) -> HandoverReport:
    """What happened between the roles of ``fleet``. ``duration`` is the run's, in nanoseconds."""
    records = [record for record in fleet.records.values() if record.stages is not None and record.status == "finished"]
    times: dict[str, list[int]] = {name: [] for name in STAGES}
    for record in records:
        for name, spent in stage_times(record):
            times[name].append(spent)
    sent = [record.stages.sent for record in records if record.stages is not None]
    queued = [record.stages.queued for record in records if record.stages is not None]
    chosen = fleet.handed_over + fleet.kept
    return HandoverReport(
        decider=fleet.config.handover.decider,
        protocol=fleet.config.handover.protocol,
        handed_over=share(fleet.handed_over, chosen, "requests sent to a prefill worker first / decisions"),
        stages={name: spread(values, MS) for name, values in times.items()},
        bytes=sum(sent),
        waiting_ms=sum(queued) / MS,
        network={name: _use(fleet, kind, duration) for name, kind in _ways(fleet)},
        roles=_roles(fleet, duration),
    )


def _ways(fleet: SplitFleet) -> Iterable[tuple[str, str]]:
    yield "out of workers", "out"
    yield "into workers", "in"
    if fleet.config.handover.node_bandwidth is not None:
        yield "out of nodes", "node out"
        yield "into nodes", "node in"
    if fleet.config.handover.bus_bandwidth is not None:
        yield "out of devices", "bus out"
        yield "into devices", "bus in"


def _use(fleet: SplitFleet, kind: str, duration: int) -> LinkUse:
    """Of the ports of a kind through which anything went."""
    network = fleet.handovers.network
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


def _roles(fleet: SplitFleet, duration: int) -> dict[str, RoleReport]:
    found: dict[str, RoleReport] = {}
    for role in ("prefill", "decode", "both"):
        workers = [worker for worker in fleet.used if worker.role == role]
        if workers:
            busy = sum(max(core.busy_ns for core in worker.cores) for worker in workers)
            found[role] = RoleReport(
                workers=len(workers),
                worker_seconds=len(workers) * duration / SECOND
                if fleet.scaling is None
                else fleet.scaling.on_seconds(role, fleet.now),
                busy=share(
                    busy, duration * len(workers), "nanoseconds in passes / nanoseconds of the run, times workers"
                ),
            )
    return found
