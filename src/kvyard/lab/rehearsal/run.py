"""A rehearsal from a trace to its report: what ``kvyard replay --live self`` calls."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.lab.rehearsal.live_fleet import LiveFleet
from kvyard.lab.rehearsal.log import LiveRecording, RecordedPrompt, RunDifference, first_difference, tally
from kvyard.lab.rehearsal.offline import Offline, Prompts
from kvyard.replay.config import DrivingConfig, ReplayConfig
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.prompts import PromptMaker
from kvyard.replay.live.run import LiveRun, drive
from kvyard.replay.report import Slo
from kvyard.replay.report.numbers import Spread, spread
from kvyard.replay.run import Progress
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.settings import chosen


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a rehearsal."""

    run: LiveRun
    recording: LiveRecording | None = None
    proof: "Proof | None" = None


def rehearse(
    trace: str | Path | Trace | Iterable[TraceRequest],
    config: ReplayConfig,
    *,
    speed: float = 1.0,
    timeout_s: float = 600.0,
    proven: bool = False,
    tolerance: "Tolerance | None" = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    progress: Progress | None = None,
) -> Rehearsed:
    """Start the fleet that ``config`` describes with a gateway in front, drive it with ``trace``, and end both.

    With ``proven`` the run is repeated in virtual time from its stamps and sequences, and compared; a run that was interrupted
    isn't. Not to be called on a running event loop. Raises ``KvyardError``.
    """
    live = LiveConfig(speed=speed, timeout_s=timeout_s, **chosen(DrivingConfig, msgspec.structs.asdict(config)))
    live.check()
    if proven and not isinstance(trace, str | Path | Trace):
        trace = list(trace)  # it is looked at twice

    async def perform() -> tuple[LiveRun, LiveRecording | None]:
        fleet = LiveFleet(config, speed=live.speed, recorded=proven)
        async with fleet, Endpoint(fleet.url) as endpoint:
            run = await drive(
                trace,
                endpoint,
                live,
                clock=fleet.clock,
                slo=slo,
                label=label,
                progress=progress,
                settings=msgspec.json.decode(msgspec.json.encode(config)),
                name=f"a mock fleet, {config.router.policy}",
                longest=config.workers[0].engine.max_model_len,
            )
            if proven and run.complete:
                await fleet.rest()
        return run, fleet.recording() if proven and run.complete else None

    run, recording = asyncio.run(perform())
    if recording is None:
        return Rehearsed(run=run)
    rows = run.trace if isinstance(trace, str | Path) else trace
    assert rows is not None  # a file is a trace that can be read again
    prompts = Scripts(rows, live)
    proof = prove(recording, prompts.of, observed(run), tolerance)
    return Rehearsed(run=run, recording=recording, proof=proof)


def observed(run: LiveRun) -> "dict[str, Observed]":
    """Return the times at which clients saw tokens of finished requests, on the clock that the run was driven by."""
    origin = run.driver.origin
    return {
        record.id: Observed(origin + record.first_token, origin + record.ended)
        for record in run.records
        if record.status == "finished"
    }


class Scripts:
    """The prompts of a trace, made again as the driver made them. Rows are kept, tokens aren't."""

    def __init__(self, rows: Iterable[TraceRequest], config: LiveConfig) -> None:
        self._prompts = PromptMaker(config.seed, config.vocabulary)
        self._rows = {row.id: row for row in rows}

    def of(self, id_: str) -> RecordedPrompt:
        """Return the prompt of a request. Raises ``KvyardError`` if the trace has no such request."""
        row = self._rows.get(id_)
        if row is None:
            raise KvyardError(f"request {id_} was routed and isn't in the trace: drive the fleet with the trace alone")
        return RecordedPrompt(self._prompts.tokens(row), row.salt, row.session)


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Delay of a token at the client beyond virtual time, in real milliseconds."""

    p50_ms: float = 100.0
    p99_ms: float = 1000.0


class Observed(msgspec.Struct, frozen=True):
    """Times at which a client saw a request's first and last token, on the engines' clock."""

    first: int
    last: int


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a comparison."""

    difference: RunDifference | None
    """First difference of decisions; ``None`` if they are equal."""
    apart: str
    """Why virtual time couldn't follow to the end; empty where it could."""
    decisions: dict[str, int]
    """Compared decisions, by kind."""
    requests: int
    first_token: Spread
    """Delay of first tokens at clients beyond virtual time, in real milliseconds."""
    last_token: Spread
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """Return true if live and offline took equal decisions."""
        return self.difference is None and not self.apart

    @property
    def close(self) -> bool:
        """Return true if latencies agree: never shorter than in virtual time, and longer only within the tolerance."""
        return all(
            spread.min >= 0 and spread.p50 <= self.tolerance.p50_ms and spread.p99 <= self.tolerance.p99_ms
            for spread in (self.first_token, self.last_token)
        )

    def __str__(self) -> str:
        if not self.equal:
            why = str(self.difference) if self.difference is not None else self.apart
            return f"Live is not offline: {why}."
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.decisions.items()))
        total = sum(self.decisions.values())
        first, last, most = self.first_token, self.last_token, self.tolerance
        return (
            f"Live = offline: all {total:,} decisions of {self.requests:,} requests are equal ({counts}).\n"
            f"Clients saw first tokens {first.p50:.1f} ms later than virtual time (median; p99 {first.p99:.1f} ms), last ones "
            f"{last.p50:.1f} ms (p99 {last.p99:.1f} ms), in real time; {'within' if self.close else 'NOT within'} the "
            f"tolerance of {most.p50_ms:g} ms and {most.p99_ms:g} ms."
        )


def prove(
    recording: LiveRecording,
    prompts: Prompts,
    observed: Mapping[str, Observed] | None = None,
    tolerance: Tolerance | None = None,
) -> Proof:
    """Repeat ``recording`` in virtual time and compare. ``observed`` is what clients saw, of requests that finished.

    Raises ``KvyardError`` for a recording that can't be repeated.
    """
    offline = Offline(recording, prompts)
    offline.run()
    log = offline.log
    difference = first_difference(recording.log, log)
    first, last = offline.first, offline.last
    speed = recording.fleet.speed
    seen = {} if difference is not None or offline.apart else dict(observed or {})
    missing = [name for name in seen if name not in first or name not in last]
    if missing:
        raise KvyardError(f"clients saw answers to requests that no engine had, {missing[0]} first: was it this fleet?")
    return Proof(
        difference=difference,
        apart=offline.apart,
        decisions=dict(tally(recording.log)),
        requests=len(recording.first),
        first_token=spread([(times.first - first[name]) / speed for name, times in seen.items()], MS),
        last_token=spread([(times.last - last[name]) / speed for name, times in seen.items()], MS),
        tolerance=tolerance or Tolerance(),
    )
