"""A million events: every part agrees with itself and with plain sets at the end."""

from __future__ import annotations

import random

import pytest

from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.hashing import TokenChain, algorithm
from kvyard.index import Holder, Identity, Indexer, Place, Source

XXH3 = algorithm("xxh3", "a million")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_events() -> None:
    rng = random.Random(7)
    texts = [[rng.randrange(9) for _ in range(32)] for _ in range(8)]
    for _ in range(192):
        old = rng.choice(texts)
        keep = rng.randrange(32)
        texts.append(old[:keep] + [rng.randrange(9) for _ in range(32 - keep)])
    chains: list[list[int]] = [TokenChain(text, 1, XXH3).hashes(0, 32) for text in texts]  # type: ignore[misc]
    indexer = Indexer(Identity(1, XXH3, direct=True))
    workers = [f"w{number}" for number in range(16)]
    counts: dict[tuple[str, Tier], dict[int, int]] = {}
    seqs = dict.fromkeys(workers, 0)
    for worker in workers:
        indexer.register(Source(stream=worker, worker=worker))
    for step in range(1_000_000):
        worker, tier = rng.choice(workers), rng.choice((Tier.G1, Tier.G1, Tier.G2))
        keys = rng.choice(chains)
        low = rng.randrange(32)
        part = keys[low : low + rng.randrange(1, 9)]
        held = counts.setdefault((worker, tier), {})
        deed = rng.random()
        event: Event
        if deed < 0.5:
            event = Stored(hashes=part, parent=keys[low - 1] if low else None, tokens=None, block_size=1, tier=tier)
            for key in part:
                held[key] = held.get(key, 0) + 1
        elif deed < 0.9999:
            event = Removed(hashes=part, tier=tier)
            for key in part:
                if held.get(key, 0) > 1:
                    held[key] -= 1
                else:
                    held.pop(key, None)
        else:
            event = Cleared(tier=tier)
            held.clear()
        indexer.apply(
            Update(
                stream=worker,
                topic="",
                epoch=0,
                seq=seqs[worker],
                origin=Origin.LIVE,
                state=State.FRESH,
                events=[event],
            )
        )
        seqs[worker] += 1
        if step % 100_000 == 0:
            indexer.check_integrity()
    indexer.check_integrity()
    for (worker, tier), held in counts.items():
        number = indexer.places.known(Place(Holder(worker), tier))
        assert number is not None
        found = {key for run in indexer.backend.held(number) for key in run}
        assert found == set(held)
    beyond = sum(count - 1 for held in counts.values() for count in held.values())
    assert indexer.dedup.outstanding == beyond
