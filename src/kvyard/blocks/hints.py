"""Hints: a client's knowledge about the later use of a request's blocks, which the engine can't have.

There are three: the session is over with this request; it comes back within some time (a tool is running); ranges of tokens
have a priority. What each does to the order of eviction is in ``kvyard.blocks.ownership`` and
``kvyard.blocks.eviction.priority``. Hints change the order of eviction, never what is found or computed.
"""

from typing import Literal

import msgspec

from kvyard.blocks.spec import ConfigError


class Retention(msgspec.Struct, frozen=True):
    """A wish to keep the tokens ``start`` to ``stop`` (``None``: to the end) longer than others."""

    start: int
    stop: int | None
    priority: int
    duration: int | None = None
    """Nanoseconds the wish lasts once the blocks are free; ``None`` for ever."""

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ConfigError(f"a retention range needs at least one token, from 0 on; not {self.start} to {self.stop}")
        if not 0 <= self.priority <= 100:
            raise ConfigError(f"a retention priority is from 0 to 100, got {self.priority}")
        if self.duration is not None and self.duration < 0:
            raise ConfigError(f"a retention lasts 0 ns or longer, got {self.duration}")


class Hints(msgspec.Struct, frozen=True):
    """The hints of one request. Raises ``ConfigError`` for contradicting hints."""

    session: str = ""
    """Session that owns its blocks. Without a name a request is a session of its own."""
    session_end: bool = False
    """No request of the session comes after this one: blocks that no other session has used are evicted first."""
    ttl: int | None = None
    """Nanoseconds after this request within which the session continues: its blocks are evicted last until then."""
    ttl_then: Literal["ordinary", "first"] = "ordinary"
    """Priority of its blocks once that time has passed: ordinary, or, if no other session has used them, first to go."""
    retention: tuple[Retention, ...] = ()
    """Value of ranges of its tokens; for a token in several ranges the last one counts."""

    def __post_init__(self) -> None:
        if "\0" in self.session:
            raise ConfigError("the name of a session must not have a NUL in it")
        if self.ttl is not None and self.ttl <= 0:
            raise ConfigError(f"a time to live is above 0 ns, got {self.ttl}")
        if self.ttl is not None and self.session_end:
            raise ConfigError("a session that is over doesn't come back: say session_end or ttl, not both")
        if self.ttl is None and self.ttl_then != "ordinary":
            raise ConfigError(f"ttl_then is {self.ttl_then} without a ttl: say both or neither")

    @property
    def marks(self) -> bool:
        """Return true if they concern the blocks of the session as a whole."""
        return self.session_end or self.ttl is not None


NO_HINTS = Hints()
