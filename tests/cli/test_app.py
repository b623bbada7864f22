"""The root command: help and version, exit codes, and that nothing is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
from tests.cli.support import exit_code

import kvyard
from kvyard.cli.app import COMMANDS, COMPLETE_VARIABLE, CommandEntry, _suggest, build, main

SAMPLES = "tests.cli.sample_commands"
TABLE = {
    "greet": CommandEntry(f"{SAMPLES}:greet", "Greets somebody."),
    "group": CommandEntry(f"{SAMPLES}:app", "A group."),
    "refuse": CommandEntry(f"{SAMPLES}:refuse", "Refuses."),
    "interrupt": CommandEntry(f"{SAMPLES}:interrupt", "Is interrupted."),
    "answer-no": CommandEntry(f"{SAMPLES}:answer_no", "Says no."),
    "crash": CommandEntry(f"{SAMPLES}:crash", "Has a bug."),
    "absent": CommandEntry("kvyard.no_such_part:app", "Is not installed."),
}


run = partial(exit_code, commands=TABLE)


def modules_loaded_by(code: str) -> set[str]:
    """The modules that running ``code`` adds to a fresh interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint('\\n' + ' '.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_lists_the_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "Greets somebody." in out
    assert "A group." in out
    assert "absent" not in out


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_has_every_command_under_a_heading_and_every_summary_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    sections = out[out.index("Plan and replay:") :].split("\n\n")
    headings = [section.partition(":")[0] for section in sections]
    assert headings == ["Plan and replay", "Serve", "Lab"]
    for name, entry in COMMANDS.items():
        section = " ".join(sections[headings.index(entry.heading)].split())
        assert f" {name} {entry.summary}" in section, "no summary is cut"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--completion", shell) == 0
    out = capsys.readouterr().out
    assert f"{COMPLETE_VARIABLE}=complete_{shell}" in out and "kvyard" in out


def test_completion_refuses_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--completion", "tcsh") == 2
    assert "choose one of bash, zsh, fish" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvyard {kvyard.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("--no-such-flag",),
        ("greet", "--no-such-flag", "you"),
        ("greet",),
        ("group", "only", "--no-such-flag"),
        ("group", "only", "--times", "x"),
    ],
)
def test_wrong_usage_exits_2_and_points_to_help(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Error: " in streams.err
    command = " ".join(["kvyard", *(word for word in argv if word in {"greet", "group", "only"})])
    assert f"Try '{command} --help'" in streams.err


def test_no_arguments_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "Greets somebody." in "".join(capsys.readouterr())


def test_a_typing_error_is_answered_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greeet") == 2
    assert "Did you mean 'greet'" in capsys.readouterr().err


def test_absent_command_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("absent") == 2
    assert "No such command 'absent'" in capsys.readouterr().err


def test_function_becomes_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--loud", "you") == 0
    assert capsys.readouterr().out == "YOU\n"


def test_help_of_a_command_comes_from_its_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: kvyard greet ")
    assert "--loud" in out


def test_a_group_of_one_stays_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("group", "only", "--times", "2") == 0
    assert capsys.readouterr().out == "ranran\n"


def test_refusal_is_one_sentence_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("refuse") == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == "Error: the pool needs at least one block, not 0\n"


def test_interrupt_exits_130_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("interrupt") == 130
    assert capsys.readouterr().err == ""


def test_exit_code_of_a_command_is_kept() -> None:
    assert run("answer-no") == 1


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["crash"], commands=TABLE)


def test_every_listed_command_loads() -> None:
    for name, command in build().commands.items():
        assert name in COMMANDS
        assert command.load().make_context(name, ["--help"], resilient_parsing=True) is not None


def test_importing_kvyard_loads_nothing_else() -> None:
    assert modules_loaded_by("import kvyard") == {"kvyard"}


def test_help_loads_no_part_of_kvyard() -> None:
    loaded = modules_loaded_by("from kvyard.cli.app import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert {name for name in loaded if name.startswith("kvyard")} == {
        "kvyard",
        "kvyard.cli",
        "kvyard.cli.app",
        "kvyard.cli.plain_stream",
        "kvyard.errors",
    }
    assert not loaded & {"rich", "msgspec", "numpy", "zmq", "plotly", "pydantic", "asyncio"}


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvyard", "--version"], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout == f"kvyard {kvyard.__version__}\n"


def test_three_options_at_most_are_suggested() -> None:
    class Error:
        option_name, possibilities, message = "--host-blocs", (), "No such option: --host-blocs"

    class Shown:
        hidden = False

        def __init__(self, *opts: str) -> None:
            self.opts = opts

    class Command:
        def get_params(self, _: object) -> list[Shown]:
            return [Shown("--host-blocks", "-b"), Shown("--host-block"), Shown("--host-bloc"), Shown("--most-blocs")]

    error = Error()
    _suggest(Command(), None, error)
    assert error.message.count("--") == 1 + 3 and "-b " not in error.message


def test_shells_complete_names_of_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((COMPLETE_VARIABLE, "complete_bash"), ("COMP_WORDS", "kvyard gre"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    assert run() == 0
    assert capsys.readouterr().out.split() == ["greet"]
