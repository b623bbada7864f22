"""Bytes as people write them."""

from __future__ import annotations

import pytest

from kvyard.errors import KvyardError
from kvyard.units import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1TB", 10**11),
        ("512", 512),
        ("7B", 7),
        ("3 MiB", 3 * 2**20),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80gib", "-1GiB", "80 GiB each", "1e9", "80G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(KvyardError, match="write it like 80GiB or 24GB"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [show_bytes(count) for count in (0, 1023, 1536, 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 MiB",
        "5120.00 GiB",
    ]
