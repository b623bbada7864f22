"""A registry: what can be chosen by name, ours and other people's. Each extension point of kvyard is one of these.

Ours is a table from name to ``"module:attribute"``, so that listing names imports nothing. An installed package adds to it by a
Python entry point in the registry's group, a program or a test by ``register``. It knows nothing of what it holds.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from kvyard.errors import KvyardError

T = TypeVar("T")


class Registry(Generic[T]):
    """Choices of one kind, by name."""

    def __init__(self, what: str, group: str, ours: Mapping[str, str]) -> None:
        """``what`` is the noun for refusals ("routing policy"); ``group`` the entry points' group ("kvyard.policies")."""
        self.what = what
        self.group = group
        self.ours = dict(ours)
        """What comes with kvyard: each name and where it is."""
        self._loaded: dict[str, T] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def names(self) -> list[str]:
        """Every name that ``get`` takes: ours first, in the order of the table, then those added from outside."""
        return list(dict.fromkeys([*self.ours, *self._loaded, *self._found()]))

    def __contains__(self, name: object) -> bool:
        """Whether ``get`` takes ``name``. Installed packages are looked at only if it isn't ours: that takes milliseconds."""
        return name in self.ours or name in self._loaded or name in self._found()

    def get(self, name: str) -> T:
        """What ``name`` stands for, imported now if it wasn't. Ours can't be replaced by an entry point of the same name.

        Raises ``KvyardError`` for an unknown name, and for an entry point that can't be loaded.
        """
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded[name] = self._load(name)
        return found

    def register(self, name: str, value: T) -> T:
        """Add ``value`` for this process; returns it. Raises ``KvyardError`` if the name is taken."""
        if name in self:
            raise KvyardError(f"there is a {self.what} {name!r} already")
        self._loaded[name] = value
        return value

    def _load(self, name: str) -> T:
        path = self.ours.get(name)
        if path is not None:
            module, _, attribute = path.partition(":")
            return cast(T, getattr(import_module(module), attribute))
        plugin = self._found().get(name)
        if plugin is None:
            raise KvyardError(f"unknown {self.what} {name!r}: choose one of {', '.join(sorted(self.names()))}")
        try:
            return cast(T, plugin.load())
        except Exception as problem:  # other people's code: whatever it raises
            owner = plugin.dist.name if plugin.dist is not None else plugin.value
            raise KvyardError(
                f"the {self.what} {name!r} of {owner} can't be loaded: {type(problem).__name__}: {problem}"
            ) from problem

    def _found(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = {point.name: point for point in entry_points(group=self.group)}
        return self._plugins
