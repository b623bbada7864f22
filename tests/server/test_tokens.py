"""Token ids as people write them."""

from __future__ import annotations

import pytest

from kvyard.errors import KvyardError
from kvyard.server.tokens import parse_tokens


@pytest.mark.parametrize("text", ["1,2, 3", "1 2\n3", "[1, 2, 3]", " [1,2,3] "])
def test_token_ids_in_any_shape(text: str) -> None:
    assert parse_tokens(text, "x") == [1, 2, 3]


@pytest.mark.parametrize("text", ["1.5", "a", "[1, -2]", "[true]", "[4294967296]", "[1", "[[1]]", '["1"]'])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(KvyardError, match=r"^x has "):
        parse_tokens(text, "x")
