"""What comes of asking lower tiers for a request."""

from __future__ import annotations

from enum import Enum

import msgspec


class Step(Enum):
    """What came of asking the lower tiers."""

    NOTHING = "nothing"
    """They have nothing that the device lacks: go on without them."""
    STARTED = "started"
    """A load is on its way and the request has its blocks: wait until ``tick`` returns it."""
    WAITING = "waiting"
    """What it needs is on the way to the host: look it up and ask again when something has landed."""
    NO_ROOM = "no room"
    """The device has no room for the load: the same as a failed allocation."""


class Outcome(msgspec.Struct, frozen=True):
    """The answer of ``onboard``."""

    step: Step
    tokens: int = 0
    """Started: how many tokens the load brings, after the hit."""
    storage_tokens: int = 0
    """Started: how many of them storage had and the host didn't."""
    deadline: int | None = None
    """Started, waiting: when the next copy lands, as things stand."""


NOTHING = Outcome(Step.NOTHING)
NO_ROOM = Outcome(Step.NO_ROOM)
