"""The index against the block managers that it mirrors: it says what they would say, whatever names and sizes differ."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.fleet import LEARNABLE, PRESETS, Engine, options_of, prompts_of

from kvyard.index import Holder, Identity, Indexer, Source


def follow(preset: str, size: int, seed: int, steps: int, learned: bool = False) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    indexer = Indexer(Identity(size))
    engines = [Engine(name, PRESETS[preset], seed=rng.randrange(1 << 30)) for name in ("a", "b")]
    for engine in engines:
        indexer.register(Source(stream=engine.name, worker=engine.name, **options_of(preset, learned)))
    exact = all(spec.block_size % size == 0 for spec in PRESETS[preset])
    for step in range(steps):
        for engine in engines:
            batch = engine.step(prompts)
            if batch is not None:
                indexer.apply_batch(batch, step)
        indexer.check_integrity()
        prompt = rng.choice(prompts)
        scores = indexer.score(prompt)
        for engine in engines:
            match = scores.workers[Holder(engine.name)]
            oracle = engine.longest(prompt)
            if exact:
                assert match.tokens == oracle or match.confidence == 0, (preset, size, seed, step, engine.name)
            else:
                # Ours are larger, so the last one may be lost, never won.
                assert match.tokens <= oracle, (preset, size, seed, step, engine.name)


@pytest.mark.parametrize("preset", PRESETS)
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([1, 2, 4]))
@settings(max_examples=12)
def test_scores_are_the_managers_own(preset: str, seed: int, size: int) -> None:
    follow(preset, size, seed, 40)


@pytest.mark.parametrize("preset", LEARNABLE)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=6)
def test_group_specs_are_learned_from_events(preset: str, seed: int) -> None:
    follow(preset, 4, seed, 40, learned=True)


@pytest.mark.parametrize("preset", PRESETS)
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([3, 5, 8, 12, 16]))
@settings(max_examples=8)
def test_larger_blocks_of_ours_never_promise_too_much(preset: str, seed: int, size: int) -> None:
    follow(preset, size, seed, 40)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_scores_are_the_managers_own_for_long(preset: str) -> None:
    for seed in range(8):
        follow(preset, (1, 2, 4, 3, 8)[seed % 5], seed, 800)
