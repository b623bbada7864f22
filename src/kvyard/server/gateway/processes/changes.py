"""Changes by operators: engines that are added, removed, drained and resumed at one process, and hold for all of them."""

from typing import Literal

import msgspec

from kvyard.server.gateway.config import GatewayEngine


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
    """What of them still matters to a process that starts later."""

    def __init__(self) -> None:
        self._there: dict[str, EngineChange] = {}
        """The last addition or removal of each engine."""
        self._draining: dict[str, EngineChange] = {}

    def made(self, change: EngineChange) -> None:
        """A change was made."""
        name = change.engine
        if change.op == "drain":
            self._draining[name] = change
            return
        self._draining.pop(name, None)
        if change.op != "resume":
            self._there.pop(name, None)
            self._there[name] = change

    def listed(self) -> list[EngineChange]:
        """In the order in which they are to be made."""
        return [*self._there.values(), *self._draining.values()]
