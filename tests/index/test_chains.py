"""The index of chains against the one of keys: same rows for every prompt, whatever was stored, removed or cleared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.hashing import TraceChain
from kvyard.index import MemoryIndex
from kvyard.index.chains import ChainIndex

PLACES = 4
CHAINS = 7
LENGTH = 12


@st.composite
def forests(draw):
    """Chains that share prefixes of every length: ids are cumulative, so a fork is a new name from there on."""
    chains = []
    for number in range(CHAINS):
        ids = []
        if chains and draw(st.booleans()):
            other = draw(st.sampled_from(chains))
            ids = list(other[: draw(st.integers(1, LENGTH))])
        ids += [100 * (number + 1) + at for at in range(len(ids), LENGTH)]
        chains.append(ids)
    # A block is half an id: stretches may part inside what one id names, never inside a block.
    return [TraceChain(ids, 8, 8 * LENGTH, 4, own) for own, ids in enumerate(chains)]


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "remove", "clear"]),
        st.integers(0, PLACES - 1),
        st.integers(0, CHAINS - 1),
        st.integers(0, 2 * LENGTH),
        st.integers(0, 2 * LENGTH),
    ),
    max_size=40,
)


@given(forests(), operations)
@settings(max_examples=60)
def test_same_answers(chains, steps):
    ours, other = ChainIndex(), MemoryIndex()
    for deed, place, which, one, two in steps:
        chain = chains[which]
        start, stop = min(one, two), max(one, two)
        if deed == "store":
            held = ours.store_run(place, chain, start, stop)
            repeated = [key for low, high in held for key in chain.hashes(low, high)]
            assert repeated == list(
                other.store(place, chain.hashes(start, stop), chain.keys[start - 1] if start else None)
            )
        elif deed == "remove":
            ours.remove_run(place, chain, start, stop)
            if start < stop:
                other.remove(place, chain.hashes(start, stop))
        elif one % 5 == 0:
            ours.clear(place)
            other.clear(place)
        ours.check_integrity()
        for chain in chains:
            keys = chain.hashes(0, 2 * LENGTH)
            assert ours.lookup(keys) == other.lookup(keys)
            assert ours.lookup(chain.keys) == other.lookup(keys), "a chain's own keys are as good as a list"
            assert ours.lookup(keys, True) == other.lookup(keys, True)
    assert ours.usage().blocks == other.usage().blocks


def test_nothing_is_left_of_what_everybody_let_go():
    index = ChainIndex()
    chain = TraceChain(list(range(20)), 8, 160, 4, 0)
    fork = TraceChain([*range(10), *range(100, 110)], 8, 160, 4, 1)
    index.store_run(0, chain, 0, 40)
    index.store_run(1, fork, 0, 40)
    index.store_run(2, chain, 10, 30)
    for place, run in ((0, chain), (1, fork), (2, chain)):
        index.remove_run(place, run, 0, 40)
        index.check_integrity()
    assert index.usage().blocks == 0 and not index._nodes
