"""Contract of every algorithm: chaining, no accidental equality, clear refusals, and how its seed is found."""

from __future__ import annotations

from hashlib import sha256

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.errors import KvyardError
from kvyard.hashing import ALGORITHMS, HashingError, Key, algorithm, wire_hash
from kvyard.hashing import algorithms as module
from kvyard.hashing.namespace import ExtraKeys

EVERY = {name: algorithm(name, "seed") for name in ALGORITHMS}
NAMES = sorted(EVERY)

token = st.one_of(st.integers(0, 3), st.integers(0, 200_000), st.integers(0, 2**64 - 1))
part = st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers(-99, 99))
extra = st.one_of(
    st.none(),
    st.lists(st.one_of(st.text(max_size=3), st.tuples(st.just("mm"), part, part)), min_size=1).map(tuple),
)


@given(st.sampled_from(NAMES), st.lists(token, max_size=40), st.integers(1, 9), st.data())
def test_a_prompt_at_once_or_block_by_block(name: str, tokens: list[int], size: int, data: st.DataObject) -> None:
    count = len(tokens) // size
    extras = data.draw(st.none() | st.lists(extra, min_size=count, max_size=count))
    whole = EVERY[name].hash_blocks(None, tokens, size, extras)
    parent: Key | None = None
    for block in range(count):
        one = None if extras is None else [extras[block]]
        (parent,) = EVERY[name].hash_blocks(parent, tokens[block * size : (block + 1) * size], size, one)
        assert parent == whole[block]
    assert len(whole) == count


@given(st.sampled_from(NAMES), st.lists(st.tuples(token, extra), min_size=1, max_size=6), st.data())
def test_equal_keys_mean_equal_prefixes(
    name: str, blocks: list[tuple[int, ExtraKeys | None]], data: st.DataObject
) -> None:
    other = list(blocks)
    other[data.draw(st.integers(0, len(blocks) - 1))] = (data.draw(token), data.draw(extra))
    keys, others = (EVERY[name].hash_blocks(None, [t for t, _ in b], 1, [e for _, e in b]) for b in (blocks, other))
    for at in range(len(blocks)):
        assert (keys[at] == others[at]) == (blocks[: at + 1] == other[: at + 1])


