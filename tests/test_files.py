"""Results are written where they are meant to be, and nothing else is touched."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvyard.errors import KvyardError
from kvyard.files import check_outputs, check_writable, is_regular, is_stdout, open_new, whole_file, write_whole

ROOT = os.geteuid() == 0
FULL = os.makedev(1, 7)
NULL = os.makedev(1, 3)


def in_a_process(code: str, redirect: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in a shell that leads its stdout elsewhere."""
    script = folder / "code.py"
    script.write_text(f"from kvyard.files import write_whole\n{code}\n")
    command = f"'{sys.executable}' '{script}' {redirect}"
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=True)


def test_a_file_is_overwritten_as_a_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("older and longer")
    path.chmod(0o640)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("older")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "older"
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_neighbour_that_is_called_part_stays(tmp_path: Path) -> None:
    (tmp_path / "x.json.part").write_text("mine")
    write_whole(tmp_path / "x.json", "new")
    assert (tmp_path / "x.json.part").read_text() == "mine"


def test_leftovers_of_a_killed_process_with_the_same_pid_are_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / f"x.json.{os.getpid()}.part"
    left.write_text("half")
    write_whole(tmp_path / "x.json", "new")
    assert (tmp_path / "x.json").read_text() == "new" and left.read_text() == "half"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("whole", [True, False])
def test_in_a_directory_that_takes_no_new_files_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    path = tmp_path / "x.json"
    path.write_text("older")
    access = os.access
    # Root may write to all of them.
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != tmp_path and access(at, mode))
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "older"
    with whole_file(path, lambda: whole) as file:
        file.write(b"new")
    assert path.read_text() == ("new" if whole else "older")
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("there", [True, False])
def test_links_are_written_through(tmp_path: Path, there: bool) -> None:
    (tmp_path / "deep").mkdir()
    target, link, second = tmp_path / "deep/target", tmp_path / "link", tmp_path / "second"
    if there:
        target.write_text("older")
    link.symlink_to("deep/target")
    second.symlink_to(link)
    write_whole(second, "new")
    assert link.is_symlink() and second.is_symlink()
    assert target.read_text() == "new"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for write in (lambda path: write_whole(path, "new"), check_writable):
        with pytest.raises(KvyardError, match="can't write"):
            write(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()


@pytest.mark.skipif(not ROOT, reason="making a device node takes root")
@pytest.mark.parametrize("through_link", [False, True])
def test_a_device_stays_a_device(tmp_path: Path, through_link: bool) -> None:
    node = path = tmp_path / "null"
    os.mknod(node, stat.S_IFCHR | 0o666, NULL)
    if through_link:
        path = tmp_path / "link"
        path.symlink_to(node)
    check_writable(path)
    write_whole(path, "new")
    assert stat.S_ISCHR(node.stat().st_mode) and node.stat().st_rdev == NULL
    assert not is_regular(path)


@pytest.mark.skipif(not ROOT, reason="making a device node takes root")
def test_a_full_device_is_refused_in_a_sentence(tmp_path: Path) -> None:
    node = tmp_path / "full"
    os.mknod(node, stat.S_IFCHR | 0o666, FULL)
    with pytest.raises(KvyardError, match=r"can't write .*full: No space left on device"):
        write_whole(node, "new")


def test_a_pipe_with_a_name_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"x" * 200_000)
    reader.join(30)
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("path", ["", "a\0b", "nowhere/x", "."])
def test_impossible_paths_are_refused(tmp_path: Path, path: str) -> None:
    for write in (lambda path: write_whole(path, "new"), check_writable):
        with pytest.raises(KvyardError, match="can't write"):
            write(os.path.join(tmp_path, path) if path not in ("", "a\0b") else path)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_stdout_by_all_its_names(tmp_path: Path, name: str) -> None:
    done = in_a_process(f"print('before')\nwrite_whole({name!r}, 'result\\n')\nprint('after')", "| cat", tmp_path)
    assert done.stdout == "before\nresult\nafter\n"
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_stdout_that_is_appended_to_a_file_keeps_what_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "log").write_text("older\n")
    in_a_process(f"print('before')\nwrite_whole({name!r}, 'result\\n')", ">> log", tmp_path)
    assert (tmp_path / "log").read_text() == "older\nbefore\nresult\n"


def test_two_outputs_are_not_one_and_none_is_what_is_read(tmp_path: Path) -> None:
    one, link = tmp_path / "one", tmp_path / "link"
    one.write_text("trace")
    link.symlink_to(one)
    check_outputs(one, None, tmp_path / "two", "-", reads=[tmp_path / "trace"])
    for given, reads in (([one, link], []), (["-", "/dev/stdout"], []), ([link], [one]), ([one], [link])):
        with pytest.raises(KvyardError, match="choose another"):
            check_outputs(*given, reads=reads)
    check_outputs("/dev/null", "/dev/null")
    assert is_stdout("-") and is_stdout("/dev/stdout") and not is_stdout(one) and not is_stdout(None)


def test_a_recording_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with open_new(path) as file:
        file.write(b"once")
    with pytest.raises(KvyardError, match="exists: choose another name"):
        open_new(path)
    assert path.read_bytes() == b"once"


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_paths_without_permission_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("older")
    path.chmod(0o400)
    with pytest.raises(KvyardError, match="isn't yours"):
        write_whole(path, "new")
    assert path.read_text() == "older"


def test_outputs_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="can't write"):
        check_outputs(None, tmp_path / "fine", tmp_path / "missing" / "file")
