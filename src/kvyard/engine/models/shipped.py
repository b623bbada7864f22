"""Shapes of models that people run, shipped as small config files; each says where its numbers come from."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec

from kvyard.errors import KvyardError


def presets() -> list[str]:
    """Their names."""
    folder = files("kvyard.engine.models") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def preset(name: str) -> dict[str, Any]:
    """The config of one of them. Raises ``KvyardError`` for a name that isn't there."""
    if name not in presets():
        raise KvyardError(f"no preset {name!r}; choose one of {', '.join(presets())}, or give a config.json")
    text = (files("kvyard.engine.models") / "configs" / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Any])
