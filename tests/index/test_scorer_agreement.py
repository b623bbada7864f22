"""Whole indexers on different backends, fed the same random streams: they give the same answers, to the last field.

Streams have holes, duplicates, orphans, hashes without tokens, clears, tiers, hybrid groups, two ranks and a shared pool. A new
backend joins by a line in ``BACKENDS_UNDER_TEST``.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.fleet import prompts_of
from tests.index.naive import NaiveIndex
from tests.index.support import hashes_of, nameless, removed, stored

from kvyard.blocks import GroupSpec
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Event, Stored, Tier
from kvyard.index import Holder, Identity, IndexBackend, Indexer, MemoryIndex, Scores, Source

BACKENDS_UNDER_TEST: dict[str, Callable[[], IndexBackend]] = {"memory": MemoryIndex}
HYBRID = (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=9, block_size=4))


def indexer_on(backend: IndexBackend, size: int) -> Indexer:
    return furnished(Indexer(Identity(size), backend, waiting=200, remembered=20))


def furnished(indexer: Indexer) -> Indexer:
    indexer.register(Source(stream="plain", worker="plain", by_rank=True))
    indexer.register(Source(stream="hybrid", worker="hybrid", groups=HYBRID))
    indexer.register(Source(stream="connector", worker="plain", clear_scope="all"))
    indexer.register(Source(stream="store", pool="store"))
    indexer.share("store", [Holder("plain"), Holder("hybrid")])
    return indexer


def event_of(rng: random.Random, stream: str, prompts: list[list[int]]) -> Event:
    prompt = rng.choice(prompts)
    blocks = len(prompt) // 4
    low = rng.randrange(blocks) if blocks else 0
    high = rng.randrange(low, blocks) + 1 if blocks else 0
    if rng.random() < 0.6:
        low = 0
    group = rng.randrange(2) if stream == "hybrid" else 0 if stream == "store" and rng.random() < 0.5 else None
    tier = {"plain": Tier.G1, "hybrid": Tier.G1, "connector": Tier.G2, "store": Tier.G3}[stream]
    if stream in ("plain", "hybrid") and rng.random() < 0.2:
        tier = Tier.G2
    deed = rng.random()
    if deed < 0.55:
        kind = "full_attention" if group == 0 else "sliding_window" if group == 1 else None
        make = nameless if rng.random() < 0.15 else stored
        return make(prompt, 4, low, high, group=group, tier=tier, kind=kind, window=9 if group == 1 else None)
    if deed < 0.6:
        names = hashes_of(prompt, 4)[low:high:2]
        return Stored(hashes=names, parent=None, tokens=prompt, block_size=4, group=group, tier=tier)
    if deed < 0.97:
        return removed(prompt, 4, low, high, group=group, tier=tier)
    return Cleared(tier=rng.choice((None, Tier.G1, Tier.G2)))


def agree(make: Callable[[], IndexBackend], seed: int, size: int, steps: int) -> None:
    walk(indexer_on(make(), size), indexer_on(NaiveIndex(), size), seed, steps)


def walk(ours: Indexer, model: Indexer, seed: int, steps: int, seen: Callable[[Scores], object] = lambda s: s) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng, 8, 50)
    seqs: dict[str, int] = {}
    for _ in range(steps):
        stream = rng.choice(("plain", "plain", "hybrid", "hybrid", "connector", "store"))
        seq = seqs[stream] = seqs.get(stream, -1) + 1
        fields = {"origin": Origin.LIVE, "state": State.FRESH, "events": [event_of(rng, stream, prompts)]}
        chance = rng.random()
        if chance < 0.03:
            seq = seqs[stream] = seq + 3
        elif chance < 0.06:
            seq = max(0, seq - 1)
        elif chance < 0.1:
            snapshot: list[Event] = [
                Cleared(),
                stored(prompts[0], 4, tier=Tier.G1, group=0 if stream == "hybrid" else None),
            ]
            fields = {"origin": Origin.SNAPSHOT, "state": State.FRESH, "events": snapshot}
        rank = rng.randrange(2) if stream == "plain" and fields["origin"] == Origin.LIVE else None
        update = Update(stream=stream, topic="", epoch=0, seq=seq, rank=rank, dialect="map", **fields)  # type: ignore[arg-type]
        for indexer in (ours, model):
            indexer.apply(update)
            indexer.check_integrity()
        prompt = rng.choice(prompts)
        keys = ours.identity.keys(prompt)
        assert seen(ours.score(prompt)) == seen(model.score(prompt))
        assert ours.matches(keys) == model.matches(keys)
        assert ours.dedup.counters == model.dedup.counters
        assert ours.dedup.outstanding == model.dedup.outstanding
        scores = ours.score_keys(keys)
        trusted = {worker: match.blocks for worker, match in scores.workers.items() if match.blocks}
        assert trusted == ours.matches(keys)


@pytest.mark.parametrize("make", BACKENDS_UNDER_TEST.values(), ids=BACKENDS_UNDER_TEST)
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([1, 2, 3, 4, 8, 12]))
@settings(max_examples=25)
def test_backends_agree(make: Callable[[], IndexBackend], seed: int, size: int) -> None:
    agree(make, seed, size, 40)


@pytest.mark.slow
@pytest.mark.parametrize("make", BACKENDS_UNDER_TEST.values(), ids=BACKENDS_UNDER_TEST)
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([1, 2, 3, 4, 8, 12]))
@settings(max_examples=40)
def test_backends_agree_for_long(make: Callable[[], IndexBackend], seed: int, size: int) -> None:
    agree(make, seed, size, 500)
