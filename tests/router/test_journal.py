"""The journal has everything a router was told, in order, and is read back as it was written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.small_disk import small_disk

from kvyard.errors import KvyardError
from kvyard.events import EventBatch, Stored
from kvyard.events.transport import Origin, State, Update
from kvyard.hashing import algorithm
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.line_file import PORTION
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.router.journal import (
    FORMAT,
    Applied,
    Began,
    Ended,
    Entry,
    FirstToken,
    Joined,
    JournaledIndexer,
    JournalFile,
    Left,
    Listening,
    NotRouted,
    Routed,
    read_journal,
)

PROMPT = list(range(100, 110))
W0, W1 = Holder("w0"), Holder("w1")


def identity() -> Identity:
    return Identity(16, algorithm("xxh3", "docs", {}), direct=True)


def stored(stream: str, seq: int, keys: list[int]) -> EventBatch:
    return EventBatch(stream=stream, seq=seq, events=[Stored(hashes=keys, parent=None, tokens=None, block_size=16)])


def lives(indexer: Indexer, router: Router) -> list[Any]:
    """A router's day: two workers, hits, a retry, a worker that leaves, and somebody nobody can take."""
    decisions: list[Any] = []
    for name in ("w0", "w1"):
        indexer.register(Source(stream=name, worker=name))
        router.add_worker(name)
    indexer.apply_batch(stored("w1", 0, PROMPT[:6]), now=3)
    decisions.append(router.route(RouteRequest("a", PROMPT, 170), 10, detail=True))
    router.prefill_done("a", 20)
    decisions.append(router.preview(RouteRequest("b", PROMPT[:8], 130), 22))
    decisions.append(router.route(RouteRequest("b", PROMPT[:8], 130, "talk", 50), 25))
    router.finished("b", 30)
    decisions.append(router.route(RouteRequest("b", PROMPT[:8], 130, "talk", 50), 31, exclude=[decisions[-1].worker]))
    indexer.apply_batch(stored("w0", 0, PROMPT[:2]), now=33)
    router.drain("w1")
    router.progressed("b", 17, 35)
    decisions.append(router.route(RouteRequest("c", PROMPT[:3], 50), 40))
    indexer.lose("w0", "a test says so")
    router.remove_worker("w0")
    with pytest.raises(KvyardError, match="no worker may be chosen"):
        router.route(RouteRequest("d", PROMPT, 170), 50)
    router.add_worker("w1")
    decisions.append(router.route(RouteRequest("d", PROMPT, 170), 60))
    router.finished("a", 70)
    router.finished("never heard of", 71)
    indexer.unregister("w0")
    return decisions


def test_a_router_that_writes_decides_as_before() -> None:
    entries: list[Entry] = []
    journal = entries.append
    plain = Indexer(identity())
    wordy = JournaledIndexer(identity(), journal=journal)
    config = RouterConfig(track_output=True)
    before = lives(plain, Router(config, [], plain, seed=3))
    after = lives(wordy, Router(config, [], wordy, seed=3, journal=journal))
    assert before == after
    routed = [entry for entry in entries if isinstance(entry, Routed)]
    del after[1]  # the preview: asked, not decided
    assert [msgspec.structs.replace(one, candidates=()) for one in after] == [entry.decision for entry in routed]
    assert [(entry.id, entry.at, entry.blocks, entry.tail) for entry in routed] == [
        ("a", 10, 10, 109),
        ("b", 25, 8, 107),
        ("b", 31, 8, 107),
        ("c", 40, 3, 102),
        ("d", 60, 10, 109),
    ]
    assert routed[2].excluded == (after[1].worker,) and routed[2].session == "talk"
    assert all(not entry.keys for entry in routed)
    names = [type(entry).__name__ for entry in entries]
    assert names == [
        *(
            "Began",
            "Listening",
            "Joined",
            "Listening",
            "Joined",
            "Applied",
            "Routed",
            "FirstToken",
            "Previewed",
            "Routed",
            "Ended",
        ),
        *(
            "Routed",
            "Applied",
            "Drained",
            "Progressed",
            "Routed",
            "Lost",
            "Left",
            "NotRouted",
            "Joined",
            "Routed",
            "Ended",
        ),
        "Unheard",
    ]
    left = next(entry for entry in entries if isinstance(entry, Left))
    assert left.worker == W0 and set(left.under_way) == {
        entry.id for entry in routed if entry.decision.worker == W0 and entry.id != "d"
    }
    refused = next(entry for entry in entries if isinstance(entry, NotRouted))
    assert refused.id == "d" and "no worker" in refused.why


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries: list[Entry] = []
    path = tmp_path / "journal.jsonl"
    with closing(JournalFile(path)) as file:

        def write(entry: Entry) -> None:
            entries.append(entry)
            file.write(entry)

        indexer = JournaledIndexer(identity(), journal=write)
        lives(indexer, Router(RouterConfig(), [], indexer, journal=write, whole=True))
        update = Update(
            stream="w1", topic="t", epoch=2, seq=7, origin=Origin.STATE, state=State.STALE, reason="late", rank=1
        )
        indexer.apply(update, 99)
    found = list(read_journal(path))
    assert found == entries and file.entries == len(entries) and not file.dropped
    assert isinstance(found[0], Began) and found[0].format == FORMAT
    last = found[-1]
    assert isinstance(last, Applied)
    assert (last.at, last.topic, last.epoch, last.seq, last.origin, last.state) == (99, "t", 2, 7, "state", "stale")
    assert next(entry for entry in found if isinstance(entry, Routed)).keys == tuple(PROMPT)


