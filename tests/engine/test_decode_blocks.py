"""Blocks for many passes at once are those of one pass after the other: the same ids, in the same order, to the same jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.engine.driving import Log, drive
from tests.engine.test_core_plans import configs, workloads
from tests.engine.test_core_traces import conversation

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.decode_blocks import DecodeBlocks


def run(config, rows, looks, bulk):
    log = Log()
    core = make_core(config, watcher=log, plans=bulk, bulk=bulk)
    assert core.scheduler.blocks.ahead == (bulk and DecodeBlocks.can_take_ahead(core.scheduler.manager))
    drive(core, rows, looks)
    pool = core.scheduler.manager.pool
    return log.passes, log.jobs, list(pool.line()), sorted(pool.cached_blocks())


@given(configs(models=("full",)), workloads())
def test_same_blocks(config, work):
    rows, looks = work
    assert run(config, rows, looks, True) == run(config, rows, [], False)


@pytest.mark.parametrize("blocks", [900, 2500])
def test_on_real_traffic_under_pressure(blocks):
    config = EngineConfig(num_gpu_blocks=blocks, block_size=16 if blocks == 2500 else 64)
    rows = [row for row in conversation(60) if row.length < blocks * (config.block_size or 1) // 2]
    assert run(config, rows, [], True) == run(config, rows, [], False)


def test_only_for_one_group_of_full_attention():
    from tests.engine.test_core_plans import MODELS

    core = make_core(EngineConfig(groups=MODELS["window"]), bulk=True)
    assert not core.scheduler.blocks.ahead
