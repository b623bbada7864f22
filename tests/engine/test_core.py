"""The core: passes are decided, started and carried out; one watcher is told."""

from __future__ import annotations

import pytest
from tests.engine.driving import Log, Row, drive

from kvyard.clock import VirtualClock
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.timing import FixedTiming
from kvyard.engine.watcher import Watcher
from kvyard.errors import KvyardError
from kvyard.hashing import TraceChain

MS = 1_000_000
SMALL = EngineConfig(block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1))


def job(name: str, tokens: int, output: int) -> Job:
    return Job(name, TraceChain([hash(name)], 512, tokens, 16, 0), output)


def test_a_proposed_pass_is_decided_and_starts_when_it_is_adopted():
    core = make_core(SMALL)
    core.submit(job("a", 20, 5), 0)
    durations = core.propose(0)
    assert durations is not None and durations.tolist() == [10 * MS]
    assert not core.busy and core.propose(0).tolist() == [10 * MS], "it is decided once"
    core.adopt(durations * 2, 0)
    assert core.busy and core.next_decision() == 20 * MS


def test_deciding_further_ahead_is_refused():
    made = make_core(SMALL)
    with pytest.raises(KvyardError, match="a depth of 2, deciding on passes before they start, is not supported yet"):
        EngineCore(made.scheduler, made.timing, clock=VirtualClock(), depth=2)


def test_a_watcher_set_later_is_told_everything():
    core, log = make_core(SMALL, events=True), Log()
    assert type(core.watcher) is Watcher
    core.watcher = log
    drive(core, [Row(0, 40, 3, (1,))])
    assert [kind for kind, *_ in log.jobs] == ["admitted", "produced", "ended"]
    assert len(log.passes) == 3 and log.events


@pytest.mark.parametrize("bulk", [True, False])
def test_looking_at_a_prompt_pass_takes_no_blocks_for_jobs_that_sit_it_out(bulk):
    """SGLang's decoding jobs have no step in a pass of prompts: a look at what is held must not give them blocks early."""
    config = EngineConfig(
        backend="sglang", block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1)
    )
    core = make_core(config, bulk=bulk)
    core.submit(job("a", 32, 20), 0)  # its first token needs a third page
    core.begin(0)
    core.advance(10 * MS)
    core.submit(job("b", 32, 20), 10 * MS)
    core.begin(10 * MS)
    held = core.scheduler.manager.pool.free
    core.occupy()
    assert core.scheduler.manager.pool.free == held


def test_an_idle_engine_has_nothing_to_decide():
    core = make_core(SMALL)
    assert core.next_decision() is None and not core.begin(0) and not core.busy
    assert drive(core, []) == []
