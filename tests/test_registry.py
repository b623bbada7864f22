"""Registries: ours by path, other people's by entry point or call, and one sentence for what isn't there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvyard.errors import KvyardError
from kvyard.registry import Registry


def make(group: str = "kvyard.nothing") -> Registry[object]:
    return Registry("thing", group, {"ordered": "collections:OrderedDict", "counter": "collections:Counter"})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with three entry points, as pip leaves one; returns their group."""
    (tmp_path / "thing_pack.py").write_text("VALUE = 'from outside'\n")
    info = tmp_path / "thing_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvyard.things]\nouter = thing_pack:VALUE\nbroken = thing_pack:MISSING\ncounter = thing_pack:VALUE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kvyard.things"
    sys.modules.pop("thing_pack", None)


def test_names_come_in_the_order_of_the_table() -> None:
    assert make().names() == ["ordered", "counter"]


def test_ours_is_imported_when_asked_for() -> None:
    from collections import OrderedDict

    assert make().get("ordered") is OrderedDict


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(KvyardError, match="unknown thing 'ordred': choose one of counter, ordered"):
        make().get("ordred")


def test_a_registered_one_is_found_and_can_not_be_taken_twice() -> None:
    registry = make()
    registry.register("mine", 7)
    assert registry.get("mine") == 7 and registry.names()[-1] == "mine"
    for taken in ("mine", "ordered"):
        with pytest.raises(KvyardError, match=f"there is a thing {taken!r} already"):
            registry.register(taken, 8)


def test_entry_points_add_names_but_never_replace_ours(installed: str) -> None:
    from collections import Counter

    registry = make(installed)
    assert registry.names() == ["ordered", "counter", "outer", "broken"]
    assert registry.get("outer") == "from outside"
    assert registry.get("counter") is Counter
    with pytest.raises(KvyardError, match="there is a thing 'outer' already"):
        registry.register("outer", 1)


def test_an_entry_point_that_fails_names_its_package(installed: str) -> None:
    with pytest.raises(KvyardError, match="the thing 'broken' of thing-pack can't be loaded: AttributeError"):
        make(installed).get("broken")
