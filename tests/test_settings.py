"""A marked field of a struct is a setting everywhere: in Python, in a file, as a flag, in help and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError
from kvyard.settings import Setting, Settings, chosen, duration, settings_of


def places() -> list[str]:
    return ["here", "there"]


class Sample(msgspec.Struct):
    """What a developer writes to add settings, and all of it."""

    size: Annotated[int, Setting("How large.", flag=True)] = 5
    mode: Annotated[Literal["slow", "fast"] | None, Setting("How: {choices}.", flag=True)] = None
    lag: Annotated[int, Setting("How late.", name="delay", parse=duration)] = 0
    loud: Annotated[bool, Setting("Whether to shout.", flag=True)] = False
    place: Annotated[str, Setting("Where: {choices}.", also=("at", "-pl"), flag=True, choices=places)] = "here"
    internal: int = 3


SAMPLE = Settings(settings_of(Sample), left_out={"colour": "there is none"})


def run(*arguments: str) -> tuple[int, str, list[Mapping[str, object]]]:
    seen: list[Mapping[str, object]] = []

    @with_settings(SAMPLE)
    def command(settings: Mapping[str, object]) -> None:
        """Do it."""
        seen.append(settings)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    said = f"{result.output}{result.exception or ''}"
    return result.exit_code, said, seen


def test_names_are_the_fields_unless_they_say_otherwise() -> None:
    assert list(SAMPLE) == ["size", "mode", "delay", "loud", "place"]
    given = SAMPLE.parse({"size": "2k", "delay": "5us", "mode": "fast", "loud": "yes", "place": None})
    assert Sample(**chosen(Sample, given)) == Sample(size=2000, mode="fast", lag=5000, loud=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": "big"}, "size is 'big': it must be a whole number"),
        ({"mode": "quick"}, "mode is 'quick': choose one of slow, fast"),
        ({"dellay": 1}, "unknown setting 'dellay': did you mean delay?"),
        ({"internal": 1}, "unknown setting 'internal'"),
        ({"colour": 1}, "colour: there is none"),
    ],
)
def test_refusals(given: dict[str, object], said: str) -> None:
    with pytest.raises(KvyardError) as refusal:
        SAMPLE.parse(given)
    assert str(refusal.value).startswith(said)


def test_flags_files_and_set_are_one(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('size = 7\nmode = "slow"\n')
    code, said, seen = run("--config", str(file), "--size", "9", "--set", "delay=3ms", "--loud", "--at", "there")
    assert code == 0, said
    assert seen == [{"size": "9", "mode": "slow", "delay": "3ms", "loud": True, "place": "there"}]
    for arguments, words in (
        (["--size", "1", "--set", "size=2"], "size is set twice"),
        (["--set", "size"], "write NAME=VALUE"),
        (["--set", "sice=2"], "did you mean size"),
        (["--colour", "red"], "colour: there is none"),
    ):
        code, said, seen = run(*arguments)
        assert code != 0 and words in said and not seen


def test_further_names_are_the_same_setting() -> None:
    assert SAMPLE.parse({"at": "there"}) == {"place": "there"} == SAMPLE.parse({"place": "there"})
    assert SAMPLE.merge({"at": "there"}, {"place": "here"}) == {"place": "here"}
    assert run("-pl", "there")[2] == run("--set", "at=there")[2] == [{"place": "there"}]
    with pytest.raises(KvyardError, match="at is another name of place: leave one of the two out"):
        SAMPLE.parse({"at": "there", "place": "here"})
    with pytest.raises(KvyardError, match="unknown setting '-pl'"):
        SAMPLE.parse({"-pl": "there"})


def test_help_has_choices_and_defaults() -> None:
    said = " ".join(run("--help")[1].split())
    for words in ("--size N How large. [default: 5]", "How: slow or fast.", "Where: here or there. [default: here]"):
        assert words in said
    assert "--delay" not in said and "internal" not in said
    assert "delay  How late. [default: 0]" in run("--list-settings")[1]


TABLED = Settings(settings_of(Sample), own="mine", tables={"part": settings_of(Sample)}, passed_over=("others",))


def test_a_file_that_several_commands_read(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('mode = "fast"\n[mine]\nsize = 3\n[part]\nlag = "5ms"\n[others]\nanything = 1\n')
    assert TABLED.read(file) == {"mode": "fast", "size": 3, "delay": "5ms"}, "in a table of fields, by their names"
    for text, words in (
        ("size = 1\n[mine]\nsize = 2\n", "size is given twice, once in [mine]"),
        ("[part]\ndelay = 1\n", "unknown setting 'delay' of [part]: choose one of size, mode, lag"),
        ("[mine]\nsise = 1\n", "unknown setting 'sise': did you mean size"),
        ("others = 1\n", "unknown setting 'others'"),
        ("[elsewhere]\na = 1\n", "unknown setting 'elsewhere'"),
    ):
        file.write_text(text)
        with pytest.raises(KvyardError) as error:
            TABLED.read(file)
        assert words in str(error.value) and str(file) in str(error.value)
