"""The catalog: which attention groups each holder has, as configured or as its events say.

With it the scorer knows that a window's copies serve a hit only at its end, and a state's only on its boundary. Nothing is
guessed: a holder with a group of an unknown kind can't be scored, and ``layout`` returns the reason.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvyard.blocks.geometry import resolve_geometry
from kvyard.blocks.spec import ATTENTION, ConfigError, GroupSpec, kind_on_wire
from kvyard.errors import KvyardError
from kvyard.events.types import Stored
from kvyard.index.places import Holder


class GroupLayout(msgspec.Struct, frozen=True):
    """A holder's groups, ready for the rules."""

    groups: tuple[int | None, ...]
    """The groups as events name them."""
    specs: tuple[GroupSpec, ...]
    alignment: int
    """Tokens: hits end on a multiple of it."""

    @property
    def is_plain(self) -> bool:
        """Return true if a hit is an unbroken prefix in every group."""
        return all(spec.is_full and not spec.eagle for spec in self.specs)


class Catalog:
    """Layouts by holder. ``version`` goes up when any changes."""

    def __init__(self) -> None:
        self.version = 0
        self._fixed: dict[Holder, GroupLayout] = {}
        self._layouts: dict[tuple[tuple[GroupSpec, ...], int | None], GroupLayout] = {}
        """Layouts of all configured workers, each once: workers of a fleet are alike."""
        self._seen: dict[Holder, dict[int | None, GroupSpec | None]] = {}
        self._cache: dict[Holder, GroupLayout | str] = {}

    def configure(self, holder: Holder, specs: Sequence[GroupSpec], alignment: int | None = None) -> None:
        """Configure the groups of ``holder``, which overrule its events. Raises ``ConfigError`` for ones that can't be.

        ``alignment`` is the engine's scheduler block size, if it isn't the common multiple of the groups'.
        """
        wanted = (tuple(specs), alignment)
        layout = self._layouts.get(wanted)
        if layout is None:
            layout = self._layouts[wanted] = _layout(tuple(range(len(specs))), tuple(specs), alignment)
        self._fixed[holder] = layout
        self._changed(holder)

    def forget(self, holder: Holder) -> None:
        """Forget the groups of ``holder``."""
        self._fixed.pop(holder, None)
        self._seen.pop(holder, None)
        self._changed(holder)

    def learn(self, holder: Holder, event: Stored, size: int = 0) -> None:
        """Take note of what ``event`` says of its group; ``size`` is the block size if it doesn't say."""
        seen = self._seen.setdefault(holder, {})
        known = seen.get(event.group)
        if known is not None and event.block_size <= known.block_size:
            return
        spec = self._read(event, known, size)
        if spec != known or event.group not in seen:
            seen[event.group] = spec
            self._changed(holder)

    def learned(self, holder: Holder) -> dict[int | None, GroupSpec | None]:
        """Return the holder's groups as learned from events, ``None`` where the events weren't sufficient."""
        return dict(self._seen.get(holder, {}))

    def adopt(self, holder: Holder, groups: Mapping[int | None, GroupSpec | None]) -> None:
        """``holder`` has the groups that another index learned of."""
        if self._seen.get(holder, {}) != groups:
            self._seen[holder] = dict(groups)
            self._changed(holder)

    def group(self, holder: Holder, group: int | None) -> int | None:
        """Return the group as the holder's layout names it: of a single configured group an event need not say which it is."""
        fixed = self._fixed.get(holder)
        return 0 if fixed is not None and len(fixed.groups) == 1 else group

    def spec(self, holder: Holder, group: int | None) -> GroupSpec | None:
        """Return the specification of one group, if known."""
        fixed = self._fixed.get(holder)
        if fixed is not None:
            return fixed.specs[fixed.groups.index(group)] if group in fixed.groups else None
        return self._seen.get(holder, {}).get(group)

    def configured(self, holder: Holder) -> GroupLayout | None:
        """Return the holder's groups if they are configured: events that name no group then mean all of them."""
        return self._fixed.get(holder)

    def layout(self, holder: Holder) -> GroupLayout | str:
        """Return the holder's groups; if nothing is known, or something isn't known well enough, a sentence that says so."""
        layout = self._fixed.get(holder) or self._cache.get(holder)
        if layout is None:
            layout = self._cache[holder] = self._work_out(holder)
        return layout

    def _work_out(self, holder: Holder) -> GroupLayout | str:
        seen = self._seen.get(holder)
        if not seen:
            return "none of its groups is known yet"
        if None in seen and len(seen) > 1:
            return "some of its events name a group and others don't"
        groups = sorted(seen, key=lambda group: -1 if group is None else group)
        if groups[0] is not None and groups != list(range(len(groups))):
            return f"it has a group {groups[-1]} but not all groups before it were announced"
        unknown = [group for group in groups if seen[group] is None]
        if unknown:
            return f"group {unknown[0]} is of a kind that isn't known"
        try:
            return _layout(tuple(groups), tuple(spec for group in groups if (spec := seen[group]) is not None))
        except ConfigError as error:
            return str(error)

    def _read(self, event: Stored, known: GroupSpec | None, size: int) -> GroupSpec | None:
        size = max(event.block_size or size, known.block_size if known is not None else 0)
        if event.kind is None and known is not None:
            return msgspec.structs.replace(known, block_size=size)
        # Engines that name no group have one, and it is full attention.
        kind = "full" if event.kind is None and event.group is None else kind_on_wire(event.kind or "")
        if kind is None or size < 1:
            return None
        spec = GroupSpec(
            kind=kind, block_size=size, window=event.window if "window" in ATTENTION.get(kind).fields else None
        )
        try:
            spec.check("group")
        except KvyardError:
            return None  # a window without its length, a chunk without its size
        return spec

    def _changed(self, holder: Holder) -> None:
        self._cache.pop(holder, None)
        self.version += 1


def _layout(groups: tuple[int | None, ...], specs: tuple[GroupSpec, ...], alignment: int | None = None) -> GroupLayout:
    return GroupLayout(groups, specs, resolve_geometry(specs, scheduler_block_size=alignment).scheduler_block_size)
