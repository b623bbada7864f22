"""A server's slots and owners, as of the last look. Needs no server."""

from __future__ import annotations

import pytest

pytest.importorskip("redis", reason="needs kvyard[redis]")

from kvyard.index.redis.directory import Directory

REPLY = [b"1", [b"3", b"4:solo7"], [[b"solo", b"t", b"r", 500, []]]]


def test_looks_go_up_whenever_an_answer_may_be_another() -> None:
    directory = Directory(None)
    directory.take(REPLY, 0)
    first = directory.looks
    directory.take(REPLY, 1)
    assert directory.looks == first == 1, "the same again"
    directory.forget()
    assert directory.looks == 2 and not directory.owners and directory.next_end() == 0
    directory.take(REPLY, 2)
    assert directory.looks == 3 and directory.slots == {3: ("solo", b"7")}
