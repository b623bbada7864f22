"""Digests: nothing that is held is missed, what isn't held seems so as rarely as was asked for, and both ends agree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.errors import KvyardError
from kvyard.hashing import Key, TraceChain
from kvyard.index.chains import ChainIndex
from kvyard.index.digests import DigestIndex, decode, encode, fingerprint, span_of
from kvyard.replay import replay
from kvyard.replay.traces import TraceRequest

NUMBERS = st.sets(st.integers(0, 9_999), max_size=300)


@given(NUMBERS, st.sampled_from([10_000, 1 << 20]))
def test_a_digest_survives_the_wire(numbers: set[int], span: int) -> None:
    assert decode(encode(numbers, span)) == sorted(numbers)


@settings(max_examples=20)
@given(NUMBERS.filter(lambda numbers: len(numbers) > 8), st.integers(1, 6))
def test_a_digest_that_is_cut_off_is_refused(numbers: set[int], cut: int) -> None:
    data = encode(numbers, 10_000)
    with pytest.raises(KvyardError, match="cut off"):
        decode(data[:-cut])


@pytest.mark.parametrize(("error", "bytes_per_block"), [(0.1, 0.63), (0.05, 0.75), (0.01, 1.04), (0.001, 1.46)])
def test_size_and_error_are_as_stated(error: float, bytes_per_block: float) -> None:
    """Of 4,096 held blocks and 20,000 others, keys as traces have them: small numbers in a row."""
    blocks = 4096
    span = span_of(blocks, error)
    held = {fingerprint(key, span) for key in range(blocks)}
    others = sum(fingerprint(key, span) in held for key in range(1 << 20, (1 << 20) + 20_000)) / 20_000
    assert others == pytest.approx(error, rel=0.25)
    assert len(encode(held, span)) / blocks < bytes_per_block


@pytest.mark.parametrize("error", [0.0, 1.0, -0.5])
def test_an_error_that_can_not_be_is_refused(error: float) -> None:
    with pytest.raises(KvyardError, match="between 0 and 1"):
        span_of(100, error)


def chains(rng: random.Random) -> list[TraceChain]:
    """Texts of blocks of 4 tokens that share beginnings."""
    made: list[list[int]] = []
    for number in range(12):
        base = rng.choice(made)[: rng.randint(0, 8)] if made and rng.random() < 0.7 else []
        made.append([*base, *(1000 * number + at for at in range(rng.randint(1, 8)))])
    return [TraceChain(ids, 4, 4 * len(ids), 4, number + 1) for number, ids in enumerate(made)]


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.05, 1e-9]))
def test_rows_are_those_of_sets_of_numbers(seed: int, error: float) -> None:
    """A slow model: per place a list of the numbers of what it holds. With hardly any error, rows are exact."""
    rng = random.Random(seed)
    exact, digests = ChainIndex(), DigestIndex(8, error)
    texts = chains(rng)
    held: dict[int, set[Key]] = {place: set() for place in range(3)}
    for _ in range(60):
        place, chain = rng.randrange(3), rng.choice(texts)
        start, stop = sorted(rng.sample(range(len(chain.keys) + 1), 2))
        what = rng.random()
        if what < 0.05:
            exact.clear(place)
            digests.clear(place)
            held[place].clear()
        elif what < 0.6:
            assert exact.store_run(place, chain, start, stop) == digests.store_run(place, chain, start, stop)
            held[place].update(chain.keys[at] for at in range(start, stop))
        else:
            exact.remove_run(place, chain, start, stop)
            digests.remove_run(place, chain, start, stop)
            held[place].difference_update(chain.keys[at] for at in range(start, stop))
        digests.check_integrity()
        asked = rng.choice(texts).keys
        numbers = {place: {fingerprint(key, digests.span) for key in keys} for place, keys in held.items()}
        expected = []
        for at in range(len(asked)):
            number = fingerprint(asked[at], digests.span)
            mask = sum(1 << place for place, known in numbers.items() if number in known)
            if not mask:
                break
            expected.append(mask)
        rows = digests.lookup(asked)
        spread = [
            mask
            for begin, (stop, mask) in zip([0, *(row[0] for row in rows)], rows, strict=False)
            for _ in range(begin, stop)
        ]
        assert spread == expected
        if error < 1e-6:
            assert rows == exact.lookup(asked)
        assert all(decode(digests.digest(place)) == sorted(known) for place, known in numbers.items())


def trace() -> list[TraceRequest]:
    rng = random.Random(5)
    return [
        TraceRequest(
            id=str(number),
            arrival=number * 200_000_000,
            input_length=64 * 12,
            output_length=rng.randint(1, 40),
            ids=tuple([100 * (number % 7) + at for at in range(8)] + [10_000 + 10 * number + at for at in range(4)]),
            id_block_size=64,
        )
        for number in range(120)
    ]


FLEET = {"workers": 3, "num_gpu_blocks": 60, "block_size": 64, "predicted_ttl_s": 0.0}


def test_a_router_by_digests_without_error_or_delay_decides_as_by_events() -> None:
    plain, digested = (replay(trace(), digest_error=error, **FLEET) for error in (0.0, 1e-12))
    assert plain.report.latency == digested.report.latency and plain.report.reuse == digested.report.reuse


def test_errors_count_without_a_delay_too() -> None:
    exact, mistaken = (replay(trace(), digest_error=error, **FLEET).report for error in (0.0, 0.6))
    assert exact.reuse["all"].part != mistaken.reuse["all"].part


def test_digests_show_changes_late() -> None:
    """Plans and single passes say the same, and less is found than at once."""
    at_once = replay(trace(), **FLEET).report
    planned, stepped = (replay(trace(), digest_every="5s", plans=plans, **FLEET).report for plans in (True, False))
    assert planned.latency == stepped.latency and planned.reuse == stepped.reuse
    assert planned.reuse["all"].part < at_once.reuse["all"].part
