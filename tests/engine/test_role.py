"""A worker's role is one setting, which router, scheduler and report see. What they do: test_handovers.py."""

from __future__ import annotations

import pytest
from tests.replay.support import sessions

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.router import Choice, Policy, Router, RouterConfig, RouteRequest
from kvyard.router.policies import POLICIES


def test_an_unknown_role_is_refused_with_the_choices():
    with pytest.raises(
        KvyardError, match=r"role is 'encode': did you mean decode\? Choose one of both, prefill, decode"
    ):
        make_config({"role": "encode"})


def test_the_scheduler_knows_its_role():
    assert make_core(EngineConfig(role="both")).scheduler.role == "both"


def test_the_router_sees_roles():
    router = Router(RouterConfig(policy="round-robin", block_size=16), ())
    router.add_worker("a", "prefill")
    router.add_worker("b")
    seen = router.route(RouteRequest("q", [], 40), 0, detail=True)
    assert {str(one.worker): one.role for one in seen.candidates} == {"a@0": "prefill", "b@0": "both"}


def test_a_role_reaches_router_scheduler_and_report(monkeypatch):
    """One field of two workers, through a whole run: each router sees those of its own role."""
    seen = []

    class Looking(Policy):
        needs_keys = False

        def choose(self, routing):
            seen.append([worker.role for worker in routing.workers])
            return Choice(routing.workers[0].slot, why="in turn")

    monkeypatch.setattr(POLICIES, "_loaded", dict(POLICIES._loaded))
    POLICIES.register("looking", Looking)
    workers = [{"count": 1, "role": "prefill"}, {"count": 1, "role": "decode"}]
    done = replay(sessions(3, seed=1), workers=workers, router="looking")
    assert seen and all(roles in (["prefill"], ["decode"]) for roles in seen)
    assert [core.scheduler.role for worker in done.fleet.workers for core in worker.cores] == ["prefill", "decode"]
    assert [worker.role for worker in done.report.workers] == ["prefill", "decode"]
    assert all(worker.requests for worker in done.report.workers)


def test_the_report_names_the_role_of_each_worker():
    done = replay(sessions(3, seed=1), workers=2, role="both")
    assert [worker.role for worker in done.report.workers] == ["both", "both"]
