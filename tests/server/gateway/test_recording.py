"""Traffic as a trace: what is written is what was there, the reader takes it as it is, and it gives nothing away."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.clock import MS, SECOND, VirtualClock, WallClock
from kvyard.errors import KvyardError
from kvyard.index import Identity
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.info import describe
from kvyard.server.gateway.recording import ArrivedRequest, recorder
from kvyard.server.gateway.recording.prefix_ids import PrefixIds
from kvyard.server.gateway.recording.recorder import TrafficRecorder

SIZE = 16
IDENTITY = Identity(SIZE)


class Desk:
    """A recorder, and requests with real tokens and keys."""

    def __init__(self, path: Path, block_size: int = SIZE, **options: Any) -> None:
        self.clock = VirtualClock()
        self.recorder = TrafficRecorder(path, block_size=block_size, clock=self.clock, **options)

    def arrive(self, id_: object, tokens: list[int], **more: Any) -> None:
        keys = IDENTITY.keys(tokens)
        more.setdefault("tail", tokens[len(keys) * SIZE :])
        self.recorder.arrived(ArrivedRequest(id=id_, keys=keys, num_tokens=len(tokens), key_tokens=SIZE, **more))

    def at(self, ms: float) -> None:
        self.clock.advance(round(ms * MS))


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


def alike(one: list[int], other: list[int]) -> int:
    """How many items both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def rows(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return [json.loads(line) for line in raw.splitlines()]


@pytest.mark.parametrize("name", ["traffic.jsonl", "traffic.jsonl.gz"])
@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_the_trace_says_what_was_there(tmp_path: Path, name: str, block_size: int) -> None:
    path = tmp_path / name
    desk = Desk(path, block_size)
    stem = text(1, 1000)
    prompts = [stem, stem + text(2, 300), stem[:600], text(3, 5), stem, text(4, 1024)]
    for number, prompt in enumerate(prompts):
        desk.at(100 * number)
        desk.arrive(number, prompt, model=None)
    desk.at(10_000)
    for number in reversed(range(len(prompts))):
        desk.recorder.ended(number, 10 + number)
    desk.recorder.close()
    found = list(open_trace(str(path)))
    assert [one.arrival for one in found] == [100 * MS * number for number in range(len(prompts))]
    assert [(one.input_length, one.output_length) for one in found] == [(len(p), 10 + n) for n, p in enumerate(prompts)]
    assert {one.id_block_size for one in found} == {block_size}
    for one, mine in zip(found, prompts, strict=True):
        for other, theirs in zip(found, prompts, strict=True):
            ids, others = list(one.ids or ()), list(other.ids or ())
            common, tokens = alike(ids, others), alike(mine, theirs)
            # Whole blocks are shared; the open one at the end too where all of both prompts is the same.
            assert common == (len(ids) if mine == theirs else tokens // block_size)
            assert not set(ids[common:]) & set(others[common:])
    about = describe(open_trace(str(path)))
    assert about.requests == len(prompts)


def test_ids_are_small_numbers_in_order_of_sight(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "t.jsonl")
    for number in range(3):
        desk.arrive(number, text(number, 40))
        desk.recorder.ended(number, 1)
    desk.recorder.close()
    assert [row["hash_ids"] for row in rows(tmp_path / "t.jsonl")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert oct((tmp_path / "t.jsonl").stat().st_mode & 0o777) == "0o600"


def test_rows_come_in_order_of_arrival_and_only_of_requests_that_made_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    desk.arrive("slow", text(1, 20))
    desk.at(5)
    desk.arrive("failed", text(2, 20))
    desk.at(7.25)
    desk.arrive("quick", text(3, 20))
    desk.recorder.ended("quick", 3)
    desk.recorder.ended("failed", 0)
    desk.recorder.ended("nobody", 5)
    desk.recorder.flush()
    assert path.read_bytes() == b"" and len(desk.recorder.waiting) == 3
    desk.recorder.ended("slow", 2)
    desk.recorder.flush()
    assert [(row["timestamp"], row["output_length"]) for row in rows(path)] == [(0, 2), (7.25, 3)]
    desk.arrive("open", text(4, 20))
    desk.recorder.close()
    counters = desk.recorder.counters
    assert (counters.rows, counters.left_out, counters.late) == (2, 2, 0)
    assert counters.bytes == path.stat().st_size


def test_turns_of_a_session_wait_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)

    def turn(id_: str, came: float, went: float, session: str) -> None:
        desk.at(came)
        desk.arrive(id_, text(1, 20), session=session)
        desk.at(went)
        desk.recorder.ended(id_, 4)

    turn("a1", 0, 100, "alice's secret name")
    turn("b1", 150, 160, "bob")
    turn("a2", 1100, 1200, "alice's secret name")
    # Two at once: they keep their times, and nobody waits for the other.
    desk.at(2000)
    desk.arrive("a3", text(1, 20), session="alice's secret name")
    desk.arrive("a4", text(1, 20), session="alice's secret name")
    desk.at(3000)
    desk.recorder.ended("a3", 1)
    desk.recorder.ended("a4", 1)
    desk.recorder.close()
    assert b"alice" not in path.read_bytes()
    found = list(open_trace(str(path)))
    assert [one.session for one in found] == ["s1", "s2", "s1", "s1", None]
    assert [one.delay for one in found] == [None, None, SECOND, 800 * MS, None]
    assert found[-1].arrival == 2 * SECOND


def test_times_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    desk.arrive("a", text(1, 40))
    desk.at(5)
    desk.arrive("b", text(2, 40))
    desk.at(7.5)
    first = desk.clock.now()
    desk.at(17.5)
    desk.recorder.ended("b", 4, first_token=first, cached=16)
    desk.at(18.5)
    desk.recorder.ended("a", 4)
    desk.recorder.close()
    a, b = rows(path)
    assert a["e2e"] == 18.5 and "ttft" not in a and "cached" not in a
    assert (b["ttft"], b["e2e"], b["cached"]) == (2.5, 12.5, 16)


def test_nothing_of_the_text_or_its_hashes_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    tokens = text(9, 100)
    desk.arrive("r", tokens)
    desk.recorder.ended("r", 1)
    desk.recorder.close()
    raw = path.read_text()
    assert not any(str(key) in raw for key in IDENTITY.keys(tokens))
    (row,) = rows(path)
    assert set(row) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "e2e"}
    # The rest behind the last block is named by a key that no other process has.
    assert PrefixIds(10).name([1, 2], 3) != PrefixIds(10).name([1, 2], 3)


def test_models_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    for number, model in enumerate(["one", "two", "one"]):
        desk.arrive(number, text(1, 40), model=model)
        desk.recorder.ended(number, 1)
    desk.recorder.close()
    found = rows(path)
    assert found[0]["hash_ids"] == found[2]["hash_ids"] and not set(found[0]["hash_ids"]) & set(found[1]["hash_ids"])
    assert [row["model"] for row in found] == ["one", "two", "one"]


def test_unread_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path, 64)
    tokens = text(1, 100)
    for number in range(2):
        desk.arrive(number, tokens, tail=None)
        desk.recorder.ended(number, 1)
    desk.recorder.arrived(ArrivedRequest(id="bare", keys=[], num_tokens=200, key_tokens=SIZE))
    desk.recorder.ended("bare", 1)
    desk.recorder.close()
    one, two, bare = (row["hash_ids"] for row in rows(path))
    assert one[0] == two[0] and one[1] != two[1]
    assert len(bare) == 4 and not set(bare) & {*one, *two}