@given(st.sampled_from(NAMES), st.lists(token, min_size=4, max_size=8))
def test_no_extras_is_all_none(name: str, tokens: list[int]) -> None:
    hashed = EVERY[name].hash_blocks(None, tokens, 4)
    assert hashed == EVERY[name].hash_blocks(b"", tuple(tokens), 4, [None] * (len(tokens) // 4))
    assert hashed == EVERY[name].hash_blocks(EVERY[name].root, tokens, 4)


@given(st.lists(token, min_size=3, max_size=30), st.integers(1, 3), extra)
def test_cbor_keys_are_those_of_the_library(tokens: list[int], size: int, joined: ExtraKeys | None) -> None:
    parent = EVERY["sha256_cbor"].root
    count = len(tokens) // size
    for block, key in enumerate(EVERY["sha256_cbor"].hash_blocks(None, tokens, size, [joined] * count)):
        content = (parent, tuple(tokens[block * size : (block + 1) * size]), joined)
        parent = sha256(cbor2.dumps(content, canonical=True)).digest()
        assert key == parent


def test_the_table_of_tokens_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    before = EVERY["sha256_cbor"].hash_blocks(None, range(500), 10)
    monkeypatch.setattr(module, "_MAX_TABLE", 7)
    module._TOKENS.clear()  # other tests filled it
    assert EVERY["sha256_cbor"].hash_blocks(None, range(1000, 2000), 10)
    assert len(module._TOKENS) <= 7
    assert EVERY["sha256_cbor"].hash_blocks(None, range(500), 10) == before


def test_a_token_is_the_number_it_equals() -> None:
    module._TOKENS.clear()
    keys = EVERY["sha256_cbor"].hash_blocks(None, [True, False], 2)
    assert keys == EVERY["sha256_cbor"].hash_blocks(None, [1, 0], 2)


def test_xxh3_stays_as_it_is() -> None:
    """Keys may be kept in files and sent between versions: changing them is breaking."""
    ours = algorithm("xxh3", environ={})
    assert ours.root == 2546466611406593125
    assert ours.hash_blocks(None, range(8), 4) == [139277161080370035, 12268284193294579471]
    assert ours.hash_blocks(None, [1, 2**32, 3, 4], 4) == [7923758788579238908]
    assert ours.hash_blocks(None, [1, 2, 3, 4], 4, [(("lora", "a", "/a"),)]) == [11862755017070028979]


def test_xxh3_spreads() -> None:
    """Blocks that differ in one small number, behind blocks that do too: no key twice, and all bits in use."""
    ours = EVERY["xxh3"]
    for size in (1, 4, 16, 64):
        blocks = [[0] * at + [value] + [0] * (size - at - 1) for at in range(min(size, 8)) for value in range(1, 24)]
        parents = [ours.hash_blocks(None, block, size)[0] for block in blocks]
        keys = {ours.hash_blocks(parent, block, size)[0] for parent in parents for block in blocks}
        assert len(keys) == len(blocks) ** 2
        for bit in range(64):
            share = sum(key >> bit & 1 for key in keys if isinstance(key, int)) / len(keys)
            assert share == pytest.approx(0.5, abs=0.1 if size == 1 else 0.02)


@given(st.binary(min_size=8, max_size=32))
def test_wire_hash_of_a_digest(digest: bytes) -> None:
    assert wire_hash(digest) == int.from_bytes(digest, "big") % 2**64


@given(st.integers())
def test_wire_hash_of_an_integer(key: int) -> None:
    assert wire_hash(key) == key % 2**64


class TestSeed:
    @pytest.mark.parametrize("name", NAMES)
    def test_given_then_environment(self, name: str) -> None:
        environ = {"PYTHONHASHSEED": "1"}
        assert algorithm(name, "2", environ).root == algorithm(name, "2", {}).root
        assert algorithm(name, None, environ).root == algorithm(name, "1", {}).root
        assert algorithm(name, None, {"PYTHONHASHSEED": ""}).root == algorithm(name, "", {}).root
        assert algorithm(name, "1").root != algorithm(name, "2").root

    @pytest.mark.parametrize(
        ("name", "seed"), [("sha256", "vllm-none-hash"), ("sha256_cbor", "vllm-none-hash"), ("xxh3", "kvyard-root")]
    )
    def test_fixed(self, name: str, seed: str) -> None:
        assert algorithm(name, environ={}).seed == seed
        assert algorithm(name, environ={}).root == algorithm(name, seed).root

    @pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
    def test_a_random_seed_is_reported(self, name: str) -> None:
        one, other = algorithm(name, environ={}), algorithm(name, environ={})
        assert one.root != other.root
        assert algorithm(name, one.seed).root == one.root


class TestRefusals:
    def test_unknown_name(self) -> None:
        with pytest.raises(HashingError, match="unknown hash algorithm 'md5': choose one of sha256, sha256_cbor, xxh3"):
            algorithm("md5")
        assert issubclass(HashingError, KvyardError)
        assert issubclass(HashingError, ValueError)

    @pytest.mark.parametrize("name", NAMES)
    def test_block_size(self, name: str) -> None:
        with pytest.raises(HashingError, match="block size must be at least 1, got 0"):
            EVERY[name].hash_blocks(None, [1], 0)

    @pytest.mark.parametrize("name", NAMES)
    def test_number_of_extras(self, name: str) -> None:
        with pytest.raises(HashingError, match="1 extra keys for 2 blocks"):
            EVERY[name].hash_blocks(None, [1, 2, 3, 4], 2, [None])

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("parent", [b"short", -1, 2**64, "text"])
    def test_parent(self, name: str, parent: Key) -> None:
        with pytest.raises(HashingError, match=f"a parent for {name} is"):
            EVERY[name].hash_blocks(parent, [1, 2], 2)

    @pytest.mark.parametrize("bad", [-1, 2**64])
    def test_tokens_that_do_not_fit(self, bad: int) -> None:
        with pytest.raises(HashingError, match="token ids from 0"):
            EVERY["xxh3"].hash_blocks(None, [1, bad], 2)
        assert EVERY["xxh3"].hash_blocks(None, [1, 2, bad], 2)  # a tail that fills no block isn't looked at

    def test_zero_is_a_parent_like_any_other(self) -> None:
        assert EVERY["xxh3"].hash_blocks(0, [1], 1) != EVERY["xxh3"].hash_blocks(None, [1], 1)
