"""Registries: ours by path, other people's by entry point or call, and one sentence for what isn't there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvyard.errors import KvyardError
from kvyard.registry import Option, Registry


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
    with pytest.raises(
        KvyardError, match=r"unknown thing 'ordred': did you mean ordered\? Choose one of counter, ordered"
    ):
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


class Thing:
    OPTIONS = {
        "share": Option(0.5, "A share.", most=1),
        "window_s": Option(3.0, "Seconds.", positive=True),
        "plain": 7,
    }


def test_options_are_given_over_defaults() -> None:
    registry = make()
    registry.register("mine", Thing)
    assert registry.resolve("mine", {}) == {"share": 0.5, "window_s": 3.0, "plain": 7}
    assert registry.resolve("mine", {"plain": 0}) == {"share": 0.5, "window_s": 3.0, "plain": 0}
    assert registry.options("mine")["share"].help == "A share."
    assert registry.resolve("counter", {}) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"windows": 1},
            "unknown option 'windows' of the thing mine: did you mean window_s? Choose one of share, window_s",
        ),
        ({"x": 1}, "unknown option 'x' of the thing mine: choose one of share, window_s, plain"),
        ({"plain": 1, "share": 1.5}, "share of the thing mine must be from 0 to 1, got 1.5"),
        ({"window_s": 0}, "window_s of the thing mine must be more than 0, got 0"),
        ({"plain": -1}, "plain of the thing mine must be at least 0, got -1"),
        ({"plain": float("inf")}, "plain of the thing mine must be at least 0, got inf"),
        ({"share": float("nan")}, "share of the thing mine must be from 0 to 1, got nan"),
    ],
)
def test_options_that_can_not_be_are_refused(given: dict[str, float], words: str) -> None:
    registry = make()
    registry.register("mine", Thing)
    for verb in (registry.resolve, registry.check):
        with pytest.raises(KvyardError) as refusal:
            verb("mine", given)
        assert words in str(refusal.value)


def test_an_entry_without_options_refuses_all() -> None:
    with pytest.raises(KvyardError, match="unknown option 'x' of the thing counter: it has none"):
        make().resolve("counter", {"x": 1})


def test_a_path_is_imported_where_that_is_allowed() -> None:
    registry: Registry[object] = Registry("thing", "kvyard.nothing", {}, by_path=True)
    assert registry.get("tests.test_registry:Thing").__name__ == "Thing"  # type: ignore[attr-defined]
    assert registry.resolve("tests.test_registry:Thing", {"plain": 1})["plain"] == 1
    assert registry.names() == []
    with pytest.raises(KvyardError, match=r"the thing tests\.test_registry:Nothing can't be imported"):
        registry.get("tests.test_registry:Nothing")
    with pytest.raises(KvyardError, match=r"unknown thing 'tests\.test_registry:Thing'"):
        make().get("tests.test_registry:Thing")


def test_a_registry_raises_the_error_of_its_package() -> None:
    class Refused(KvyardError): ...

    registry: Registry[object] = Registry("thing", "kvyard.nothing", {"counter": "collections:Counter"}, error=Refused)
    for wrong in (lambda: registry.get("x"), lambda: registry.check("x"), lambda: registry.check("counter", {"y": 1})):
        with pytest.raises(Refused):
            wrong()
