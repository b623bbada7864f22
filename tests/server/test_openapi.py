"""What a server says of its routes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")

from kvyard.server.http import Operation
from kvyard.server.openapi import document


class Asked(msgspec.Struct):
    a: int


class Problem(msgspec.Struct):
    error: str


async def handler(*given: Any) -> None:
    raise AssertionError("it is not asked")


def test_a_route_with_a_body_may_refuse_it() -> None:
    operations = [
        Operation(method="POST", path="/a", summary="A.", handler=handler, body=Asked),
        Operation(method="GET", path="/b", summary="B.", handler=handler, open=True),
    ]
    paths = document(operations, title="t", secured=True, problem=Problem)["paths"]
    # No JSON, too slow, too large, other fields; and without a token.
    assert set(paths["/a"]["post"]["responses"]) >= {"200", "400", "401", "408", "413", "422"}
    assert not {"401", "413", "414"} & set(paths["/b"]["get"]["responses"])
    assert "414" not in paths["/a"]["post"]["responses"]
