"""Chains: growing equals starting over, traces name every boundary, and views answer as the whole does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.hashing import (
    PLAIN,
    Algorithm,
    Chain,
    Embeds,
    Key,
    Media,
    Namespace,
    Run,
    TokenChain,
    TraceChain,
    algorithm,
    wire_hash,
)

XXH3 = algorithm("xxh3", environ={})
CBOR = algorithm("sha256_cbor", environ={})
SPACES = [
    PLAIN,
    Namespace(salt="tenant"),
    Namespace(lora_name="sql", lora_path="/sql"),
    Namespace(media=(Media("a", 3, 9), Media("b", 12, 2), Media("a", 40, 30))),
]
TEXTLIKE = SPACES[:3]

tokens = st.lists(st.integers(0, 3), max_size=60)
sizes = st.integers(1, 9)


def keys_of(chain: Chain) -> list[Key]:
    return chain.hashes(0, len(chain.keys))


class TestTokenChain:
    @given(tokens, sizes, st.sampled_from(SPACES), st.data())
    def test_growing_equals_starting_over(
        self, sequence: list[int], size: int, space: Namespace, data: st.DataObject
    ) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=6)))
        chain = TokenChain([], size, XXH3, space)
        for low, high in pairwise([0, *cuts, len(sequence)]):
            chain.append(sequence[low:high])
            assert len(chain.keys) == high // size
        assert chain.num_tokens == len(sequence)
        assert chain.keys == TokenChain(sequence, size, XXH3, space).keys
        assert chain.tokens_of(0, len(chain.keys)) == sequence[: len(chain.keys) * size]

    @given(tokens, tokens, sizes, st.sampled_from([XXH3, CBOR]))
    def test_equal_keys_mean_equal_prefixes(self, one: list[int], other: list[int], size: int, how: Algorithm) -> None:
        mine, theirs = TokenChain(one, size, how).keys, TokenChain(other, size, how).keys
        for at, (key, their) in enumerate(zip(mine, theirs, strict=False), 1):
            assert (key == their) == (one[: at * size] == other[: at * size])

    def test_namespaces_keep_apart(self) -> None:
        chains = [TokenChain(range(64), 4, XXH3, space) for space in SPACES[:3]]
        assert len({key for chain in chains for key in chain.keys}) == 3 * 16

    def test_media_keep_apart_from_where_they_start(self) -> None:
        plain, with_media = (
            TokenChain([0] * 40, 4, XXH3, space) for space in (PLAIN, Namespace(media=(Media("a", 9, 2),)))
        )
        assert [one == other for one, other in zip(plain.keys, with_media.keys, strict=True)] == [True] * 2 + [
            False
        ] * 8

    def test_events_get_the_bare_form(self) -> None:
        chain = TokenChain(range(12), 4, XXH3, Namespace(salt="s", media=(Media("a", 5, 2),)))
        assert chain.extras_of(0, 3) == [("s",), (("a", 1),), None]
        assert TokenChain(range(12), 4, XXH3).extras_of(1, 3) == [None, None]

    def test_block_size(self) -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            TokenChain([1], 0, XXH3)


class TestTraceChain:
    @given(
        st.lists(st.integers(0, 9), max_size=5),
        st.lists(st.integers(10, 19), max_size=5),
        st.lists(st.integers(20, 29), max_size=5),
        st.sampled_from([16, 512]),
        st.sampled_from([1, 7, 16, 48, 64, 512, 700]),
        st.sampled_from(TEXTLIKE),
        st.data(),
    )
    def test_blocks_inside_shared_ids_are_shared(
        self,
        shared: list[int],
        one: list[int],
        other: list[int],
        id_size: int,
        size: int,
        space: Namespace,
        data: st.DataObject,
    ) -> None:
        lengths = [data.draw(st.integers(0, len(ids) * id_size)) for ids in (shared + one, shared + other)]
        mine = TraceChain(shared + one, id_size, lengths[0], size, 1, space)
        theirs = TraceChain(shared + other, id_size, lengths[1], size, 2, space)
        for chain in (mine, theirs):
            chain.grow(data.draw(st.integers(0, 3 * size)))
        common = min(len(shared) * id_size, *lengths) // size
        assert keys_of(mine)[:common] == keys_of(theirs)[:common]
        assert not set(keys_of(mine)[common:]) & set(keys_of(theirs)[common:])

    @given(st.lists(st.integers(0, 2**40), max_size=6), sizes, sizes, st.sampled_from(TEXTLIKE), st.data())
    def test_one_by_one_or_all_at_once(
        self, ids: list[int], id_size: int, size: int, space: Namespace, data: st.DataObject
    ) -> None:
        prompt = data.draw(st.integers(0, len(ids) * id_size))
        chain = TraceChain(ids, id_size, prompt, size, 5, space)
        assert len(chain.keys) == prompt // size
        chain.grow(data.draw(st.integers(0, 30)))
        count = chain.num_tokens // size
        assert len(chain.keys) == count
        start = data.draw(st.integers(0, count))
        stop = data.draw(st.integers(start, count))
        assert chain.hashes(start, stop) == [chain.keys[at] for at in range(start, stop)]
        assert chain.tokens_of(0, count) is None
        with pytest.raises(IndexError):
            chain.keys[count]

    @given(st.lists(st.integers(0, 40), min_size=3, max_size=9, unique=True), sizes, sizes)
    def test_no_key_twice_in_a_chain(self, ids: list[int], id_size: int, size: int) -> None:
        chain = TraceChain(ids, id_size, len(ids) * id_size, size, 3)
        chain.grow(30)
        assert len(set(keys_of(chain))) == len({wire_hash(key) for key in keys_of(chain)}) == len(chain.keys)

    def test_namespaces_keep_apart(self) -> None:
        chains = [TraceChain([4, 5], 512, 1024, 16, own, space) for own, space in enumerate(TEXTLIKE)]
        again = TraceChain([4, 5], 512, 1024, 16, 9, Namespace(salt="tenant"))
        assert len({wire_hash(key) for chain in chains for key in keys_of(chain)}) == 3 * 64
        assert keys_of(again) == keys_of(chains[1])
        assert chains[1].extras_of(0, 2) == [("tenant",), None]

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="2 ids of 16 tokens don't cover a prompt of 33"):
            TraceChain([1, 2], 16, 33, 16, 0)
        with pytest.raises(ValueError, match="don't cover a prompt of -1"):
            TraceChain([1, 2], 16, -1, 16, 0)
        with pytest.raises(ValueError, match="block sizes must be at least 1"):
            TraceChain([1, 2], 16, 32, 0, 0)
        for space in (SPACES[3], Namespace(embeds=Embeds(b"1234", 1))):
            with pytest.raises(ValueError, match="leave them out of its namespace"):
                TraceChain([1, 2], 16, 32, 16, 0, space)


def some_chain(data: st.DataObject, size: int) -> TokenChain | TraceChain:
    if data.draw(st.booleans()):
        return TokenChain(
            data.draw(st.lists(st.integers(0, 3), max_size=200)), size, XXH3, data.draw(st.sampled_from(SPACES))
        )
    ids = data.draw(st.lists(st.integers(0, 9), max_size=20))
    chain = TraceChain(ids, 8, len(ids) * 8, size, 1)
    chain.grow(data.draw(st.integers(0, 40)))
    return chain


class TestCoarser:
    @given(sizes, st.integers(1, 5), st.data())
    def test_picks_the_last_hash_of_each(self, size: int, factor: int, data: st.DataObject) -> None:
        fine = some_chain(data, size)
        coarse = fine.coarser(size * factor)
        assert coarse.block_size == size * factor
        assert keys_of(coarse) == keys_of(fine)[factor - 1 :: factor]
        count = len(coarse.keys)
        assert coarse.tokens_of(0, count) == fine.tokens_of(0, count * factor)
        assert coarse.extras_of(0, count) == fine.namespace.wire_extras(0, count, size * factor)

    def test_grows_with_the_fine_one(self) -> None:
        fine = TokenChain(range(10), 4, XXH3)
        coarse = fine.coarser(8)
        assert len(coarse.keys) == 1
        fine.append(range(10, 16))
        assert len(coarse.keys) == 2
        assert coarse.keys[1] == fine.keys[3]

    def test_its_own_size_is_itself_and_others_are_refused(self) -> None:
        chain = TokenChain(range(10), 4, XXH3)
        assert chain.coarser(4) is chain
        for size in (2, 6, 0):
            with pytest.raises(ValueError, match=f"block size {size} is not a multiple of the hash block size 4"):
                chain.coarser(size)


class TestCut:
    @given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.data())
    def test_answers_as_before(self, size: int, factor: int, with_tokens: bool, data: st.DataObject) -> None:
        length = data.draw(st.sampled_from([0, 30, 600]))
        whole: Chain = TokenChain([i % 5 for i in range(length)], size, XXH3, data.draw(st.sampled_from(SPACES)))
        whole = whole.coarser(size * factor)
        start = data.draw(st.integers(0, len(whole.keys)))
        stop = data.draw(st.integers(start, min(len(whole.keys), start + 20)))
        cut = whole.cut(start, stop, with_tokens)
        old, new = Run(whole, start, stop), Run(cut, start, stop)
        assert new == old
        assert (new.hashes, new.parent) == (old.hashes, old.parent)
        assert cut.extras_of(start, stop) == whole.extras_of(start, stop)
        assert start == stop or (cut.reaches(start) and cut.reaches(stop - 1))
        if with_tokens:
            assert new.tokens == old.tokens
        elif cut is not whole:
            assert new.tokens is None

    def test_lets_go(self) -> None:
        whole = TokenChain(range(4000), 4, XXH3)
        cut = whole.cut(500, 510)
        assert cut is not whole
        assert len(cut.keys) == 510
        assert not cut.reaches(100)
        assert not cut.reaches(510)
        for ask in (lambda: cut.keys[100], lambda: cut.hashes(500, 511), lambda: cut.packed_hashes(510, 511)):
            with pytest.raises(IndexError, match="499 to 510 were kept"):
                ask()
        assert cut.cut(501, 502) is cut
        assert cut.reaches(499)
        assert cut.tokens_of(499, 510) is None

    def test_little_to_let_go_of(self) -> None:
        whole = TokenChain(range(400), 4, XXH3)
        assert whole.cut(10, 90) is whole
        assert whole.reaches(0)


def test_a_token_that_cannot_be_hashed_is_not_kept():
    chain = TokenChain(range(15), 16, XXH3)
    with pytest.raises(ValueError, match="token"):
        chain.append([-1])
    chain.append([15])
    assert chain.hashes(0, 1) == TokenChain(range(16), 16, XXH3).hashes(0, 1)
    with pytest.raises(ValueError, match="grows"):
        TraceChain([1], 512, 512, 16, own=1).grow(-1)
