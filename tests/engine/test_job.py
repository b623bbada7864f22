"""A request as the engine runs it."""

from __future__ import annotations

import pytest

from kvyard.engine.job import Job
from kvyard.hashing import TokenChain, TraceChain, algorithm


def test_a_request_for_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Job("x", TraceChain((1,), 512, 10, 16, 1), 0)
    with pytest.raises(ValueError, match="empty"):
        Job("x", TraceChain((), 512, 0, 16, 1), 1)
    with pytest.raises(ValueError, match="sample"):
        Job("x", TokenChain([1, 2], 16, algorithm("xxh3")), 1)
