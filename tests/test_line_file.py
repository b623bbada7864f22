"""Nothing written is half-written: short writes, full disks, and readers of what is left."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.small_disk import small_disk

from kvyard.errors import KvyardError
from kvyard.line_file import LineFile
from kvyard.replay.traces import open_trace

LINE = b'{"n": %d, "rest": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 << 10) as disk:
        file = LineFile(disk / "lines")
        with pytest.raises(OSError, match="No space left"):
            for number in range(5000):
                file.add(LINE % number)
        whole = (disk / "lines").read_bytes()
        assert whole.endswith(b"\n") and len(whole) == file.bytes > 60_000
        assert whole == b"".join(LINE % number for number in range(whole.count(b"\n")))
        with pytest.raises(OSError, match="No space left"):
            for number in range(5000):
                file.add(LINE % number)
        assert (disk / "lines").read_bytes().endswith(b"\n")
        file.close()


def test_a_full_disk_leaves_whole_portions_of_what_is_packed(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 << 10) as disk:
        file = LineFile(disk / "lines.gz")
        written = 0
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.add(os.urandom(2000).hex().encode() + b"\n")
                file.flush()
                written += 1
        assert file.lost == 1 and gzip.decompress((disk / "lines.gz").read_bytes()).count(b"\n") == written
        file.close()


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data[:7])))
    file = LineFile(tmp_path / "lines")
    for number in range(3):
        file.add(LINE % number)
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(LINE % number for number in range(3))


def test_a_limit_of_the_process_is_met_the_same_way(tmp_path: Path) -> None:
    """RLIMIT_FSIZE writes what fits and then fails, in a process of its own."""
    code = f"""
import resource, sys
from kvyard.errors import KvyardError
from kvyard.line_file import LineFile
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
file = LineFile(__import__("pathlib").Path(sys.argv[1]))
for number in range(1000):
    file.add({LINE!r} % number)
try:
    file.flush()
except OSError as error:
    print(error.strerror, file.lost)
file.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, check=True)
    whole = (tmp_path / "x").read_bytes()
    count = whole.count(b"\n")
    assert done.stdout.strip() == f"File too large {1000 - count}"
    assert whole == b"".join(LINE % number for number in range(count)) and len(whole) > 9_800


def test_a_trace_that_was_cut_off_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 512, "output_length": 5, "hash_ids": [%d]}\n'
    text = "".join(row % (at, at) for at in range(5))
    path.write_text(text[:-20])
    trace = open_trace(str(path))
    assert len(list(trace)) == 4
    lines = text.splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:20] + "\n", *lines[3:]]))  # in the middle it is damage
    with pytest.raises(KvyardError, match="3"):
        list(open_trace(str(path)))
