"""Fuzzing: no payload raises, memory stays bounded, and a bad event leaves its neighbours alone."""

import gc
import os
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tests.events.wire import fuzzing

from kvyard.events.wire import Decoder, decode, dialects

SHORT, LONG = 4_000, 1_000_000
"""Payloads per dialect."""


def resident() -> float:
    """MiB in use now. Not the highest ever, which an earlier test may have set and which then hides any growth."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc here to read this process's memory from")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def flip_bytes(dialect: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    payloads = fuzzing.seeds()
    decoder = Decoder(dialect, narrow=bool(seed % 2))
    for at in range(count):
        payload = fuzzing.mutate(rng, payloads[at % len(payloads)], payloads)
        fuzzing.check(decoder.decode(payload), decoder)


def corrupt_one_event(count: int, seed: int) -> None:
    """Exchange parts of one event for junk; the others must come out as they did before."""
    rng = random.Random(seed)
    for payload in fuzzing.seeds():
        packed = payload[:1] not in b"[{"
        codec = msgspec.msgpack if packed else msgspec.json
        whole = codec.decode(payload)
        items = whole[1] if packed else whole
        # Alone, so that a neighbour's events can be told from those of the one that was spoiled.
        alone = [decode([1.0, [item], 0] if packed else [item]).events for item in items]
        for _ in range(count):
            at = rng.randrange(len(items))
            bad = fuzzing.corrupt(rng, items[at])
            if not packed and not isinstance(bad, dict):
                bad = {"data": None}
            spoiled = [*items[:at], bad, *items[at + 1 :]]
            if not packed and b"Ext" in repr(bad).encode():
                continue
            try:
                data = codec.encode([whole[0], spoiled, *whole[2:]] if packed else spoiled)
            except (TypeError, ValueError):
                continue
            decoder = Decoder()
            decoded = decoder.decode(data)
            fuzzing.check(decoded, decoder)
            before = [event for events in alone[:at] for event in events]
            after = [event for events in alone[at + 1 :] for event in events]
            assert tiers_aside(decoded.events[: len(before)], packed) == tiers_aside(before, packed)
            assert tiers_aside(decoded.events[len(decoded.events) - len(after) :], packed) == tiers_aside(after, packed)


def tiers_aside(events: list, packed: bool) -> list:
    """``events`` as they are; of TensorRT-LLM's removals not the tier, which earlier events decide."""
    return events if packed else [(type(event), event.hashes, event.group) for event in events]


@pytest.mark.parametrize("dialect", dialects())
def test_no_bytes_raise(dialect):
    flip_bytes(dialect, SHORT, seed=1)


def test_neighbours_survive():
    corrupt_one_event(600, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dialect", dialects())
def test_no_bytes_raise_at_length(dialect):
    flip_bytes(dialect, 20_000, seed=3)
    before = resident()
    flip_bytes(dialect, LONG, seed=4)
    grown = resident() - before
    assert grown < 32, f"{grown:.0f} MiB more after {LONG} payloads"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_neighbours_survive_at_length():
    corrupt_one_event(20_000, seed=5)


def test_a_bomb_is_refused():
    """Headers that promise gigabytes cost nothing, not even for a moment."""
    tracemalloc.start()
    try:
        for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
            for depth in (1, 100, 900):
                decode(b"\x92\x01" + (head + b"\x7f\xff\xff\xff") * depth)
                decode(b"\x92\x01\x91\x92\xabBlockStored" + (head + b"\x7f\xff\xff\xff") * depth)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak >> 20} MiB at the peak"
