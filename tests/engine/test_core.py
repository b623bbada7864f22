"""The core: passes are decided, started and carried out; one watcher is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Log, Row, drive, replay

from kvyard.blocks.spec import ConfigError
from kvyard.clock import VirtualClock
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.policies.settings import TrtllmSettings
from kvyard.engine.ranks import Ranks
from kvyard.engine.timing import FixedTiming, ProfileTiming
from kvyard.engine.watcher import Watcher
from kvyard.errors import KvyardError
from kvyard.hashing import TraceChain
from kvyard.tiers.config import OffloadConfig, TierConfig

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
    with pytest.raises(KvyardError, match="a depth of 3 is not supported"):
        EngineCore(made.scheduler, made.timing, clock=VirtualClock(), depth=3)


def test_a_watcher_set_later_receives_everything():
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


# -- asynchronous scheduling -------------------------------------------------------------------------------------------

AHEAD = replace(SMALL, async_scheduling=True)


def test_an_arrival_waits_a_pass_longer_when_passes_are_decided_ahead():
    """r1 comes in r0's prompt pass, when the pass after it is decided already."""
    rows = [Row(0, 20, 5, (1,)), Row(5 * MS, 20, 1, (2,))]
    assert replay(SMALL, rows).of("admitted")[1][1] == 10 * MS
    log = replay(AHEAD, rows)
    assert log.of("admitted")[1][1] == 10 * MS, "decided when the pass before it starts"
    assert [start for start, _, chunks, _ in log.passes if ("r1", 20, 0) in chunks] == [11 * MS]


def test_an_arrival_in_a_last_pass_waits_for_its_end():
    """There was nothing to decide on when r0's only pass started: the queue isn't asked again before it ends."""
    log = replay(AHEAD, [Row(0, 20, 1, (1,)), Row(5 * MS, 20, 1, (2,))])
    assert log.of("admitted")[1][:2] == ("r1", 10 * MS)


def test_a_last_token_is_known_ahead():
    log = replay(AHEAD, [Row(0, 20, 5, (1,))])
    assert [(start // MS, end // MS) for start, end, *_ in log.passes] == [
        (0, 10),
        (10, 11),
        (11, 12),
        (12, 13),
        (13, 14),
    ]
    assert log.of("produced") == [("r0", 1, 10 * MS)]
    assert log.of("ended") == [("r0", 14 * MS, "FINISHED", 5, "")]


@pytest.mark.parametrize(("config", "starts"), [(SMALL, 11 * MS), (AHEAD, 12 * MS)])
def test_blocks_of_one_that_ends_are_free_when_its_last_pass_is_over(config, starts):
    """r2 needs r1's blocks, and the pass after r1's last one was decided on before they were free."""
    log = replay(config, [Row(0, 20, 9, (1,)), Row(0, 500, 2, (2,)), Row(0, 600, 1, (3, 4))])
    assert [start for start, _, chunks, _ in log.passes if ("r2", 600, 0) in chunks] == [starts]


def test_a_cancelled_request_has_the_tokens_of_its_last_pass():
    log = replay(AHEAD, [Row(0, 20, 9, (1,)), Row(0, 20, 9, (2,), cancel=12 * MS + 1)])
    assert log.of("ended")[0] == ("r1", 13 * MS, "CANCELLED", 3, "cancelled")
    decoding = [count for *_, count in log.passes]
    assert decoding == [0, 2, 2, 2, 2, 1, 1, 1, 1], "it was in the pass that was decided on already"


@pytest.mark.parametrize("cancel", range(0, 20 * MS, MS // 2))
def test_a_request_cancelled_at_any_time_leaves_nothing_behind(cancel):
    core = make_core(AHEAD)
    drive(core, [Row(0, 20, 9, (1,)), Row(0, 20, 4, (2,), cancel=cancel)])
    assert core.scheduler.manager.pool.free == 64


def test_async_scheduling_is_on_with_a_real_engines_timing():
    real = EngineConfig(timing=ProfileTiming(name="h200-llama3-8b"))
    assert real.decides_ahead
    assert not SMALL.decides_ahead
    assert not replace(real, async_scheduling=False).decides_ahead
    assert replace(real, backend="trtllm").decides_ahead and replace(real, backend="sglang").decides_ahead
    assert not replace(real, backend="trtllm", trtllm=TrtllmSettings(mocker=True)).decides_ahead
    assert not replace(real, speculative=SpeculativeConfig(num_speculative_tokens=1)).decides_ahead
    assert replace(real, role="prefill").decides_ahead and replace(real, role="decode").decides_ahead


def test_the_host_overlaps_with_roles_and_tiers_too():
    real = EngineConfig(timing=ProfileTiming(name="h200-llama3-8b"))
    tiers = OffloadConfig(tiers=(TierConfig(num_blocks=10),))
    for config in (
        replace(real, role="prefill", backend="trtllm"),
        replace(real, role="decode", backend="sglang"),
        replace(real, tiers=tiers),
    ):
        assert config.overlaps_host and not config.decides_ahead
        assert not replace(config, async_scheduling=False).overlaps_host
    assert real.overlaps_host and not SMALL.overlaps_host
    assert not replace(real, speculative=SpeculativeConfig(num_speculative_tokens=1)).overlaps_host


def test_async_scheduling_refuses_what_it_is_not_modelled_with():
    with pytest.raises(ConfigError, match="async_scheduling is not modelled with draft tokens"):
        make_core(replace(AHEAD, speculative=SpeculativeConfig(num_speculative_tokens=1)))
    with pytest.raises(ConfigError, match="async_scheduling is not modelled with lower tiers"):
        make_core(replace(AHEAD, tiers=OffloadConfig(tiers=(TierConfig(num_blocks=9),)), bytes_per_block=1))
    with pytest.raises(ConfigError, match=r"async_scheduling is not modelled with trtllm\.mocker and roles"):
        make_core(replace(AHEAD, backend="trtllm", trtllm=TrtllmSettings(mocker=True)))
    with pytest.raises(KvyardError, match="async_scheduling is on or off for all ranks"):
        Ranks([make_core(AHEAD), make_core(replace(AHEAD, async_scheduling=False))])


def test_copies_of_states_hold_no_blocks_after_their_pass():
    """A hit that ends inside a block is continued on a private copy, whose two ends are held only until it is made."""
    from tests.replay.support import sessions

    from kvyard.replay.run import replay

    groups = [{"kind": "full", "block_size": 16}, {"kind": "mamba", "block_size": 64}]
    done = replay(
        sessions(60, seed=3), workers=1, router="round-robin", groups=groups, bytes_per_block=65536, num_gpu_blocks=900
    )
    (core,) = done.fleet.workers[0].cores
    pool = core.scheduler.manager.pool
    assert done.report.reuse["all"].part > 0
    assert pool.free == pool.num_blocks - 1
