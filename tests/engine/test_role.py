"""A worker's role is one setting, which router, scheduler and report see. What roles do is not modelled yet."""

from __future__ import annotations

import pytest
from tests.replay.support import sessions

from kvyard.blocks.spec import ConfigError
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.router import Router, RouterConfig, RouteRequest


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_other_roles_are_refused_for_now(role):
    with pytest.raises(ConfigError, match=f"^role {role} is not supported yet"):
        EngineConfig(role=role).check()
    with pytest.raises(KvyardError, match=f"^role {role} is not supported yet"):
        make_config({"workers": [{"count": 1}, {"count": 1, "role": role}]})


def test_an_unknown_role_is_refused_with_the_choices():
    with pytest.raises(KvyardError, match="role is 'encode': choose one of both, prefill, decode"):
        make_config({"role": "encode"})


def test_the_scheduler_knows_its_role():
    assert make_core(EngineConfig(role="both")).scheduler.role == "both"


def test_the_router_sees_roles():
    router = Router(RouterConfig(policy="round-robin", block_size=16), ())
    router.add_worker("a", "prefill")
    router.add_worker("b")
    seen = router.route(RouteRequest("q", [], 40), 0, detail=True)
    assert {str(one.worker): one.role for one in seen.candidates} == {"a@0": "prefill", "b@0": "both"}


def test_the_report_names_the_role_of_each_worker():
    done = replay(sessions(3, seed=1), workers=2, role="both")
    assert [worker.role for worker in done.report.workers] == ["both", "both"]
