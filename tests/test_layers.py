"""The packages form layers: each imports only from those before it, which keeps the parts usable on their own."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import kvyard

RINGS = {
    "core": ["clock", "hashing", "events", "blocks", "tiers", "engine", "index", "router", "replay"],
    "serves": ["server", "testing"],
    "lab": ["lab", "vllm", "sglang"],
}
"""Innermost first, and in each the lowest first, as in docs/explain/architecture.md."""
LAYERS = [*(package for packages in RINGS.values() for package in packages), "cli"]
"""Lowest first. ``kvyard`` itself and the modules beside these packages lie below all of them."""

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


def test_the_architecture_page_shows_the_rings() -> None:
    page = (ROOT.parents[1] / "docs" / "explain" / "architecture.md").read_text()
    for ring, packages in RINGS.items():
        table = page.partition(f"| {ring} | task |")[2].partition("\n\n")[0]
        assert [
            line.split("`")[1].removeprefix("kvyard.") for line in table.splitlines() if "`kvyard." in line
        ] == packages


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
    others = [path for path in ROOT.rglob("*.py") if ROOT / "vllm" not in path.parents]
    names = {(path, name) for path in others for name in imported(path)}
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, name in names
        if name.split(".")[0] == "vllm" or name.split(".")[:2] == ["kvyard", "vllm"]
    ]