def test_only_so_much_waits_for_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with closing(JournalFile(path)) as file:
        wrote = 0
        while not path.stat().st_size:
            file.write(Ended(id="x" * 1000, at=1))
            wrote += 1000
            assert wrote < 2 * PORTION
        file.write(Joined(worker=W1))
        assert len(list(read_journal(path))) < file.entries
        file.flush()
        assert len(list(read_journal(path))) == file.entries
    file.close()


def test_a_cut_journal_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with closing(JournalFile(path)) as file:
        file.write(Joined(worker=W0))
        file.write(FirstToken(id="a", at=5))
        file.write(Ended(id="a", at=6))
    whole = list(read_journal(path))
    assert [type(entry) for entry in whole] == [Joined, FirstToken, Ended]
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    assert list(read_journal(path)) == whole[:2]
    path.write_bytes(data.replace(b"first_token", b"first_tokem"))
    with pytest.raises(KvyardError, match="line 2"):
        list(read_journal(path))


def test_a_packed_journal_is_read_up_to_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl.gz"
    with closing(JournalFile(path)) as file:
        file.write(Joined(worker=W0))
        file.flush()
        first = path.stat().st_size
        file.write(Ended(id="a", at=6))
    assert [type(entry) for entry in read_journal(path)] == [Joined, Ended]
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    assert [type(entry) for entry in read_journal(path)][:1] == [Joined]
    path.write_bytes(data[: first - 12])
    with pytest.raises(KvyardError, match="breaks off"):
        list(read_journal(path))


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    JournalFile(path).close()
    with pytest.raises(KvyardError, match="exists"):
        JournalFile(path)
    with pytest.raises(KvyardError, match="can't write"):
        JournalFile(tmp_path / "no" / "journal.jsonl")
    with pytest.raises(KvyardError, match="can't read"):
        list(read_journal(tmp_path / "nothing"))


def test_a_full_disk_stops_the_journal_and_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, 64 << 10) as disk:
        file = JournalFile(disk / "journal.jsonl")
        for at in range(2000):
            file.write(Ended(id="a" * 100, at=at))
        file.flush()
        assert file.error == "No space left on device" and file.entries + file.dropped == 2000
        file.write(Ended(id="b", at=11))
        file.flush()
        file.close()
        found = list(read_journal(disk / "journal.jsonl"))
        assert 100 < len(found) == file.entries < 1000, "all that fitted is there, to the last whole line"
        assert file.dropped == 2001 - len(found)
    assert caplog.text.count("ends here: No space left on device") == 1


def test_refused_changes_are_not_journaled() -> None:
    entries: list[Entry] = []
    indexer = JournaledIndexer(identity(), journal=entries.append)
    indexer.apply_batch(stored("nobody", 0, PROMPT))
    indexer.register(Source(stream="w0", worker="w0"))
    indexer.register(Source(stream="w0", worker="w0"))
    with pytest.raises(KvyardError):
        indexer.register(Source(stream="w0", worker="w1"))
    indexer.unregister("nobody")
    assert [type(entry) for entry in entries] == [Listening]
