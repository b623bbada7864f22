"""Places and pools."""

from __future__ import annotations

import pytest
from tests.index.support import Bench, hashes_of, stored

from kvyard.events.types import Removed, Tier
from kvyard.index import Holder, Source
from kvyard.index.bits import bits, mask_of

TEXT = list(range(1000, 1128))


def test_d10_shared_storage_is_a_pool_and_no_phantom_worker() -> None:
    """The connector's own shape: wrapped events, two elements, no tokens, parent 0; credited to each member."""
    bench = Bench(workers=("a", "b", "c"))
    bench.indexer.register(Source(stream="store", pool="fs"))
    bench.indexer.share("fs", [Holder("a"), Holder("b")])
    names = hashes_of(TEXT[:16], 4)
    for stream in ("a", "b", "c"):
        bench.say(stored(TEXT[:16], 4, 0, 1), stream=stream)
    bench.say(stored(TEXT[:16], 4, tier=Tier.G3), stream="store")
    assert [bench.blocks(TEXT, worker) for worker in "abc"] == [4, 4, 1]
    assert set(bench.indexer.score(TEXT).workers) >= {Holder("a"), Holder("b"), Holder("c")}
    assert all(not holder.shared for holder in bench.indexer.matches(bench.indexer.identity.keys(TEXT)))
    bench.say(Removed(hashes=names[1:], tier=Tier.G3), stream="store")
    assert [bench.blocks(TEXT, worker) for worker in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("mask", [0, 1, 255, 256, 257, 1 << 255, (1 << 256) + 5, (1 << 300) - 1])
def test_the_bits_of_a_mask(mask: int) -> None:
    assert list(bits(mask)) == [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    assert mask_of(bits(mask)) == mask
