"""Traces replayed through a routed fleet, in virtual time or live, and the report on it.

The package itself can be called: ``kvyard.replay("trace.jsonl", workers=8)`` is ``kvyard.replay.run.replay``. Nothing is
imported before that.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvyard.replay.run import SimulatedRun, replay

__all__ = ["SimulatedRun", "replay"]


class _Package(ModuleType):
    """This package, with a call."""

    def __call__(self, *args: Any, **settings: Any) -> SimulatedRun:
        """Replay a trace: see ``kvyard.replay.run.replay``."""
        run: SimulatedRun = import_module("kvyard.replay.run").replay(*args, **settings)
        return run


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("kvyard.replay.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
