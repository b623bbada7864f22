"""``kvyard replay --live``: the same trace against a live endpoint, or against a mock fleet started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvyard.cli.serving import read_token
from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig
from kvyard.settings import settings_of

if TYPE_CHECKING:
    from kvyard.replay.live.run import LiveRun
    from kvyard.replay.traces import Trace
    from kvyard.server.rehearsal.run import Rehearsed

SELF = "self"
NOT_LIVE = {
    "event_lag": "events take the time that sockets take",
    "plans": "a live engine computes one pass at a time",
    "samples": "a live report has no timeline of the fleet",
}
"""Settings that only a simulation has."""
DIFFERS = 1
"""The exit code where live and offline differ."""


def check_flags(live: str | None, settings: Mapping[str, object], given: Mapping[str, bool]) -> None:
    """Raise ``KvyardError``, naming it, for a flag that makes no sense with or without ``--live``.

    ``given`` says of the flags of live runs, and of ``bounds``, whether they were used.
    """
    if live is None:
        for name in ("speed", "timeout", "served_model_name", "token_file", "any_length", "prove"):
            if given[name]:
                raise KvyardError(f"--{name.replace('_', '-')} is for live runs: add --live URL, or --live self")
        return
    if given["bounds"]:
        raise KvyardError("--bounds needs a simulated run: leave it out with --live")
    for name in settings:
        if name in NOT_LIVE:
            raise KvyardError(f"{name} can't be set with --live: {NOT_LIVE[name]}")
        if live != SELF and name not in settings_of(DrivingConfig):
            raise KvyardError(
                f"{name} is the endpoint's own business: leave it out with --live URL, or use --live self for a fleet with it"
            )
    for name in ("served_model_name", "token_file", "any_length"):
        if live == SELF and given[name]:
            raise KvyardError(f"--{name.replace('_', '-')} is for --live URL: the fleet of --live self needs none")
    if live != SELF and given["prove"]:
        raise KvyardError("--prove needs to see the engines' clocks: it goes with --live self only")


def run_live(
    live: str,
    source: Trace,
    settings: Mapping[str, object],
    *,
    slo: str | None,
    label: str,
    speed: float,
    timeout: float,
    served_model_name: str | None,
    token_file: Path | None,
    any_length: bool,
    prove: bool,
    progress: Callable[[int, int, int], None] | None,
) -> tuple[LiveRun, Rehearsed | None]:
    """Drive ``source`` at an endpoint, or at a fleet of its own. Raises ``KvyardError``."""
    from kvyard.replay.settings import make_config

    if live == SELF:
        from kvyard.server.rehearsal.run import rehearse

        done = rehearse(
            source,
            make_config(settings),
            speed=speed,
            timeout_s=timeout,
            proven=prove,
            slo=slo,
            label=label,
            progress=progress,
        )
        return done.run, done
    from kvyard.replay.live.config import LiveConfig
    from kvyard.replay.live.run import replay_live
    from kvyard.replay.settings import SETTINGS

    driving: dict[str, Any] = SETTINGS.parse(settings)
    config = LiveConfig(model=served_model_name, speed=speed, timeout_s=timeout, exact=not any_length, **driving)
    token = read_token(token_file)
    return replay_live(source, live, config, token=token, slo=slo, label=label, progress=progress), None


def say_proof(done: Rehearsed) -> None:
    """Print what the proof found; exits with ``DIFFERS`` where live and offline differ."""
    proof = done.proof
    if proof is None:
        typer.echo("Interrupted: there is nothing to prove.", err=True)
        return
    typer.echo(str(proof))
    if not proof.equal:
        raise typer.Exit(DIFFERS)
