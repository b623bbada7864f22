"""The fault injector: each fault does what it says, and the same seed does the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.errors import KvyardError
from kvyard.events.faults import Faults, Injector, inject
from kvyard.events.transport.frames import Frame

FRAMES = [Frame(b"t", seq, b"payload %d" % seq) for seq in range(200)]
RATE = st.floats(0, 1)


def seqs(frames) -> list[int]:
    return [frame.seq for frame in frames]


def test_none():
    assert list(inject(FRAMES, Faults())) == FRAMES
    assert not Faults().any and Faults(drop=0.1).any


def test_drop_and_duplicate():
    injector = Injector(Faults(drop=0.2, duplicate=0.2, seed=1))
    out = [frame for given in FRAMES for frame in injector.feed(given)]
    counters = injector.counters
    assert 20 < counters.dropped < 60 and 20 < counters.duplicated < 60
    assert len(out) == 200 - counters.dropped + counters.duplicated == counters.passed
    assert set(out) <= set(FRAMES) and seqs(out) == sorted(seqs(out))


def test_reorder_is_bounded_and_loses_nothing():
    out = seqs(inject(FRAMES, Faults(reorder=0.3, reorder_by=4, seed=2)))
    assert out != sorted(out) and sorted(out) == list(range(200))
    for at, seq in enumerate(out):
        assert sum(other > seq for other in out[:at]) <= 4 + 4, "overtaken by few"


@pytest.mark.parametrize(("fault", "shorter"), [("truncate", True), ("corrupt", False)])
def test_damage(fault, shorter):
    out = list(inject(FRAMES, Faults(**{fault: 0.5}, seed=3)))
    damaged = [(got, sent) for got, sent in zip(out, FRAMES, strict=True) if got != sent]
    assert 60 < len(damaged) < 140
    for got, sent in damaged:
        assert got.seq == sent.seq
        if shorter:
            assert sent.payload.startswith(got.payload) and len(got.payload) < len(sent.payload)
        else:
            assert len(got.payload) == len(sent.payload)


def test_restart_begins_again_at_0():
    injector = Injector(Faults(restart=0.05, seed=4))
    out = []
    for frame in FRAMES:
        renumbered, restarted = injector.renumber(frame)
        assert (renumbered.seq == 0) is (restarted or frame.seq == 0)
        out += injector.disturb(renumbered)
    assert injector.counters.restarts == seqs(out)[1:].count(0) > 2
    assert all(b == a + 1 or b == 0 for a, b in zip(seqs(out), seqs(out)[1:], strict=False))


def test_stall_fills_a_queue_and_loses_the_rest():
    injector = Injector(Faults(stall=1.0, stall_frames=10, stall_room=3))
    arrived = [injector.feed(frame) for frame in FRAMES[:20]]
    assert [len(frames) for frames in arrived] == ([0] * 9 + [3]) * 2
    assert seqs(arrived[9]) == [0, 1, 2] and injector.counters.lost_in_stalls == 14
    injector.feed(FRAMES[20])
    assert seqs(injector.flush()) == [20]


@given(
    seed=st.integers(0, 99),
    rates=st.fixed_dictionaries(
        dict.fromkeys(["drop", "duplicate", "reorder", "truncate", "corrupt", "restart", "stall"], RATE)
    ),
)
def test_the_same_seed_does_the_same(seed, rates):
    faults = Faults(**rates, seed=seed, stall_frames=5)
    first, second = Injector(faults), Injector(faults)
    out = [frame for given in FRAMES[:50] for frame in first.feed(given)] + first.flush()
    assert out == [frame for given in FRAMES[:50] for frame in second.feed(given)] + second.flush()
    counters = first.counters
    assert counters.frames == 50 and counters.passed == len(out)
    assert len(out) == 50 - counters.dropped + counters.duplicated - counters.lost_in_stalls


def test_refusals():
    with pytest.raises(KvyardError, match="drop is a probability from 0 to 1, got 2"):
        Faults(drop=2)
    with pytest.raises(KvyardError, match="reorder_by can't be negative"):
        Faults(reorder_by=-1)
