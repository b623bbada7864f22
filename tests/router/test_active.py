"""Workers in the order of a policy's rank."""

from __future__ import annotations

from tests.router.support import Fleet, chain

from kvyard.router import Router, RouterConfig, RouteRequest


def test_a_new_worker_is_ranked_with_the_next_decision() -> None:
    router = Router(RouterConfig(policy="least-loaded", block_size=16), ["a"], large=1)
    assert [router.route(RouteRequest(at, [], 16), 0).worker.name for at in range(2)] == ["a", "a"]
    router.add_worker("b")
    assert [router.route(RouteRequest(at, [], 16), 0).worker.name for at in range(2, 4)] == ["b", "b"]
    router.check_integrity()


def test_the_load_that_a_caller_reads_is_kept_up_to_date() -> None:
    fleet = Fleet(("a",))
    load = fleet.router.load(fleet.route("abc", id_=1).worker)
    assert (load.requests, load.prefill_tokens, load.blocks) == (1, 13, len(chain("abc")))
    fleet.router.prefill_done(1, 0)
    assert (load.requests, load.prefill_tokens) == (1, 0)
    fleet.router.finished(1, 0)
    assert (load.requests, load.blocks) == (0, 0)
