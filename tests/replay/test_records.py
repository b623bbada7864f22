"""Records as rows: what goes in comes out, in order, from memory and from a file, while requests are under way."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.support import record_of

from kvyard.errors import KvyardError
from kvyard.replay import records as module
from kvyard.replay.record import MISSES, Record, Stages
from kvyard.replay.records import STATUSES, Records

TIMES = st.integers(-1, 1 << 60)
TOKENS = st.integers(-1, (1 << 31) - 1)
STAGES = st.builds(
    Stages, prefill_worker=st.sampled_from(["", "p0", "p1@1"]), held=TIMES, reserved=TIMES, released=TIMES, sent=TIMES
)
RECORDS = st.builds(
    record_of,
    name=st.text(max_size=8),
    worker=st.sampled_from(["", "w0", "w1@3"]),
    session=st.none() | st.text(max_size=4),
    arrival=TIMES,
    admitted=TIMES,
    first_token=TIMES,
    ended=TIMES,
    loading=TIMES,
    tokens=TOKENS,
    wanted=TOKENS,
    output=TOKENS,
    cached=TOKENS,
    loaded=st.lists(TOKENS, max_size=5).map(tuple),
    miss=st.sampled_from(["", *MISSES]),
    status=st.sampled_from(STATUSES),
    reason=st.sampled_from(["", "no room", "it is too long"]),
    gone=TOKENS,
    left=TOKENS,
    retries=TOKENS,
    best_overlap=TOKENS,
    stages=st.none() | STAGES,
)


@given(records=st.lists(RECORDS, max_size=8, unique_by=lambda one: one.id))
def test_rows_hold_all_of_a_record(records: list[Record]) -> None:
    made = Records.of(records)
    assert list(made.values()) == records and len(made) == len(records)
    assert list(made) == [one.id for one in records]
    for one in records:
        assert made[one.id] == one
    assert "\0none" not in made


@pytest.mark.source
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_ends_with_a_file_below(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and end in any order; what is streamed has the order in which they came."""
    monkeypatch.setattr(module, "CHUNK", 8)
    monkeypatch.setattr(module, "BATCH", 5)
    random = Random(seed)
    expected = [record_of(f"r{at}", at, tokens=at, session="s" * (at % 3) or None) for at in range(300)]
    made = Records(resident=16)
    given: list[Record] = []
    made.stream(given.extend)
    waiting = list(reversed(expected))
    in_flight: list[Record] = []
    while waiting or len(in_flight) > 20:
        if waiting and random.random() < 0.55:
            in_flight.append(waiting.pop())
            made.begin(in_flight[-1])
        elif in_flight:
            one = in_flight.pop(random.randrange(min(30, len(in_flight))))
            one.status, one.ended = "finished", one.arrival + 5
            assert made.open[one.id] is one
            made.close(one.id)
        assert given == expected[: len(given)] and len(given) % 5 == 0
        assert len(made.open) == len(in_flight)
    assert len(given) > 100 and made._file is not None, "rows were given and put aside while it ran"
    made.finish()
    assert given == expected == list(made.values())
    assert made["r7"] is not expected[7] and made["r7"] == expected[7]
    parts = list(made.parts())
    assert [int(at) for part in parts for at in part.rows["arrival"]] == list(range(300))
    assert [name.decode() for part in parts for name in part.ids()] == [one.id for one in expected]


@pytest.mark.source
def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "CHUNK", 1)
    monkeypatch.setattr(module.tempfile, "TemporaryFile", full)
    with pytest.raises(KvyardError, match="No space left on device; let TMPDIR name a directory with room"):
        made = Records(resident=1)
        for at in range(3):
            made.begin(record_of(str(at)))
            made.close(str(at))
