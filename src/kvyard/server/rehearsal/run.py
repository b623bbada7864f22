"""A rehearsal from a trace to its report: what ``kvyard replay --live self`` calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig
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
    live = LiveConfig(
        speedup=config.speedup,
        speed=speed,
        concurrency=config.concurrency,
        limit=config.limit,
        timeout_s=timeout_s,
        seed=config.seed,
    )
    live.check()
    if proven and not isinstance(trace, str | Path | Trace):
        trace = list(trace)  # it is looked at twice
    run, recording = asyncio.run(_perform(trace, config, live, proven, slo, label, progress))
    if recording is None or not run.complete:
        return Rehearsed(run=run)
    prompts = Scripts(run.trace or trace, live)  # type: ignore[arg-type]
    proof = prove(recording, prompts.of, observed(run), tolerance)
    return Rehearsed(run=run, recording=recording, proof=proof)


async def _perform(
    trace: str | Path | Trace | Iterable[TraceRequest],
    config: ReplayConfig,
    live: LiveConfig,
    recorded: bool,
    slo: Slo | Mapping[str, float] | str | None,
    label: str,
    progress: Told | None,
) -> tuple[LiveRun, LiveRecording | None]:
    stage = LiveFleet(config, speed=live.speed, recorded=recorded)
    async with stage, Endpoint(stage.url) as endpoint:
        run = await drive(
            trace,
            endpoint,
            live,
            clock=stage.clock,
            slo=slo,
            label=label,
            progress=progress,
            settings=msgspec.json.decode(msgspec.json.encode(config)),
            name=f"a mock fleet, {config.router.policy}",
        )
        if recorded and run.complete:
            await stage.rest()
    return run, stage.recording() if recorded and run.complete else None


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
