"""Previews of a router's decisions."""

from __future__ import annotations

from kvyard.index import Identity, Indexer
from kvyard.router import Router, RouterConfig, RouteRequest


def test_a_preview_changes_nothing() -> None:
    def fresh() -> Router:
        return Router(RouterConfig(), ["a", "b", "c"], Indexer(Identity(16)), seed=3)

    plain, looked = fresh(), fresh()
    for at in range(40):
        request = RouteRequest(at, [at % 5, 100 + at % 5], 40)
        seen = looked.preview(request, at)
        assert looked.preview(request, at) == seen
        decision = looked.route(request, at)
        assert decision == plain.route(request, at)
        assert (seen.worker, seen.cost, seen.why) == (decision.worker, decision.cost, decision.why)
        if at % 3 == 0:
            assert plain.finished(at, at) and looked.finished(at, at)
    looked.check_integrity()
