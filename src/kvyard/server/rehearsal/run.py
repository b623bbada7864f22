"""A rehearsal from a trace to its report: what ``kvyard replay --live self`` calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig, ReplayConfig
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.prompts import PromptMaker
from kvyard.replay.live.run import LiveRun, drive
from kvyard.replay.report import Slo
from kvyard.replay.run import Told
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.server.rehearsal.live_fleet import LiveFleet
from kvyard.server.rehearsal.proof import Observed, Proof, Tolerance, prove
from kvyard.server.rehearsal.recording import LiveRecording, RecordedPrompt
from kvyard.settings import chosen


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """What a rehearsal left."""

    run: LiveRun
    recording: LiveRecording | None = None
    proof: Proof | None = None


def rehearse(
    trace: str | Path | Trace | Iterable[TraceRequest],
    config: ReplayConfig,
    *,
    speed: float = 1.0,
    timeout_s: float = 600.0,
    proven: bool = False,
    tolerance: Tolerance | None = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    progress: Told | None = None,
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


def observed(run: LiveRun) -> dict[str, Observed]:
    """When clients saw tokens of requests that finished, on the clock that the run was driven by."""
    origin = run.driver.origin
    return {
        record.id: Observed(origin + record.first_token, origin + record.ended)
        for record in run.records
        if record.status == "finished"
    }


class Scripts:
    """The prompts of a trace, made anew as the driver made them. Rows are kept, tokens aren't."""

    def __init__(self, rows: Iterable[TraceRequest], config: LiveConfig) -> None:
        self._prompts = PromptMaker(config.seed, config.vocabulary)
        self._rows = {row.id: row for row in rows}

    def of(self, id_: str) -> RecordedPrompt:
        """One of them. Raises ``KvyardError`` where the trace has no such request."""
        row = self._rows.get(id_)
        if row is None:
            raise KvyardError(f"request {id_} was routed and isn't in the trace: drive the fleet with the trace alone")
        return RecordedPrompt(self._prompts.tokens(row), row.salt, row.session)
