"""Every eviction policy evicts, block for block, what a slow and obvious model evicts, however extents are split."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blocks.eviction_models import OPTIONS, POLICIES, SECOND, Cache, Prompt
from tests.blocks.support import FULL, XXH3

from kvyard.blocks import BlockManager, Request
from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.use import RequestFacts
from kvyard.hashing import TokenChain

SIZE = FULL.block_size


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Texts that share prefixes: new ones, continuations of earlier ones, and some that leave an earlier one half way."""
    made: list[list[int]] = []
    for at in range(count):
        tail = [1000 * (at + 1) + i for i in range(rng.randint(1, 6 * SIZE))]
        base: list[int] = []
        if made and rng.random() < 0.75:
            base = rng.choice(made[-12:])
            if rng.random() < 0.5:
                base = base[: rng.randint(0, len(base))]
        text = (base + tail)[: 12 * SIZE]
        made.append(base if base and rng.random() < 0.2 else text)
    return made


def next_uses(texts: list[Prompt], at: int) -> tuple[tuple[int, int], ...]:
    """Return the trace's future, found block by block."""
    found: list[tuple[int, int]] = []
    for position, key in enumerate(texts[at].keys):
        following = next((later.number for later in texts[at + 1 :] if key in later.keys), None)
        if following is None:
            break
        if found and found[-1][1] == following:
            found.pop()
        found.append(((position + 1) * SIZE, following))
    return tuple(found)


WORK = {"seed": st.integers(0, 10**6), "capacity": st.sampled_from([14, 25, 60]), "overlap": st.booleans()}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=4)
@given(**WORK)
def test_victims_are_those_of_the_model(name: str, seed: int, capacity: int, overlap: bool) -> None:
    compare(name, seed, capacity, overlap)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=300)
@given(**WORK)
def test_victims_are_those_of_the_model_at_length(name: str, seed: int, capacity: int, overlap: bool) -> None:
    compare(name, seed, capacity, overlap)


def compare(name: str, seed: int, capacity: int, overlap: bool) -> None:
    rng = random.Random(seed)
    clock = [0]
    manager = BlockManager(
        capacity + 1, [FULL], eviction=name, eviction_options=OPTIONS.get(name), now=lambda: clock[0]
    )
    texts: list[Prompt] = []
    requests: dict[Prompt, Request] = {}
    for number, tokens in enumerate(prompts(rng, 70)):
        chain = TokenChain(tokens, SIZE, XXH3)
        kind = rng.choice(["chat", "api"]) if name == "workload-aware" else ""
        prompt = Prompt(f"r{number}", list(chain.keys), len(tokens), number, kind, rng.choice([0, 0, 1, 2, 9]))
        texts.append(prompt)
        requests[prompt] = Request(prompt.name, chain)
    for at, prompt in enumerate(texts):
        future = next_uses(texts, at) if name == "belady" else ()
        requests[prompt].facts = RequestFacts(prompt.category, prompt.turn, prompt.number, future)
    policy = POLICIES[name](capacity, lambda: clock[0], SIZE, texts)
    model = Cache(capacity, SIZE, policy)
    running: list[Prompt] = []
    for at, prompt in enumerate(texts):
        clock[0] += rng.choice([0, SECOND, 40 * SECOND, 700 * SECOND])
        request = requests[prompt]
        if name == "queue-informed":
            waiting = texts[at : at + rng.randint(0, 4)]
            manager.note_queue([requests[one] for one in waiting])
            model.look(waiting)
        hit = manager.lookup(request)
        taken = manager.allocate(request, request.num_tokens - hit.tokens, hit)
        expected = model.start(prompt)
        assert (None if taken is None else (hit.tokens // SIZE, list(taken[0]))) == expected
        if taken is not None:
            request.num_computed_tokens = request.num_tokens
            running.append(prompt)
        while running and (not overlap or len(running) > 2 or rng.random() < 0.5):
            done = running.pop(rng.randrange(len(running)))
            clock[0] += rng.choice([0, SECOND])
            if rng.random() < 0.1:
                manager.pool.holds.end_all(manager.detach(requests[done]))
            else:
                manager.free(requests[done])
            model.end(done)
        manager.check_integrity()
        free = [block for block in manager.pool.line() if block not in set(model.loose)]
        assert sorted(free) == sorted(block.id for block in model.free)
    assert model.evictions == manager.pool.evicted
    assert capacity > 30 or model.evictions > 30
    for done in running:
        manager.free(requests[done])
    learner = manager.pool.learner
    if learner is None or learner.foreseeable:
        line = list(manager.pool.line())
        assert manager.pool.take(manager.pool.free) == line, "iteration says who goes next"


def test_every_order_has_a_model() -> None:
    assert {*POLICIES, "priority"} == set(ORDERS.ours)