@given(
    st.lists(st.tuples(st.sampled_from("mn"), st.text("ab", min_size=1, max_size=7)), min_size=1, max_size=60),
    st.integers(min_value=1, max_value=30),
)
def test_equal_ids_mean_equal_prefixes_however_little_is_remembered(
    prompts: list[tuple[str, str]], remembered: int
) -> None:
    ids = PrefixIds(remembered)
    plenty = PrefixIds(1 << 20)
    names: dict[str, int] = {}
    meaning: dict[int, tuple[str, str]] = {}
    whole: dict[tuple[str, str], int] = {}
    for space, prompt in prompts:
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        wanted = [names.setdefault(prefix, len(names) * 7919) for prefix in prefixes]
        for id_, prefix in zip(ids.of(wanted, space), prefixes, strict=True):
            assert meaning.setdefault(id_, (space, prefix)) == (space, prefix)
        # With room for everything it is exact, and numbers come in the order of sight.
        for id_, prefix in zip(plenty.of(wanted, space), prefixes, strict=True):
            assert whole.setdefault((space, prefix), len(whole)) == id_
        ids.check_integrity()
        plenty.check_integrity()
        assert len(ids) <= remembered + 7
    assert len(plenty) == len(whole) and plenty.forgotten == 0


def test_recent_prefixes_are_remembered() -> None:
    ids = PrefixIds(100)
    first = ids.of([1, 2, 3])
    for number in range(1000):
        ids.of([10_000 + number, 7])
        assert ids.of([1, 2, 3]) == first
    ids.check_integrity()
    assert 1800 < ids.forgotten < 2000 and len(ids) <= 103
    assert ids.of([10_000])[0] > 1000


