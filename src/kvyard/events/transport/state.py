"""Output of a subscriber: the state of each stream, updates to apply, and counters of everything that went wrong."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.events.types import Event
from kvyard.events.wire import Problem


class State(StrEnum):
    """Trustworthiness of a stream."""

    FRESH = "fresh"
    """Everything that was published has been applied, as far as can be known."""
    CATCHING_UP = "catching up"
    """Something is missing and being fetched; new batches wait for it."""
    STALE = "stale"
    """Something is missing and can't be had. New batches are passed on, but what they add up to may be wrong."""


class Origin(StrEnum):
    """Origin of an update."""

    LIVE = "live"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"
    RESET = "reset"
    """The publisher restarted: what it held is gone."""
    STATE = "state"
    """Only the state changed."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Next change to apply. Applied in order, updates of a fresh stream add up to the publisher's map."""

    stream: str
    topic: str
    epoch: int
    """Counts the publisher's restarts that were noticed."""
    seq: int
    """The batch's sequence; in a snapshot, reset or change of state that of the last batch before it."""
    origin: Origin
    state: State
    events: Sequence[Event] = msgspec.field(default_factory=list)
    """Packed (``kvyard.events.packed``) where there are very many."""
    ts: float = 0.0
    rank: int | None = None
    dialect: str = "none"
    problems: list[Problem] = msgspec.field(default_factory=list)
    reason: str = ""
    """Why the state is what it is, where it isn't fresh."""
    replaces: bool = False
    """True if everything received from the stream before is void, on every tier, and ``events`` begin afresh: a restart, a
    snapshot, or a start after batches that are unavailable."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Patience and room, in nanoseconds and counts."""

    patience: int = 100 * MS
    """Nanoseconds for which a missing batch may merely be late if it can't be requested."""
    reply: int = 2 * SECOND
    """Silence after which a request has failed."""
    attempts: int = 3
    """Tries per kind of request before the next kind."""
    cooldown: int = 30 * SECOND
    """Until a stale stream tries again."""
    probe: int = 2 * SECOND
    """Silence after which the publisher is asked whether something was missed; it doubles while nothing was. 0: never."""
    probe_most: int = 30 * SECOND
    """Longest time between two probes, with or without traffic."""
    held_batches: int = 10_000
    """Batches that may wait while something is fetched."""
    held_bytes: int = 64 << 20
    held_in_all: int = 1 << 30
    """Bytes of early batches of all streams of a subscription."""
    snapshot_bytes: int = 256 << 20
    """Bytes of a snapshot, of which a part counts for 4 KiB at least."""
    remembered: int = 4096
    """Batches whose fingerprints are kept, to distinguish a repetition from a restart."""


class FollowerCounters(msgspec.Struct):
    """Counters of one stream."""

    frames: int = 0
    batches: int = 0
    """Applied, from wherever they came."""
    events: int = 0
    duplicates: int = 0
    late: int = 0
    """Batches that arrived after one that follows them."""
    covered: int = 0
    """Live batches that a replay or snapshot had brought already."""
    gaps: int = 0
    missed: int = 0
    """Sequence numbers that were missing when a gap was seen."""
    healed: int = 0
    """Gaps closed by a batch that cleared everything."""
    damaged: int = 0
    """Payloads that could not be read in full."""
    restarts: int = 0
    mismatches: int = 0
    """Times that what was received turned out to differ from what was sent."""
    impossible: int = 0
    """Batches thrown away because the publisher had not got that far."""
    replays: int = 0
    replayed: int = 0
    """Batches applied from replay."""
    snapshots: int = 0
    probes: int = 0
    timeouts: int = 0
    late_replies: int = 0
    foreign: int = 0
    """Replies about another topic."""
    overflows: int = 0
    """Times that too much had to wait."""
    gave_up: int = 0
    """Times that the stream became stale."""


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A look at one stream."""

    stream: str
    topic: str
    state: State
    reason: str
    epoch: int
    publisher_epoch: int | None
    seq: int
    held: int
    """Batches that wait."""
    counters: FollowerCounters
