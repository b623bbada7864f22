"""The example of docs/how-to/redis-index.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.index.redis.server import RedisServer
from tests.index.redis.support import namespace

pytestmark = pytest.mark.redis

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "redis-index.md"


def test_the_example_runs(shared_server: RedisServer) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example = example.replace("redis://localhost:6379/0", shared_server.url).replace("llama-70b", namespace())
    assert shared_server.url in example
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    indexer = names["indexer"]
    assert indexer.writes("w1") and indexer.score([1] * 32).workers  # type: ignore[attr-defined]
    indexer.close()  # type: ignore[attr-defined]
