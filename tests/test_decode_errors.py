"""What decoding raises is caught as a whole, everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvyard.decode_errors import DECODE_ERRORS

SOURCE = Path(__file__).parents[1] / "src" / "kvyard"
PARTIAL = re.compile(r"^.*except.*msgspec\.(?:MsgspecError|DecodeError).*$", re.MULTILINE)


@pytest.mark.parametrize("data", [b'"\xff"', b"[" * 100_000, b"{", b'{"a": 1'])
def test_all_that_bad_bytes_raise(data: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        msgspec.json.decode(data)
    with pytest.raises(DECODE_ERRORS):
        msgspec.json.decode(data, type=dict[str, list[str]])


def test_no_reader_catches_a_part_of_them() -> None:
    """A journal, a recording, a fleet's file, records on Redis and a replay's head once let the others through."""
    found = {str(path.relative_to(SOURCE)): PARTIAL.findall(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines}, (
        "catch kvyard.decode_errors.DECODE_ERRORS instead"
    )
