"""One engine's side of hand-overs: who holds blocks while they are filled."""

from __future__ import annotations

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.handovers import HandoverPeer
from kvyard.engine.job import Job
from kvyard.hashing import TraceChain


class SlowPeer(HandoverPeer):
    """Blocks come when the test says so."""

    def needs_transfer(self, job: Job, missing: int, blocks: int) -> bool:
        return True

    def reserved(self, job: Job, now: int) -> None:
        self.job = job


def test_blocks_of_a_job_given_up_while_they_are_filled_stay_until_nothing_fills_them():
    peer = SlowPeer()
    core = make_core(EngineConfig(num_gpu_blocks=20, block_size=16), peer=peer)
    job = Job("a", TraceChain((1, 2, 3), 16, 48, 16, 1), 5)
    job.received = True
    core.submit(job, 0)
    core.begin(0)
    assert peer.job is job
    pool = core.scheduler.manager.pool
    core.cancel(job, 10)
    core.begin(10)
    assert pool.free == 20 - 3, "another job could get blocks that are still written to"
    assert core.handovers is not None
    core.handovers.landed(job)
    core.begin(20)
    assert pool.free == 20
    core.check_integrity()
