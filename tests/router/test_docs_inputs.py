"""What a policy receives and returns is documented: by ``help``, compiled or not, and on the page for policy authors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvyard.router import Choice, Match, RoutingInput, WorkerLoad

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-a-routing-policy.md"
INPUTS = (RoutingInput, Choice, Match, WorkerLoad)


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize("cls", INPUTS)
def test_help_says_what_each_field_and_method_is(cls: type) -> None:
    text = cls.__doc__ or ""
    said = dict(re.findall(r"^    (\w+)(?:\(.*?\))?: (.{5,})$", text, re.MULTILINE))
    assert public(cls) and public(cls) <= set(said), public(cls) - set(said)
    assert text.split("\n")[0].endswith(".")


@pytest.mark.parametrize("cls", INPUTS)
def test_the_page_names_each_field_and_method(cls: type) -> None:
    table = re.search(rf"^\|[^|]*`{cls.__name__}`.*?(?=\n\n)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert table is not None
    named = set(re.findall(r"`(\w+)(?:\(.*?\))?`", table[0]))
    assert public(cls) <= named, public(cls) - named
