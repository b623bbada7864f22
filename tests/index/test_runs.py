"""Runs into the index: when they can be seen, what is counted, and that the answers are those of events over the wire."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.driving import Row, drive, trace_job
from tests.engine.test_core_traces import BLOCK, BYTES, HYBRID, LINK, SHARED, conversation, rows_of
from tests.index.both_ways import BothWays, Tee, named
from tests.index.fleet import PRESETS, Engine, prompts_of
from tests.index.support import ENGINE

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.events.types import Tier
from kvyard.hashing import Run, TraceChain
from kvyard.index import Holder
from kvyard.index.chains import WholeChain
from kvyard.index.runs import RunIndexer
from kvyard.tiers import OffloadConfig, TierConfig

W = Holder("w")
FULL = (GroupSpec(block_size=4),)


def text(blocks: int = 8, first: int = 0, own: int = 1) -> TraceChain:
    """A prompt of so many blocks of 4 tokens."""
    return TraceChain(range(first, first + blocks), 4, 4 * blocks, 4, own)


def held(index: RunIndexer, chain: TraceChain) -> list[tuple[int, set[str]]]:
    return named(index.places, index.backend.lookup(chain.keys, True))


class TestFeed:
    def test_a_change_is_seen_when_its_pass_is_over_and_the_lag_has_gone_by(self) -> None:
        index, chain = RunIndexer(4, lag=50), text()
        feed = index.attach(W, FULL, [Tier.G1])
        feed.entered(Run(chain), 0, Tier.G1, True)
        index.flush(1000)
        assert held(index, chain) == []
        feed.end_iteration(1000)
        index.flush(1049)
        assert held(index, chain) == []
        index.flush(1050)
        assert held(index, chain) == [(8, {"w@0 G1 group 0"})]

    def test_only_first_and_last_copies_of_known_tiers_count(self) -> None:
        index, chain = RunIndexer(4), text()
        feed = index.attach(W, FULL, [Tier.G1])
        feed.entered(Run(chain, 0, 4), 0, Tier.G1, True)
        feed.entered(Run(chain, 4, 8), 0, Tier.G1, False)
        feed.entered(Run(chain), 0, Tier.G2, True)
        feed.left(Run(chain, 0, 2), 0, Tier.G1, False)
        feed.end_iteration(0)
        index.flush(0)
        assert held(index, chain) == [(4, {"w@0 G1 group 0"})]

    def test_a_clear_takes_its_turn_behind_what_waits(self) -> None:
        index, old, new = RunIndexer(4, lag=10), text(), text(first=100, own=2)
        feed = index.attach(W, FULL, [Tier.G1, Tier.G2])
        feed.entered(Run(old), 0, Tier.G1, True)
        feed.entered(Run(old), 0, Tier.G2, True)
        feed.end_iteration(0)
        feed.cleared(Tier.G1)
        feed.entered(Run(new), 0, Tier.G1, True)
        feed.end_iteration(5)
        index.flush(10)
        assert held(index, old) == [(8, {"w@0 G1 group 0", "w@0 G2 group 0"})]
        index.flush(15)
        assert held(index, old) == [(8, {"w@0 G2 group 0"})]
        assert held(index, new) == [(8, {"w@0 G1 group 0"})]

    def test_a_block_announced_twice_is_removed_by_two_removals(self) -> None:
        index, chain = RunIndexer(4), text()
        feed = index.attach(W, FULL, [Tier.G2])
        for start in (0, 2):  # two chunks that overlap
            feed.entered(Run(chain, start, start + 4), 0, Tier.G2, True)
        feed.end_iteration(0)
        index.flush(0)
        assert index.dedup.outstanding == 2
        feed.left(Run(chain, 0, 4), 0, Tier.G2, True)
        feed.end_iteration(0)
        index.flush(0)
        assert held(index, chain) == [(2, set()), (6, {"w@0 G2 group 0"})]
        feed.left(Run(chain, 2, 6), 0, Tier.G2, True)
        feed.end_iteration(0)
        index.flush(0)
        assert held(index, chain) == [] and index.dedup.outstanding == 0

    def test_the_part_of_a_larger_block_that_two_texts_share_stays_with_the_other(self) -> None:
        """The blocks of 8 tokens differ in their second half, and both stand for the first in blocks of 4."""
        wide = (GroupSpec(block_size=8),)
        index = RunIndexer(4)
        feed = index.attach(W, wide, [Tier.G1])
        one, other = (TraceChain((1, last), 4, 8, 4, last) for last in (2, 3))
        for chain in (one, other):
            feed.entered(Run(chain.coarser(8)), 0, Tier.G1, True)
        feed.left(Run(other.coarser(8)), 0, Tier.G1, True)
        feed.end_iteration(0)
        index.flush(0)
        assert held(index, one) == [(2, {"w@0 G1 group 0"})]

    def test_generated_text_is_left_out(self) -> None:
        index, chain = RunIndexer(4), text(2)
        feed = index.attach(W, FULL, [Tier.G1])
        chain.grow(16)
        feed.entered(Run(chain), 0, Tier.G1, True)
        feed.end_iteration(0)
        index.flush(0)
        assert index.backend.usage().blocks == 2

    def test_a_removed_worker_holds_and_announces_nothing(self) -> None:
        index, chain = RunIndexer(4, lag=10), text()
        feed, other = index.attach(W, FULL, [Tier.G1]), index.attach(Holder("x"), FULL, [Tier.G1])
        for one in (feed, other):
            one.entered(Run(chain, 0, 4), 0, Tier.G1, True)
            one.end_iteration(0)
            one.entered(Run(chain, 4, 8), 0, Tier.G1, True)
            one.end_iteration(10)
        index.flush(10)
        index.detach(W)
        index.flush(20)
        assert held(index, chain) == [(8, {"x@0 G1 group 0"})]
        assert list(index.scorer.score(chain.keys).workers) == [Holder("x")]  # type: ignore[arg-type]
        index.check_integrity()


# -- the same as over the wire ----------------------------------------------------------------------------------------

WINDOWED = (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=9, block_size=4))
STATEFUL = (GroupSpec(block_size=4), GroupSpec(kind="mamba", block_size=4, mode="all"))
TIERS = (Tier.G1, Tier.G2, Tier.G3)


@given(
    seed=st.integers(0, 1 << 32), groups=st.sampled_from([FULL, WINDOWED, STATEFUL]), size=st.sampled_from([1, 2, 6])
)
@settings(max_examples=30)
def test_random_streams_leave_the_same_rows_and_scores(seed: int, groups: tuple[GroupSpec, ...], size: int) -> None:
    """Two workers and a pool that they share; tiers that announce overlapping chunks of ``size`` blocks; clears of one tier and
    of all; several changes an iteration.
    """
    rng = random.Random(seed)
    ways = BothWays(4)
    workers, pool = [Holder("a"), Holder("b", 1)], Holder("pool", 0, True)
    sinks = [ways.attach(one, groups, TIERS[:2]) for one in workers] + [ways.attach(pool, groups, TIERS[1:])]
    ways.share("pool", workers)
    prompts = _prompts(rng)
    live: list[list[tuple[Run, int, Tier]]] = [[] for _ in sinks]
    for now in range(30):
        at = rng.randrange(len(sinks))
        sink, mine = sinks[at], live[at]
        for _ in range(rng.randrange(1, 5)):
            chance = rng.random()
            if chance < 0.6:
                tier, group = rng.choice(TIERS[1:] if at == 2 else TIERS[:2]), rng.randrange(len(groups))
                entry = (_stretch(rng, prompts, size if tier > Tier.G1 else 0), group, tier)
                if tier > Tier.G1 or not any(_meets(entry, other) for other in mine):
                    sink.entered(*entry, True)
                    mine.append(entry)
            elif chance < 0.95 and mine:
                run, group, tier = mine.pop(rng.randrange(len(mine)))
                sink.left(run, group, tier, True)
            elif chance > 0.97:
                emptied = rng.choice((None, *TIERS))
                sink.cleared(emptied)
                mine[:] = [entry for entry in mine if emptied is not None and entry[2] != emptied]
        sink.end_iteration(now)
        for chain in prompts:
            ways.agree(chain.keys, chain.num_tokens + 1)
        assert ways.runs.dedup.outstanding == ways.wire.dedup.outstanding
        ways.check_integrity()


def _prompts(rng: random.Random) -> list[TraceChain]:
    """Prompts of up to 12 blocks that share prefixes of every length."""
    texts: list[list[int]] = []
    for number in range(6):
        ids = list(rng.choice(texts)[: rng.randrange(1, 12)]) if texts and rng.random() < 0.7 else []
        texts.append(ids + [100 * (number + 1) + at for at in range(len(ids), rng.randrange(len(ids), 12) + 1)])
    return [TraceChain(ids, 4, 4 * len(ids), 4, own) for own, ids in enumerate(texts)]


def _stretch(rng: random.Random, prompts: list[TraceChain], size: int) -> Run:
    """Some blocks of a prompt, from its start if no ``size`` is given."""
    chain = rng.choice(prompts)
    blocks = len(chain.keys)
    start = rng.randrange(blocks) if size else 0
    return Run(chain, start, min(blocks, start + size) if size else rng.randrange(blocks) + 1)


def _meets(one: tuple[Run, int, Tier], other: tuple[Run, int, Tier]) -> bool:
    """Return true if a map that announces first copies only would keep quiet about some of it."""
    return one[1:] == other[1:] and not set(one[0].hashes).isdisjoint(other[0].hashes)


class TokenEngine(Engine):
    def chain(self, tokens: object) -> WholeChain:
        return WholeChain(tokens, self.manager.geometry.hash_block_size, ENGINE)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=6)
def test_managers_of_every_kind_of_model_are_scored_the_same(preset: str, seed: int) -> None:
    """Real tokens: over the wire the index works out its own names, and groups may have larger blocks than it."""
    rng = random.Random(seed)
    groups = PRESETS[preset]
    size = min(spec.block_size for spec in groups)
    ways = BothWays(size, with_tokens=True)
    engine = TokenEngine("w", groups, seed=seed, batcher=ways.attach(W, groups))
    prompts = prompts_of(rng)
    for _ in range(25):
        engine.step(prompts)
        for prompt in prompts:
            # Of a state in larger blocks the wire's index keeps only the end of each.
            ways.agree(engine.chain(prompt).keys, prompt, rows=len({spec.block_size for spec in groups}) == 1)
    ways.check_integrity()


def _offload(**more: object) -> OffloadConfig:
    tiers = (TierConfig(num_blocks=1500, link=LINK), TierConfig(num_blocks=4000, link=LINK))
    return OffloadConfig(tiers=tiers, **more)  # type: ignore[arg-type]


SERVING = {
    "plain": EngineConfig(num_gpu_blocks=2048, block_size=BLOCK),
    "tiers": EngineConfig(num_gpu_blocks=2048, block_size=BLOCK, tiers=_offload(), bytes_per_block=BYTES),
    "chunks": EngineConfig(
        num_gpu_blocks=2048, block_size=BLOCK, tiers=_offload(blocks_per_chunk=4), bytes_per_block=BYTES
    ),
    "hybrid": EngineConfig(num_gpu_blocks=4096, groups=HYBRID),
    "hybrid with tiers": EngineConfig(num_gpu_blocks=4096, groups=HYBRID, tiers=_offload(), bytes_per_block=BYTES),
}


def serve(config: EngineConfig, rows: list[Row]) -> None:
    """Run a trace through an engine, and now and then ask both ways about every prompt."""
    ways = BothWays(BLOCK)
    sink = ways.attach(W, config.specs, TIERS)
    prompts = [(trace_job(at, row, BLOCK).chain.keys, row.length) for at, row in enumerate(rows)]
    found: list[int] = []

    def look() -> None:
        found.append(sum(ways.agree(*prompt).workers[W].blocks for prompt in prompts))
        ways.check_integrity()

    drive(make_core(config, batcher=Watched(sink, look)), rows, check=False)
    look()
    assert len(found) > 3 and all(found)


class Watched:
    """A ``Tee`` that looks after 50 iterations with any change, and then after twice as many each time."""

    def __init__(self, sink: Tee, look: Callable[[], None]) -> None:
        self.entered, self.left, self.cleared = sink.entered, sink.left, sink.cleared
        self._sink, self._look = sink, look
        self._count, self._next = 0, 50

    def end_iteration(self, now: int) -> None:
        if self._sink.end_iteration(now):
            self._count += 1
            if self._count == self._next:
                self._next *= 2
                self._look()


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_traces_leave_the_same_rows_and_scores(trace: str, name: str) -> None:
    serve(SERVING[name], _rows(trace, 240))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_whole_traces_leave_the_same_rows_and_scores(trace: str, name: str) -> None:
    serve(SERVING[name], _rows(trace, 1 << 30))


def _rows(trace: str, count: int) -> list[Row]:
    path: Path = SHARED / f"{trace}_trace.jsonl"
    if trace == "conversation" and count < 1000:
        return conversation(count)
    if not path.exists():
        pytest.skip(f"{path} is not at hand")
    return rows_of(path, count)
