"""Whom a worker may pull from: against a model that asks the index worker by worker."""

from __future__ import annotations

from random import Random

from kvyard.blocks import GroupSpec
from kvyard.events.types import Tier
from kvyard.hashing import Run, TraceChain
from kvyard.index import Holder
from kvyard.index.runs import RunIndexer
from kvyard.router.pace import LearntPace
from kvyard.router.sources import PeerSources, PullSource
from kvyard.router.worker import WorkerLoad

SIZE = 16


def slow_choice(
    reach: dict[Holder, int], target: Holder, has: int, loads: dict[Holder, WorkerLoad], lead: int, tolerance: int
) -> PullSource | None:
    """The rule, said once more: by sorting everyone, the best first."""
    worth = {
        holder: blocks
        for holder, blocks in reach.items()
        if holder.name != target.name and SIZE * blocks - SIZE * has >= lead
    }
    near = {holder: blocks for holder, blocks in worth.items() if max(worth.values()) - blocks <= tolerance}
    order = sorted(
        near, key=lambda holder: (loads[holder].prefill_tokens, loads[holder].requests, -near[holder], holder)
    )
    return PullSource(order[0], SIZE * near[order[0]]) if order else None


def test_choices_are_those_of_a_slow_model():
    """Prefixes of a few texts are stored and removed in two tiers of seven ranks; only one tier counts."""
    random = Random(5)
    index = RunIndexer(SIZE)
    holders = [Holder(f"w{at}") for at in range(5)] + [Holder("dp", 0), Holder("dp", 1)]
    feeds = {holder: index.attach(holder, [GroupSpec(block_size=SIZE)], [Tier.G1, Tier.G2]) for holder in holders}
    texts = [TraceChain(range(1000 * text, 1000 * text + 40), SIZE, 40 * SIZE, SIZE, text + 1) for text in range(3)]
    have: dict[tuple[Holder, Tier, int], int] = {}
    found = 0
    for step in range(400):
        holder, tier, text = random.choice(holders), random.choice([Tier.G1, Tier.G2]), random.randrange(3)
        before, after = have.get((holder, tier, text), 0), random.randrange(41)
        if after > before:
            feeds[holder].entered(Run(texts[text], before, after), 0, tier, True)
        elif after < before:
            feeds[holder].left(Run(texts[text], after, before), 0, tier, True)
        have[holder, tier, text] = after
        feeds[holder].end_iteration(step)
        index.flush(step)
        tier, lead, tolerance = random.choice([Tier.G1, Tier.G2]), random.choice([16, 100, 300]), random.randrange(3)
        sources = PeerSources(index, tier, lead, tolerance)
        sources.changed(holders)
        loads = {holder: WorkerLoad(0, holder, "both", LearntPace(), SIZE) for holder in holders}
        for load in loads.values():
            load.prefill_tokens, load.requests = random.choice([0, 0, 500]), random.randrange(3)
        target, has = random.choice(holders), random.choice([0, 0, random.randrange(41)])
        # The last token of a prompt is always computed, so a prompt that ends with a block can't use that one.
        reach = {one: min(have.get((one, tier, text), 0), 39) for one in holders}
        chosen = sources.choose(texts[text].keys, 40 * SIZE, target, has, loads.__getitem__)
        assert chosen == slow_choice(reach, target, has, loads, lead, tolerance)
        found += chosen is not None
    assert 100 < found < 390
