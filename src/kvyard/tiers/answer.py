"""What lower tiers answer when a request asks them for its prefix."""

from __future__ import annotations

from enum import Enum

import msgspec


class LoadStep(Enum):
    """What came of asking the lower tiers."""

    NOTHING = "nothing"
    """They have nothing that the device lacks: go on without them."""
    STARTED = "started"
    """A load is on its way and the request has its blocks: wait until ``tick`` returns it."""
    WAITING = "waiting"
    """What it needs is on its way up: look it up and ask again when something has landed."""
    NO_ROOM = "no room"
    """The device has no room for the load: the same as a failed allocation."""


class LoadAnswer(msgspec.Struct, frozen=True):
    """The answer of ``onboard``."""

    step: LoadStep
    tokens: int = 0
    """Started: how many tokens the load brings, after the hit."""
    by_tier: tuple[int, ...] = ()
    """Started: the same by the tier that had them, closest to the device first."""
    deadline: int | None = None
    """Started, waiting: when the next copy lands, as things stand."""


NOTHING = LoadAnswer(LoadStep.NOTHING)
NO_ROOM = LoadAnswer(LoadStep.NO_ROOM)
