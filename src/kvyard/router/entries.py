"""What a journal consists of: one small value for each thing that a router or its index was told. See ``journal``.

The tags are what files say, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, Union

import msgspec

from kvyard.engine.role import Role
from kvyard.events.transport import Origin, State, Update
from kvyard.index import Holder, Source
from kvyard.router.config import RouterConfig
from kvyard.router.request import Decision

FORMAT = "kvyard-journal/1"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="did", gc=False):
    """One line. ``at`` is the time that the router or the index was told, in nanoseconds."""

    at: int = 0


class Began(Entry, frozen=True, kw_only=True, omit_defaults=False, tag="began"):
    """The router was made."""

    config: RouterConfig
    seed: int
    block_size: int
    format: str = FORMAT


class Listening(Entry, frozen=True, kw_only=True, tag="listening"):
    """A stream's events count from now on, for a worker's rank or a pool."""

    source: Source


class Unheard(Entry, frozen=True, kw_only=True, tag="unheard"):
    """A stream and all it told is forgotten."""

    stream: str


class Shared(Entry, frozen=True, kw_only=True, tag="shared"):
    """What a pool holds is credited to these from now on."""

    pool: str
    members: tuple[Holder, ...] = ()


class Applied(Entry, frozen=True, kw_only=True, tag="applied"):
    """An update went into the index: a batch, or what a subscriber has to say of its stream."""

    stream: str
    topic: str = ""
    epoch: int = 0
    seq: int
    rank: int | None = None
    origin: Origin = Origin.LIVE
    state: State = State.FRESH
    dialect: str = ""
    """Of the wire; ``none`` where the subscriber itself speaks."""
    events: int = 0
    """How many."""
    reason: str = ""

    @classmethod
    def of(cls, update: Update, now: int) -> Applied:
        """The entry for ``update``, applied at ``now``."""
        said = {name: getattr(update, name) for name in cls.__struct_fields__ if name not in ("at", "events")}
        return cls(at=now, events=len(update.events), **said)


class Lost(Entry, frozen=True, kw_only=True, tag="lost"):
    """A stream was found to lack something, other than by its subscriber."""

    stream: str
    reason: str = ""


class Joined(Entry, frozen=True, kw_only=True, tag="joined"):
    """A worker may be chosen."""

    worker: Holder
    role: Role = "both"


class Drained(Entry, frozen=True, kw_only=True, tag="drained"):
    """A worker may be chosen no more."""

    worker: Holder


class Left(Entry, frozen=True, kw_only=True, tag="left"):
    """A worker is forgotten, and with it what it had under way."""

    worker: Holder
    under_way: tuple[str, ...] = ()


class Asked(Entry, frozen=True, kw_only=True):
    """What is said of a prompt."""

    id: str
    tokens: int
    blocks: int = 0
    tail: int = 0
    """The key of its last full block."""
    keys: tuple[int, ...] = ()
    """All keys, where the journal is ``whole``."""
    session: str | None = None
    expected_output: int | None = None


class Routed(Asked, frozen=True, kw_only=True, tag="routed"):
    """A request got a worker."""

    excluded: tuple[Holder, ...] = ()
    decision: Decision


class NotRouted(Asked, frozen=True, kw_only=True, tag="refused"):
    """A request got none."""

    excluded: tuple[Holder, ...] = ()
    why: str


class Previewed(Asked, frozen=True, kw_only=True, tag="previewed"):
    """``Router.preview`` was called. Nothing is booked, but predictions that are out of date are struck off."""

    excluded: tuple[Holder, ...] = ()


class Booked(Asked, frozen=True, kw_only=True, tag="booked"):
    """A request that another router has routed was taken in."""

    worker: Holder
    new_tokens: int | None = None


class FirstToken(Entry, frozen=True, kw_only=True, tag="first_token"):
    """A request's prompt was computed."""

    id: str


class Progressed(Entry, frozen=True, kw_only=True, tag="progressed"):
    """A request has so many tokens."""

    id: str
    output_tokens: int


class Ended(Entry, frozen=True, kw_only=True, tag="ended"):
    """A request was over, whichever way."""

    id: str


def number(key: int | bytes) -> int:
    """A key as a whole number; trace keys are numbers already, hashes of bytes are read as one."""
    return key if isinstance(key, int) else int.from_bytes(key, "big")


LINE: Any = Union[tuple({*Entry.__subclasses__(), *Asked.__subclasses__()} - {Asked})]  # noqa: UP007
"""Whatever a line can be."""
Journal: TypeAlias = Callable[[Entry], None]
"""Where entries go: a list's ``append``, or a ``JournalFile``'s ``write``."""
