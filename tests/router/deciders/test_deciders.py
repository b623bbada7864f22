"""Deciders by their public rules: each one's edge, from both sides."""

from __future__ import annotations

import pytest

from kvyard.errors import KvyardError
from kvyard.index import Holder
from kvyard.router.deciders import DECIDERS, Prospect, SplitInput, make_decider
from kvyard.router.pace import LearntPace
from kvyard.router.request import Decision

pytestmark = pytest.mark.source  # derives from a view that is compiled


class Pace(LearntPace):
    """A millisecond a token, 2 a decoding request."""

    def __init__(self, capacity: int = 1000) -> None:
        super().__init__(1000)
        self.capacity = capacity

    def prefill(self, tokens: int) -> float:
        return float(tokens)

    def step(self, requests: int, context: int) -> float:
        return 2.0 * requests


def place(new: int, waiting: int = 0, requests: int = 0, blocks: int = 0) -> Prospect:
    decision = Decision(
        worker=Holder("w"),
        cost=0.0,
        id="q",
        policy="kv",
        why="cost",
        num_tokens=4000,
        new_tokens=new,
        blocks=250,
        prefill_tokens=waiting,
        active_requests=requests,
        active_blocks=blocks,
    )
    return Prospect(decision, Pace(), 8192)


def at(decode: Prospect, prefill: Prospect | None = None, tokens: int = 4000, send_ms: float = 0.0) -> SplitInput:
    return SplitInput(tokens, decode, prefill or place(tokens), send_ms)


def test_always_and_never_do_not_look():
    assert not make_decider("always").looks and make_decider("always").splits(None)
    assert not make_decider("never").looks and not make_decider("never").splits(None)


def test_uncached_goes_by_what_the_decode_worker_lacks():
    decider = make_decider("uncached")
    assert decider.splits(at(place(512))) and not decider.splits(at(place(511)))
    assert make_decider("uncached", {"tokens": 100}).splits(at(place(100)))


@pytest.mark.parametrize(
    ("new", "tokens", "stays"), [(2047, 4000, True), (2048, 4000, False), (2047, 2900, False), (699, 1000, True)]
)
def test_isl_bounding_wants_few_tokens_and_a_small_part(new, tokens, stays):
    for name in ("isl-bounding", "isl-or-load"):
        assert make_decider(name).splits(at(place(new), tokens=tokens)) is not stays


def test_prefill_load_stays_while_the_prefill_worker_is_busy():
    for name in ("prefill-load", "isl-or-load"):
        decider = make_decider(name, {"prefill_busy": 0.5})
        assert not decider.splits(at(place(4000), place(4000, waiting=4097)))
        assert decider.splits(at(place(4000), place(4000, waiting=4096)))


def test_a_busy_decode_worker_keeps_nothing():
    decider = make_decider("isl-bounding", {"decode_busy": 0.5})
    assert not decider.splits(at(place(10, blocks=500)))
    assert decider.splits(at(place(10, blocks=501)))


def test_least_time_weighs_queue_and_transfer_against_those_who_decode():
    decider = make_decider("least-time")
    # Alone, both take as long to compute, and the transfer and the first step come on top.
    assert not decider.splits(at(place(1000), place(1000), send_ms=1))
    # 20 requests decode there: 0.15 * 1000 * 20 is more than a transfer of 50 ms and a step of 42.
    assert decider.splits(at(place(1000, requests=20), place(1000), send_ms=50))
    assert not decider.splits(at(place(1000, requests=20), place(1000, waiting=3000), send_ms=50))


def test_drift_learns_from_late_first_tokens():
    decider = make_decider("drift", {"target_ms": 100, "weight": 1000})
    seen = at(place(100, waiting=50), place(100), send_ms=10)
    assert not decider.splits(seen)  # a transfer is dear while all is well
    for _ in range(20):
        decider.served(1000)
    assert decider.splits(seen)  # 50 ms sooner, and that counts now
    for _ in range(300):
        decider.served(0)
    assert not decider.splits(seen)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(KvyardError, match="unknown split policy 'perhaps': choose one of always"):
        make_decider("perhaps")
    with pytest.raises(KvyardError, match="unknown option 'tokens' of the split policy always: it has none"):
        make_decider("always", {"tokens": 1})
    with pytest.raises(KvyardError, match="tokens of the split policy uncached must be at least 0"):
        make_decider("uncached", {"tokens": -1})


def test_every_name_makes_one():
    for name in DECIDERS.names():
        assert make_decider(name).splits(at(place(10))) in (True, False)
