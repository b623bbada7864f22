"""Changes by operators: engines that are added, removed, drained and resumed at one process, and hold for all of them."""

from typing import Literal

import msgspec

from kvyard.server.gateway.config import GatewayEngine

MOST_BEGUN = 1024
"""Changes in flight that are kept."""
ChangeName = tuple[int, int]
"""The process that was asked for a change, and its number there."""


class EngineChange(msgspec.Struct, kw_only=True):
    """One change."""

    op: Literal["add", "remove", "drain", "resume"]
    engine: str
    """Its name."""
    config: GatewayEngine | None = None
    """Of one that is added."""
    number: int = 0
    """By which the process knows it that was asked for it."""


class KeptChanges:
    """Changes that still matter to a process that starts later."""

    def __init__(self) -> None:
        self._there: dict[str, EngineChange] = {}
        """The last addition or removal of each engine."""
        self._draining: dict[str, EngineChange] = {}
        self._begun: dict[ChangeName, None] = {}
        """Changes that no process has made yet."""

    @property
    def begun_by_now(self) -> set[ChangeName]:
        """Return the changes that no process has made yet: a process that starts now doesn't receive them, nor are they
        listed."""
        return set(self._begun)

    def begun(self, process: int, change: EngineChange) -> None:
        """Note that a change that ``process`` was asked for is being sent to all."""
        self._begun[process, change.number] = None
        if len(self._begun) > MOST_BEGUN:
            del self._begun[next(iter(self._begun))]  # it couldn't be made anywhere, or would have been by now

    def made(self, process: int, change: EngineChange) -> bool:
        """Note that a process has made a change that ``process`` was asked for. Returns whether it is the first to report it,
        which counts.
        """
        if (process, change.number) not in self._begun:
            return False
        del self._begun[process, change.number]
        name = change.engine
        if change.op == "drain":
            self._draining[name] = change
            return True
        self._draining.pop(name, None)
        if change.op != "resume":
            self._there.pop(name, None)
            self._there[name] = change
        return True

    def listed(self) -> list[EngineChange]:
        """Return the changes in the order in which to make them."""
        return [*self._there.values(), *self._draining.values()]