def test_the_same_prompts_for_ever_take_no_more_memory() -> None:
    ids = PrefixIds(1000)
    for number in range(20_000):
        ids.of([number % 10, 5, 6])
    assert len(ids) == 30 and len(ids._ends) < 1200


def test_a_request_that_never_ends_holds_up_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    monkeypatch.setattr(recorder, "HELD_BYTES", 20 * (recorder.ROW + 8 * 2))
    desk.arrive("stuck", text(1, 20))
    for number in range(50):
        desk.arrive(number, text(2, 20))
        desk.recorder.ended(number, 1)
    assert desk.recorder.counters.late == 1 and not desk.recorder.waiting
    desk.recorder.ended("stuck", 1)
    desk.recorder.close()
    assert len(rows(path)) == 50 and len(list(open_trace(str(path)))) == 50


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_the_limit_ends_it_or_begins_a_new_file(tmp_path: Path, name: str) -> None:
    def fill(desk: Desk) -> None:
        for number in range(400):
            desk.arrive(number, text(number, 400), session=str(number % 3))
            desk.recorder.ended(number, 1)
            desk.recorder.flush()
        desk.recorder.close()

    ends = Desk(tmp_path / name, limit=20_000)
    fill(ends)
    assert "limit" in ends.recorder.stopped
    assert 20_000 <= (tmp_path / name).stat().st_size < 22_000
    assert 0 < len(list(open_trace(str(tmp_path / name)))) == ends.recorder.counters.rows < 400

    (tmp_path / "more").mkdir()
    goes_on = Desk(tmp_path / "more" / name, limit=20_000, keep=2)
    fill(goes_on)
    count = goes_on.recorder.file.rotations
    assert count > 2
    kept = [tmp_path / "more" / name.replace("t.", f"t.{number}.") for number in (count - 1, count)]
    assert sorted((tmp_path / "more").iterdir()) == sorted([*kept, tmp_path / "more" / name])
    # Each can be read by itself: the reader refuses a turn that refers to another file's.
    found = [list(open_trace(str(file))) for file in (*kept, tmp_path / "more" / name)]
    assert all(found[:2]) and any(one.delay is not None for one in found[1])
    assert goes_on.recorder.counters.rows == 400


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    desk = Desk(path)
    desk.arrive(1, text(1, 20))
    desk.recorder.ended(1, 1)
    desk.recorder.flush()
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 10:
            return write(file, bytes(data[:10]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number in (2, 3):
        desk.arrive(number, text(number, 20))
        desk.recorder.ended(number, 1)
        desk.recorder.flush()
    monkeypatch.undo()
    assert "No space left" in desk.recorder.stopped and desk.recorder.counters.errors == 1
    assert len([record for record in caplog.records if "recording ended" in record.message]) == 1
    desk.recorder.close()
    assert len(rows(path)) == 1  # no broken line


def test_a_folder_that_vanishes_ends_the_recording(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    desk = Desk(folder / "t.jsonl", limit=1, keep=1)
    shutil.rmtree(folder)
    with (tmp_path / "other").open("wb") as other:
        for number in range(3):
            desk.arrive(number, text(number, 20))
            desk.recorder.ended(number, 1)
            desk.recorder.flush()
        desk.recorder.close()
        other.write(b"still open")
    assert "No such file" in desk.recorder.stopped and desk.recorder.counters.errors == 1


def test_a_file_in_the_way_a_bad_size_and_a_name_with_its_start(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    with pytest.raises(KvyardError, match="exists"):
        Desk(tmp_path / "there")
    with pytest.raises(KvyardError, match="can't write"):
        Desk(tmp_path / "no" / "folder")
    desk = Desk(tmp_path / "traffic-{start}.jsonl", 24)
    assert desk.recorder.path.name.removeprefix("traffic-").removesuffix(".jsonl").isdigit()
    with pytest.raises(KvyardError, match="multiple"):
        desk.recorder.check(16)
    desk.recorder.close()
    for options in ({"limit": 0}, {"keep": -1}, {"remembered": 0}, {"block_size": 0}):
        with pytest.raises(KvyardError):
            Desk(tmp_path / "other", **options)


VICTIM = """
import sys
from pathlib import Path
from kvyard.clock import WallClock
from kvyard.server.gateway.recording import ArrivedRequest, TrafficRecorder

recorder = TrafficRecorder(sys.argv[1], block_size=16, clock=WallClock())
for number in range(10**9):
    keys = [number * 7 + at for at in range(20)]
    recorder.arrived(ArrivedRequest(id=number, keys=keys, num_tokens=320, key_tokens=16))
    recorder.ended(number, 5)
    if number % 7 == 0:
        recorder.flush()
    if number == 2000:
        print("going", flush=True)
"""


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_whatever_kills_the_writer_the_file_is_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with subprocess.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = list(open_trace(str(path)))
    assert len(found) >= 1995 and found[-1].output_length == 5


def test_kvyard_reads_it_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    recorder = TrafficRecorder(path, block_size=SIZE, clock=WallClock())
    stem = text(0, 300)
    for number in range(40):
        tokens = stem + text(number, 100)
        keys = IDENTITY.keys(tokens)
        tail, session = tokens[len(keys) * SIZE :], str(number % 5)
        recorder.arrived(
            ArrivedRequest(id=number, keys=keys, num_tokens=400, key_tokens=SIZE, tail=tail, session=session)
        )
        recorder.ended(number, 5)
    recorder.close()

    def kvyard(*words: str) -> str:
        command = [sys.executable, "-m", "kvyard", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout

    assert "40" in kvyard("trace", "info", str(path))
    report = tmp_path / "report.json"
    kvyard("replay", str(path), "--workers", "2", "--block-size", "16", "--report", str(report), "-q")
    figures = json.loads(report.read_text())
    assert "40" in json.dumps(figures)


def test_a_size_that_nobody_gave_is_that_of_the_keys(tmp_path: Path) -> None:
    """Pools of models may differ in it; each row says what its ids stand for."""
    path = tmp_path / "t.jsonl"
    recorder = TrafficRecorder(path, clock=VirtualClock())
    for number, (model, size) in enumerate([("a", 32), ("b", 48), ("a", 32), ("b", 48)]):
        recorder.arrived(ArrivedRequest(id=number, keys=[7, 8], num_tokens=100, key_tokens=size, model=model))
        recorder.ended(number, 1)
    recorder.close()
    found = rows(path)
    assert [row["block_size"] for row in found] == [32, 48, 32, 48]
    assert [len(row["hash_ids"]) for row in found] == [4, 3, 4, 3]
    assert found[0]["hash_ids"][:2] == found[2]["hash_ids"][:2] != found[1]["hash_ids"][:2] == found[3]["hash_ids"][:2]
    requests = list(open_trace(str(path)))
    assert [one.id_block_size for one in requests] == [32, 48, 32, 48]
    command = [sys.executable, "-m", "kvyard", "replay", str(path), "--workers", "1", "--block-size", "16", "-q"]
    subprocess.run([*command, "--report", str(tmp_path / "r.json")], check=True, timeout=100, capture_output=True)
    # The second of each finds what the first left: 32 + 32 tokens of full blocks in one case, 48 + 48 in the other.
    assert json.loads((tmp_path / "r.json").read_text())["reuse"]["all"]["part"] == 64 + 96


def test_a_request_that_comes_twice_is_recorded_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "t.jsonl")
    desk.arrive("r", text(1, 20))
    desk.arrive("r", text(2, 20))
    desk.recorder.ended("r", 1)
    desk.recorder.close()
    assert desk.recorder.counters.rows == desk.recorder.counters.left_out == 1
