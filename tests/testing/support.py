"""How a pytest of its own finds kvyard's plugin: by its entry point, or by name where an older install has none."""

from __future__ import annotations

from importlib.metadata import entry_points

INSTALLED = any(point.value == "kvyard.testing.plugin" for point in entry_points(group="pytest11"))
OPTIONS = [] if INSTALLED else ["-p", "kvyard.testing.plugin"]
