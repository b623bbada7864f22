"""``kvyard replay --live``: the same trace against a live endpoint, or against a mock fleet started for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig
from kvyard.settings import settings_of

if TYPE_CHECKING:
    from kvyard.server.rehearsal.proof import Proof

SELF = "self"
AT_AN_ENDPOINT = ("served_model_name", "token_file", "any_length")
"""Flags for ``--live URL`` only."""
NOT_LIVE = {
    "event_lag": "events take the time that sockets take",
    "plans": "a live engine computes one pass at a time",
    "samples": "a live report has no timeline of the fleet",
}
"""Settings that only a simulation has."""
DIFFERS = 1
"""The exit code where live and offline differ."""


def check_flags(live: str | None, settings: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise ``KvyardError``, naming it, for a flag that makes no sense with or without ``--live``.

    ``given`` has the flags of live runs, and ``bounds``, false or ``None`` where they weren't used.
    """
    used = {name for name, value in given.items() if value is not None and value is not False}
    if live is None:
        for name in ("speed", "timeout", *AT_AN_ENDPOINT, "prove"):
            if name in used:
                raise KvyardError(f"--{name.replace('_', '-')} is for live runs: add --live URL, or --live self")
        return
    if "bounds" in used:
        raise KvyardError("--bounds needs a simulated run: leave it out with --live")
    for name in settings:
        if name in NOT_LIVE:
            raise KvyardError(f"{name} can't be set with --live: {NOT_LIVE[name]}")
        if live != SELF and name not in settings_of(DrivingConfig):
            raise KvyardError(
                f"{name} is the endpoint's own business: leave it out with --live URL, or use --live self for a fleet with it"
            )
    for name in AT_AN_ENDPOINT:
        if live == SELF and name in used:
            raise KvyardError(f"--{name.replace('_', '-')} is for --live URL: the fleet of --live self needs none")
    if live != SELF and "prove" in used:
        raise KvyardError("--prove needs to see the engines' clocks: it goes with --live self only")


def say_proof(proof: Proof | None) -> None:
    """Print what the proof found; exits with ``DIFFERS`` where live and offline differ."""
    if proof is None:
        typer.echo("Interrupted: there is nothing to prove.", err=True)
        return
    typer.echo(str(proof))
    if not proof.equal:
        raise typer.Exit(DIFFERS)
