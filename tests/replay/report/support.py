"""Small runs for the tests of reports, each made once."""

from __future__ import annotations

from functools import cache

from tests.replay.traces.support import CONVERSATION

from kvyard.engine.config import EngineConfig
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import Report, Slo, make_report
from kvyard.replay.report.bounds import make_bounds
from kvyard.replay.traces import Trace, open_trace
from kvyard.router import RouterConfig
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links import parse_link_config

SLO = Slo(ttft=400.0, itl=20.0)


def trace(limit: int) -> Trace:
    return open_trace(CONVERSATION, limit=limit)


def config(
    policy: str = "kv",
    *,
    workers: int = 4,
    blocks: int = 3000,
    host: int = 0,
    storage: int = 0,
    seed: int = 0,
    dp: int = 1,
) -> ReplayConfig:
    tiers = None
    if host:
        link = parse_link_config("h200")
        sizes = [host, storage] if storage else [host]
        tiers = OffloadConfig(tiers=tuple(TierConfig(num_blocks=size, link=link) for size in sizes))
    engine = EngineConfig(block_size=64, num_gpu_blocks=blocks, bytes_per_block=64 << 17, tiers=tiers)
    kind = WorkerConfig(count=workers, engine=engine, dp_size=dp)
    return ReplayConfig(workers=(kind,), router=RouterConfig(policy=policy), seed=seed)  # fmt: skip


@cache
def ran(policy: str = "kv", *, limit: int = 300, **settings: int) -> Fleet:
    """A fleet that has run the beginning of the conversation trace."""
    fleet = Fleet(config(policy, **settings))
    fleet.run(trace(limit))
    return fleet


@cache
def reported(policy: str = "kv", *, limit: int = 300, label: str = "", **settings: int) -> Report:
    """And its report, with everything that can be asked for."""
    fleet = ran(policy, limit=limit, **settings)
    source = trace(limit)
    return make_report(
        fleet,
        label=label or policy,
        trace={"name": "conversation", "format": source.format},
        bounds=make_bounds(fleet, source),
        slo=SLO,
    )
