"""Stores: blocks of running jobs that go to lower tiers, and what a pass must know of them.

Computed blocks are offered to the offload engine (``kvyard.tiers``). Where blocks must be copied before they are taken
(``on_eviction``), a job may have to wait for a copy; where workers share a tier, what it offers may change under a plan.
"""

from collections.abc import Iterable

from kvyard.blocks import Hit
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.job import Job
from kvyard.engine.loads import Loads
from kvyard.tiers.policy import AHEAD


class Stores:
    """Blocks that one engine stores below its device."""

    def __init__(self, loads: Loads, batch: DecodeBatch) -> None:
        self.stalled: dict[int, Job] = {}
        """Decoding jobs that sit out until the block they need has been copied, by serial."""
        offload = loads.offload
        self.cleans = offload.config.policy in AHEAD
        """True if blocks must be copied before they are taken."""
        self.stores_output = offload.config.policy == "write_through_generated"
        """True if complete blocks of decoding jobs may be stored."""
        self.waits = offload.config.wait_for_save
        """True if a pass ends only when its stores have left the device."""
        self._offload = offload
        self._loads = loads
        self._batch = batch
        self._landings = 0
        self._disturbances = 0
        """Changes of shared tiers when the latest pass was formed."""
        self._line: tuple[int, ...] = ()

    def store(self, job: Job, end: int) -> None:
        """``job`` has computed more tokens by ``end``, which may be stored."""
        self._offload.offload(job, end)

    @property
    def saving(self) -> bool:
        """Return true if a store from the device is in flight."""
        return self._offload.saving

    def save_deadline(self, now: int) -> int | None:
        """Return when to look again whether stores have left the device; ``None`` if they have."""
        return self._offload.save_deadline(now)

    def store_output(self, decoding: Iterable[Job], end: int) -> None:
        """Complete blocks that ``decoding`` jobs generated may be stored too."""
        offload, tick = self._offload, self._batch.tick
        for job in decoding:
            job.catch_up(tick)
            if job.num_computed_tokens >= offload.quiet_until(job):
                offload.offload(job, end)

    def quiet_passes(self, decoding: Iterable[Job]) -> int:
        """Return passes until one of the ``decoding`` jobs may have something to store; at least one."""
        offload, tick = self._offload, self._batch.tick
        left = min(offload.quiet_until(job) - (job.base + tick - job.joined) for job in decoding)
        return max(1, min(left, 1 << 30))

    # -- blocks that must be copied before they are taken -----------------------------------------------------------

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        """True if the blocks that ``job`` would get for ``tokens`` more tokens, after ``hit``, are still being copied out."""
        blocks = self._offload.layout.demand(job, hit, tokens)
        return blocks > 0 and self._offload.make_clean(blocks, now, hit) is not None

    def stall(self, job: Job) -> None:
        """Take ``job`` out of the decode batch until a copy has landed."""
        self._batch.leave(job)
        self.stalled[job.serial] = job

    def before_landing(self) -> None:
        """Transfers are about to land: let ``cleaning`` count from here."""
        self._line = self._offload.line

    def resume(self) -> None:
        """Let jobs that waited for a copy decode again, if one has landed."""
        landings = self._offload.state.landings
        if landings != self._landings:
            self._landings = landings
            for job in self.stalled.values():
                self._batch.join(job)
            self.stalled.clear()

    @property
    def cleaning(self) -> bool:
        """Return true if blocks were sent to be copied or were taken since ``before_landing``: the next pass may find more."""
        return self._offload.line != self._line

    # -- shared tiers -----------------------------------------------------------------------------------------------

    def pass_formed(self) -> None:
        """Note that a pass was formed with the current state of shared tiers."""
        self._disturbances = self._offload.disturbances

    def disturbed(self, waiting: bool) -> bool:
        """True if what there is to load has changed since, and a job here may be about to ask for it: one that is ``waiting``,
        or one that waits for another's transfer.
        """
        if self._offload.disturbances == self._disturbances:
            return False
        return self.cleans or bool(self._loads.deferred) or waiting
