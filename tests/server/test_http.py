"""Bodies of a type, and tokens: what is refused, and with which words."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from kvyard.server.http import Refusal, check_token, decode


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    numbers: list[int] = []
    side: Literal["left", "right"] = "left"
    only: Literal["one"] = "one"


def test_a_body_of_its_type() -> None:
    assert decode(Body, b'{"name": "x", "numbers": [1]}') == Body("x", [1])


@pytest.mark.parametrize(
    ("body", "status", "field", "fix"),
    [
        (b"{}", 422, "name", "add name"),
        (b'{"name": "x", "number": []}', 422, "number", "did you mean numbers?"),
        (b'{"name": "x", "zzz": []}', 422, "zzz", "leave it out; there are name, numbers, side, only"),
        (b'{"name": "x", "numbers": [1, "2"]}', 422, "numbers[1]", "send int"),
        (b'{"name": "x", "side": "up"}', 422, "side", "choose left or right"),
        (b'{"name": "x", "only": "two"}', 422, "only", "send one"),
        (b"{name}", 400, "", "send a JSON object in UTF-8"),
    ],
)
def test_the_field_and_the_fix(body: bytes, status: int, field: str, fix: str) -> None:
    with pytest.raises(Refusal) as refused:
        decode(Body, body)
    assert refused.value.status == status
    assert (refused.value.problem.field, refused.value.problem.fix) == (field, fix)


def test_tokens() -> None:
    check_token("Bearer abc", "abc")
    check_token("bearer  abc ", "abc")
    for header in ("", "Bearer", "Bearer abcd", "Basic abc", "Bearer äbc"):
        with pytest.raises(Refusal):
            check_token(header, "abc")
