"""Flow control live and offline: the same trace, the same order of admissions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from kvyard.clock import MS
from kvyard.lab.rehearsal.live_fleet import flow_in_real_time
from kvyard.lab.rehearsal.run import rehearse
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest
from kvyard.router.flow import FlowConfig
from kvyard.router.journal import Routed

pytestmark = pytest.mark.zmq

SETTINGS: dict[str, Any] = {
    "workers": 1,
    "router": "round-robin",
    "block_size": 16,
    "num_gpu_blocks": 2000,
    "timing": "fixed:400,20",
    "engine_requests": 1,
}


ORDERS = {"fifo": "vstu", "las": "vuts", "shortest": "svut", "progress": "stuv"}


def burst() -> list[TraceRequest]:
    """Three sessions have had unequal service. While one request runs for 2 s, four come, 300 ms apart, of these and a new one.
    None of them follows one that ended just before: a busy machine may be late by hundreds of milliseconds.
    """
    rows = [("s0", 0, 900, 5), ("t0", 1000, 300, 5), ("u0", 2000, 60, 5), ("long", 3000, 50, 90)]
    rows += [("v1", 3300, 200, 5), ("s1", 3600, 1000, 5), ("t1", 3900, 800, 5), ("u1", 4200, 400, 5)]
    return [TraceRequest(name, at * MS, tokens, output, session=name[0]) for name, at, tokens, output in rows]


@pytest.mark.parametrize("flow", ORDERS)
def test_live_and_offline_admit_in_the_same_order(flow: str) -> None:
    config = make_config({**SETTINGS, "flow": flow})
    offline = replay(burst(), config=config)
    order = [record.id for record in sorted(offline.records, key=lambda record: record.arrival + record.waited)]
    assert order == ["s0", "t0", "u0", "long", *(f"{name}1" for name in ORDERS[flow])]
    done = rehearse(burst(), config, speed=2.0, proven=True)
    assert done.recording is not None
    assert [entry.id for entry in done.recording.entries if isinstance(entry, Routed)] == order


def test_times_of_flow_control_are_real_time() -> None:
    made = flow_in_real_time(FlowConfig(policy="las", options={"half_life_s": 30}, patience_s=8), 4.0)
    assert made.options == {"half_life_s": 7.5} and made.patience_s == 2
    assert flow_in_real_time(FlowConfig(policy="las"), 2.0).options == {"half_life_s": 30}
    assert flow_in_real_time(FlowConfig(policy="shortest"), 2.0) == FlowConfig(policy="shortest")
