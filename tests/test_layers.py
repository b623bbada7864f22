"""The packages form layers: each imports only from those before it, which keeps the parts usable on their own."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import kvyard

LAYERS = [
    "clock",
    "hashing",
    "events",
    "blocks",
    "tiers",
    "engine",
    "index",
    "router",
    "replay",
    "server",
    "testing",
    "lab",
    "vllm",
    "cli",
]
"""Lowest first, as in docs/architecture.md. ``kvyard`` itself and ``kvyard.errors`` lie below all of them."""

ROOT = Path(kvyard.__file__).parent


@cache
def imported(path: Path) -> list[str]:
    """The absolute names of the modules that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            assert node.module is not None
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else -1


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(LAYERS)


def test_imports_only_go_down() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in LAYERS
        for path in (*ROOT.glob(f"{package}.py"), *(ROOT / package).rglob("*.py"))
        for name in imported(path)
        if name.partition(".")[0] == "kvyard" and layer(name) > LAYERS.index(package)
    ]
    assert not upward


def test_vllm_loads_kvyard_vllm_and_nothing_else_does() -> None:
    others = [path for path in ROOT.rglob("*.py") if path.parent != ROOT / "vllm"]
    names = {(path, name) for path in others for name in imported(path)}
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, name in names
        if name.split(".")[0] == "vllm" or name.split(".")[:2] == ["kvyard", "vllm"]
    ]
