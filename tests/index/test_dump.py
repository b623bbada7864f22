"""A dump and what is made of it: another index that says the same, and goes on saying the same."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.index.fleet import PRESETS, Engine, prompts_of
from tests.index.support import Bench, hashes_of, nameless, removed, stored

from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import EventBatch, Removed, Stored, Tier
from kvyard.hashing import Media, Namespace
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.index.dump import IndexDump, dump, load

TEXT = list(range(1000, 1128))


def copy_of(indexer: Indexer, told: IndexDump | None = None) -> Indexer:
    """Another index with the same streams, made from a dump that went over a wire."""
    wire = msgspec.msgpack.encode(told or dump(indexer))
    other = Indexer(Identity(indexer.identity.block_size))
    for source in indexer.sources.values():
        other.register(source)
    load(other, msgspec.msgpack.decode(wire, type=IndexDump), indexer.sources)
    other.check_integrity()
    return other


def agree(one: Indexer, other: Indexer, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        assert one.score(prompt).workers == other.score(prompt).workers
    assert state_of(one) == state_of(other)


def state_of(indexer: Indexer) -> object:
    """All that can be seen of it besides answers: rows, counts, and how much is remembered and waits."""
    told = dump(indexer)
    rows = {(row.holder, row.tier, row.group): (sorted(b"".join(row.runs)), sorted(row.beyond)) for row in told.rows}
    feeds = {
        (name, feed.holder): (len(feed.bridge), list(feed.bridge.idle), len(feed.waiting))
        for name, feed in indexer.feeds()
    }
    return rows, feeds, [(one.stream, one.seq, one.state) for one in told.streams]


def update(batch: EventBatch) -> Update:
    return Update(
        stream=batch.stream,
        topic="",
        epoch=0,
        seq=batch.seq,
        origin=Origin.LIVE,
        state=State.FRESH,
        events=batch.events,
    )


@example(preset="full+wide blocks", seed=4925, size=2)  # hashes that went to rest together, in another order
@given(preset=st.sampled_from(sorted(PRESETS)), seed=st.integers(0, 10_000), size=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_a_copy_says_the_same_and_goes_on_doing_so(preset: str, seed: int, size: int) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    engines = [Engine(name, PRESETS[preset], seed=seed + at) for at, name in enumerate("ab")]
    indexer = Indexer(Identity(size))
    for engine in engines:
        indexer.register(Source(stream=engine.name, worker=engine.name, groups=PRESETS[preset], clear_scope="all"))
    copies = [indexer]
    for turn in range(60):
        for engine in engines:
            batch = engine.step(prompts)
            if batch is not None:
                for one in copies:
                    one.apply(update(batch))
        if turn == 25:
            copies.append(copy_of(indexer))
    for other in copies[1:]:
        agree(indexer, other, prompts)
        other.check_integrity()
        assert other.dedup.outstanding == indexer.dedup.outstanding


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_waiting_stores_repeated_ones_and_aliases_survive(size: int) -> None:
    space = Namespace(lora_name="poet", salt="s", media=(Media("cat", 6, 10),))
    bench = Bench(block_size=size)
    names = hashes_of(TEXT, 4)
    bench.say(stored(TEXT, 4, 0, 6), stored(TEXT, 4, 2, 4))  # twice
    bench.say(stored(TEXT, 4, 10, 14), stored(TEXT, 4, 20, 24))  # orphans
    bench.say(removed(TEXT, 4, 13, 14), nameless(TEXT, 4, 6, 8, tier=Tier.G2))
    bench.say(
        Stored(
            hashes=[7000 + at for at in range(8)],
            parent=None,
            tokens=TEXT[:32],
            block_size=4,
            lora_name="poet",
            salt="s",
            extra_keys=space.wire_extras(0, 8, 4),
        )
    )
    other = copy_of(bench.indexer)
    both = (bench.indexer, other)
    steps = [
        [removed(TEXT, 4, 2, 4)],
        [stored(TEXT, 4, 6, 10)],
        [removed(TEXT, 4, 2, 3)],
        [stored(TEXT, 4, 14, 20)],
        [Removed(hashes=[names[0]])],
        [stored(TEXT, 4, 0, 1)],
    ]
    for seq, events in enumerate(steps, 4):
        for one in both:
            one.apply(
                Update(
                    stream="a", topic="", epoch=0, seq=seq, origin=Origin.LIVE, state=State.FRESH, events=list(events)
                )
            )
            one.check_integrity()
        agree(*both, [TEXT, TEXT[:33]])
        assert bench.indexer.score(TEXT[:33], space).workers == other.score(TEXT[:33], space).workers
    assert other.score(TEXT[:33], space).workers[Holder("a")].tokens == 32 // size * size


def test_only_whole_streams_are_taken_over() -> None:
    bench = Bench(workers=("a", "b", "c"))
    for stream in "abc":
        bench.say(stored(TEXT, 4), stream=stream)
    bench.indexer.lose("b", "somebody said so")
    told = dump(bench.indexer)
    other = Indexer(Identity(4))
    for source in bench.indexer.sources.values():
        other.register(source)
    other.apply(Update(stream="c", topic="", epoch=0, seq=0, origin=Origin.LIVE, state=State.FRESH, events=[]))
    taken = load(other, told, ["a", "b", "c"])
    assert [one.stream for one in taken] == ["a"]  # b is stale, c was heard here already
    found = {holder.name: match.tokens for holder, match in other.score(TEXT).workers.items()}
    assert found == {"a": 124, "b": 0, "c": 0}


def test_streams_of_one_holder_are_taken_over_together_or_not_at_all() -> None:
    bench = Bench()
    bench.indexer.register(Source(stream="offload", worker="a"))
    bench.say(stored(TEXT, 4, 0, 4))
    bench.say(stored(TEXT, 4, tier=Tier.G2), stream="offload")
    told = dump(bench.indexer)
    for wanted, count in ((["a"], 0), (["a", "offload"], 2)):
        other = Indexer(Identity(4))
        for source in bench.indexer.sources.values():
            other.register(source)
        assert len(load(other, told, wanted)) == count


def test_another_naming_is_refused() -> None:
    bench = Bench(block_size=4)
    bench.say(stored(TEXT, 4))
    with pytest.raises(KvyardError, match="names blocks by"):
        load(Indexer(Identity(8)), dump(bench.indexer), ["a"])
    with pytest.raises(KvyardError, match="same kvyard"):
        load(Indexer(Identity(4)), msgspec.structs.replace(dump(bench.indexer), format=99), ["a"])


def test_dumps_of_the_first_format_can_still_be_read() -> None:
    """Written by kvyard at 284e7a9, before parts made their own snapshots."""
    text = list(range(1000, 1064))
    told = msgspec.msgpack.decode(
        (Path(__file__).parent / "data" / "dump_format_1.msgpack").read_bytes(), type=IndexDump
    )
    bench = Bench(block_size=8, workers=())
    for worker in "ab":
        bench.indexer.register(Source(stream=worker, worker=worker))
    assert [one.stream for one in load(bench.indexer, told, ["a", "b"])] == ["a", "b"]
    assert (bench.blocks(text), bench.blocks(text, "b")) == (2, 8)
    for events, blocks in (([stored(text, 4, 6, 10)], 2), ([removed(text, 4, 2, 4)], 2), ([removed(text, 4, 2, 4)], 1)):
        bench.say(*events)
        assert bench.blocks(text) == blocks
    agree(bench.indexer, copy_of(bench.indexer), [text])
