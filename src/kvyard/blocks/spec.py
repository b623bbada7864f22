"""Group specifications: what kind of attention a group of layers has and how large its blocks are.

A spec is a value and knows no request. An ``Attention`` has the rules of its kind; ``ATTENTION`` has one for each kind. An
installed package adds its own by an entry point of the group ``kvyard.attention``, a program by ``ATTENTION.register``.
"""

from collections.abc import Callable

import msgspec

from kvyard.blocks.rule import Rule
from kvyard.errors import KvyardError, suggest
from kvyard.events.types import GroupMeta
from kvyard.registry import Registry


class ConfigError(KvyardError, ValueError):
    """An impossible configuration. The message names the value, and values that would work."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a kind of attention."""

    wire: str
    """Name in events."""
    also_wire: tuple[str, ...] = ()
    """Other names in events that mean the same to a cache."""
    rule: "Callable[[GroupSpec], Rule]"
    """Rule of a (checked) group of this kind, as pure functions of positions."""
    group_class: "Callable[[GroupSpec, bool, int], type[object]] | None" = None
    """Returns the class derived from ``Group`` for a spec, given whether there is caching and the tokens per hash."""
    fields: tuple[str, ...] = ()
    """The fields of a ``GroupSpec``, beyond those of every kind, that it goes by: ``window``, ``chunk``, ``mode``, ..."""
    check: "Callable[[GroupSpec, str], None] | None" = None
    """Raises ``ConfigError``, naming the place, where those make no sense."""
    is_full: bool = False
    """True if every earlier token stays visible and hits are plain prefixes."""
    is_window: bool = False
    is_state: bool = False
    """True if a block holds a state: one at a boundary is all that a hit needs."""
    cacheable: bool = True
    scratch: bool = False
    """True if it may stand beside cached groups, and nothing is cached: its blocks don't follow positions."""
    needs_one_size: bool = False
    """True if it can be cached only where all groups have one block size."""
    drafts: bool = True
    """True if it can be cached next to a draft head."""


_HERE = "kvyard.blocks.attention"
ATTENTION: Registry[Attention] = Registry(
    "attention kind",
    "kvyard.attention",
    {
        "full": f"{_HERE}.full:FULL",
        "mla": f"{_HERE}.full:MLA",
        "sliding_window": f"{_HERE}.window:SLIDING_WINDOW",
        "sliding_window_mla": f"{_HERE}.window:SLIDING_WINDOW_MLA",
        "chunked_local": f"{_HERE}.chunked:CHUNKED_LOCAL",
        "mamba": f"{_HERE}.state:MAMBA",
        "cross": f"{_HERE}.cross:CROSS",
        "ring": f"{_HERE}.ring:RING",
    },
)


def kind_on_wire(wire: str) -> str | None:
    """Return the kind that events call ``wire``, if it is one that can be cached."""
    for name in ATTENTION.names():
        try:
            kind = ATTENTION.get(name)
        except KvyardError:
            continue  # of an installed package, and broken: using it by name says so
        if kind.cacheable and (wire == kind.wire or wire in kind.also_wire):
            return name
    return None


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layers that share a block table."""

    kind: str = "full"
    block_size: int = 16
    window: int | None = None
    """Tokens a sliding window sees, the current one included."""
    chunk: int | None = None
    """Tokens of a chunk of chunked-local attention."""
    mode: str = "align"
    """Retention of states in a state (Mamba) group: ``none``, ``all`` or ``align``."""
    spec_blocks: int = 0
    """Extra state blocks for speculative decoding."""
    checkpoint_unit: int | None = None
    """Tokens between the states that a backend can write inside a chunk of a prompt; ``None``: it writes only the state that
    the chunk ends with. For mode ``align``."""
    cached: bool = True
    """False if its blocks are never cached, beside groups whose are: an engine that computes its part of a hit again."""
    eagle: bool = False
    """True if a draft head reads this group, so that the last hit block must be computed again."""

    @property
    def attention(self) -> Attention:
        """Return the properties of its kind. Raises ``KvyardError`` for an unknown one."""
        return ATTENTION.get(self.kind)

    def rule(self) -> Rule:
        """Return its rule, as pure functions of positions."""
        return self.attention.rule(self)

    @property
    def is_full(self) -> bool:
        """Return true if every earlier token stays visible and hits are plain prefixes."""
        return self.attention.is_full

    @property
    def shares(self) -> bool:
        """Return true if requests find blocks of this group cached."""
        return self.cached and self.attention.cacheable

    @property
    def is_state(self) -> bool:
        return self.attention.is_state

    @property
    def meta(self) -> GroupMeta:
        """Return the properties that events have of this group."""
        return GroupMeta(block_size=self.block_size, kind=self.attention.wire, window=self.window)

    def check(self, where: str) -> None:
        """Raise ``ConfigError``, naming ``where``, if this spec makes no sense by itself."""
        if self.kind not in ATTENTION:
            raise ConfigError(f"{where}: unknown kind {self.kind!r}: {suggest(self.kind, ATTENTION.names())}")
        if self.block_size < 1:
            raise ConfigError(f"{where}: block_size must be at least 1, got {self.block_size}")
        kind = self.attention
        if kind.check is not None:
            kind.check(self, where)
        for field, default in (
            ("window", None),
            ("chunk", None),
            ("mode", "align"),
            ("spec_blocks", 0),
            ("checkpoint_unit", None),
        ):
            if field not in kind.fields and getattr(self, field) != default:
                other = next(name for name in ATTENTION.names() if field in ATTENTION.get(name).fields)
                raise ConfigError(f"{where}: a {self.kind} group has no {field}; leave it out or choose {other}")
