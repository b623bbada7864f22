"""Packed keys behave as the list of the same keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.hashing import Key
from kvyard.hashing.keys import packed_keys

numbers = st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5), max_size=4)
digests = st.lists(st.lists(st.binary(min_size=16, max_size=16), max_size=5), max_size=4)


@given(numbers | digests, st.data())
def test_as_a_list(chunks: list[list[Key]], data: st.DataObject) -> None:
    example: Key = 0 if all(isinstance(key, int) for chunk in chunks for key in chunk) else bytes(16)
    packed = packed_keys(example)
    plain: list[Key] = []
    for chunk in chunks:
        packed.extend(chunk)
        plain += chunk
        assert len(packed) == len(plain)
    start = data.draw(st.integers(0, len(plain)))
    stop = data.draw(st.integers(start, len(plain)))
    assert packed.between(start, stop) == plain[start:stop]
    part = packed.cut(start, stop)
    assert list(part) == plain[start:stop]
    packed.extend(plain[:1])
    assert list(part) == plain[start:stop]  # a copy
    at = data.draw(st.integers(-len(plain) - 3, len(plain) + 3))
    if -len(part) <= at < len(part):
        assert part[at] == plain[start:stop][at]
    else:
        with pytest.raises(IndexError):
            part[at]
