"""A registry: what can be chosen by name, ours and other people's. Each extension point of kvyard is one of these.

Ours is a table from name to ``"module:attribute"``, so that listing names imports nothing. An installed package adds to it by a
Python entry point in the registry's group, a program or a test by ``register``. An entry states its options once, in
``OPTIONS``; the registry checks what people set, so entries receive values within bounds.
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from math import inf
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from kvyard.errors import KvyardError, suggest

T = TypeVar("T")


class Option(NamedTuple):
    """A number that people may set of an entry."""

    default: float
    help: str = ""
    """One sentence, with the unit."""
    least: float = 0.0
    most: float = inf
    """Infinity itself is refused."""
    positive: bool = False
    """True if 0 is refused."""

    def check(self, name: str, value: float, error: Callable[[str], Exception] = KvyardError) -> None:
        """Raise ``error`` with one sentence unless ``value`` is within bounds; ``name`` begins it."""
        given: object = value
        if not isinstance(given, int | float) or isinstance(given, bool):
            raise error(f"{name} must be a number, got {given!r:.100}")
        if self.most < inf and not self.least <= value <= self.most:
            raise error(f"{name} must be from {self.least:g} to {self.most:g}, got {value:g}")
        if self.positive and not 0 < value < inf:
            raise error(f"{name} must be more than 0, got {value:g}")
        if not self.least <= value < inf:
            raise error(f"{name} must be at least {self.least:g}, got {value:g}")


Options: TypeAlias = Mapping[str, Option | float]
"""An entry's ``OPTIONS``, by name. A plain number is the default of an option with nothing else to say."""


def defaults(options: Options) -> dict[str, float]:
    """Return the default of each option."""
    return {name: option.default if isinstance(option, Option) else option for name, option in options.items()}


class Registry(Generic[T]):
    """Choices of one kind, by name."""

    def __init__(
        self,
        what: str,
        group: str,
        ours: Mapping[str, str],
        *,
        error: Callable[[str], Exception] = KvyardError,
        by_path: bool = False,
    ) -> None:
        """``what`` is the noun for refusals ("routing policy"); ``group`` the entry points' group ("kvyard.policies").

        ``error`` is raised for names and options that people got wrong. With ``by_path`` a name such as
        ``package.module:Class`` is imported.
        """
        self.what = what
        self.group = group
        self.ours = dict(ours)
        """Entries that come with kvyard: name to import path."""
        self._error = error
        self._by_path = by_path
        self._loaded: dict[str, T] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def names(self) -> list[str]:
        """Return every name that ``get`` takes: ours first, in the order of the table, then those added from outside."""
        return list(dict.fromkeys([*self.ours, *self._loaded, *self._found()]))

    def __contains__(self, name: object) -> bool:
        """True if ``get`` takes ``name``. Installed packages are looked at only if it isn't ours: that takes milliseconds."""
        return name in self.ours or name in self._loaded or name in self._found()

    def get(self, name: str) -> T:
        """Return the entry called ``name``, imported now if it wasn't. An entry point can't replace one of ours.

        Raises ``KvyardError`` for an unknown name, and for an entry that can't be loaded.
        """
        entry = self._loaded.get(name)
        if entry is None:
            if self._by_path and ":" in name:
                return self._imported(name)
            entry = self._loaded[name] = self._load(name)
        return entry

    def register(self, name: str, value: T) -> T:
        """Add ``value`` for this process; returns it. Raises ``KvyardError`` if the name is taken."""
        if name in self:
            raise KvyardError(f"there is a {self.what} {name!r} already")
        self._loaded[name] = value
        return value

    def options(self, name: str) -> dict[str, Option]:
        """Return the options of an entry, by name. Raises as ``get``."""
        stated: Options = getattr(self.get(name), "OPTIONS", {})
        return {key: option if isinstance(option, Option) else Option(option) for key, option in stated.items()}

    def resolve(self, name: str, given: Mapping[str, float], besides: Collection[str] = ()) -> dict[str, float]:
        """Return every option of an entry: ``given`` over the defaults.

        Raises as ``get``, and for an option that it doesn't have or that is out of bounds. ``besides`` are names that
        people can set in the same place.
        """
        known = self.options(name)
        for key, value in given.items():
            if key not in known:
                hint = suggest(key, [*known, *besides]) if known or besides else "it has none"
                raise self._error(f"unknown option {key!r} of the {self.what} {name}: {hint}")
            known[key].check(f"{key} of the {self.what} {name}", value, self._error)
        return {key: given.get(key, option.default) for key, option in known.items()}

    def check(self, name: str, given: Mapping[str, float] | None = None) -> None:
        """Raise as ``resolve`` would. Imports nothing if no options are ``given``."""
        if name not in self and not (self._by_path and ":" in name):
            raise self._unknown(name)
        if given:
            self.resolve(name, given)

    def _unknown(self, name: str) -> Exception:
        return self._error(f"unknown {self.what} {name!r}: {suggest(name, sorted(self.names()))}")

    def _load(self, name: str) -> T:
        path = self.ours.get(name)
        if path is not None:
            module, _, attribute = path.partition(":")
            return cast(T, getattr(import_module(module), attribute))
        plugin = self._found().get(name)
        if plugin is None:
            raise self._unknown(name)
        try:
            return cast(T, plugin.load())
        except Exception as problem:  # other people's code: whatever it raises
            owner = plugin.dist.name if plugin.dist is not None else plugin.value
            raise KvyardError(
                f"the {self.what} {name!r} of {owner} can't be loaded: {type(problem).__name__}: {problem}"
            ) from problem

    def _imported(self, path: str) -> T:
        module, _, attribute = path.partition(":")
        try:
            return cast(T, getattr(import_module(module), attribute))
        except (ImportError, AttributeError, ValueError) as problem:
            raise KvyardError(f"the {self.what} {path} can't be imported: {problem}") from None

    def _found(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = {point.name: point for point in entry_points(group=self.group)}
        return self._plugins
