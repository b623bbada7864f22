"""What is published: its metadata, its notes, and what the README says of installing."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_a_version_s_part_of_the_changelog() -> None:
    notes = script("release_notes").notes
    text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.2.0] - 2026-01-01\n\n- older\n\n## 1.1.0\n\n- oldest\n"
    assert notes(text=text) == "- new\n"
    assert notes("1.2.0", text) == "- older\n"
    assert notes("1.1.0", text) == "- oldest\n"
    with pytest.raises(LookupError, match=r"nothing on 9: it has Unreleased, 1\.2\.0, 1\.1\.0"):
        notes("9", text)
    assert "### Added" in notes()


def test_every_file_that_a_source_distribution_needs_is_in_it() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    made = {"README.md", "LICENSE", "pyproject.toml"}  # hatchling adds these by itself
    kept = {path.name for path in ROOT.iterdir()} - {
        ".git",
        ".github",
        ".gitignore",
        ".gitattributes",
        ".venv",
        "build",
    }
    hidden = {name for name in kept if name.startswith(".") and name != ".ci"} | {
        "dist",
        "site",
        ".pre-commit-config.yaml",
    }
    assert kept - hidden <= set(included) | made
    assert all((ROOT / name).exists() for name in included)


def test_the_readme_names_every_extra_and_quotes_it() -> None:
    readme = (ROOT / "README.md").read_text()
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"vllm", "report"}
    assert extras <= set(re.findall(r"'kvyard\[(\w+)\]'", readme))
    assert not re.search(r"pip install (?!')[^\n`]*\[", readme), "brackets without quotes are zsh's"
    assert "KVYARD_PURE=1" in readme


def test_versions_are_the_same_everywhere() -> None:
    declared = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == declared
    assert {f"3.{name[3:-2]}" for name in PROJECT["tool"]["cibuildwheel"]["build"]} == declared
    assert ".ci/run" in workflow
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src" / "kvyard" / "__init__.py").read_text())
    assert version is not None and f"version: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_covers_what_packages_export() -> None:
    page = script("api_reference").page()
    for name in ("## kvyard.replay", "### `BlockManager`", "### `open_trace`", "### `FleetServer`", "`wait_for("):
        assert name in page, name
