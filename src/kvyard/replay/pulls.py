"""Pulls of a simulated fleet: the workers that may pull from each other, and the effect on the plans of both.

A worker's plan is made without knowing that others will read its pages. So the plan is brought up to date before a pull, and
cut after the pass in flight: in single steps the worker would have noticed the pull with the next pass.
"""

from collections.abc import Callable

from kvyard.engine.job import Job
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.index import Holder
from kvyard.index.runs import RunIndexer
from kvyard.replay.config import PullConfig
from kvyard.replay.worker import Worker
from kvyard.router.active import Booking
from kvyard.router.sources import PeerSources
from kvyard.router.worker import WorkerLoad
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.pulls import Pulls, PullSource


class FleetPulls:
    """The pulls of one fleet."""

    def __init__(self, config: PullConfig, fabric: Fabric, indexer: RunIndexer, token_bytes: int) -> None:
        """A token takes about ``token_bytes``."""
        device = config.source == "device"
        self._workers: dict[int, Worker] = {}
        """By number."""
        self._device = device
        self._token_bytes = token_bytes
        self._alive: dict[Holder, None] = {}
        self._known = False
        """True if ``sources`` knows of these."""
        self.sources = PeerSources(indexer, Tier.G1 if device else LOWER_TIERS[0], config.min_lead, config.tolerance)
        self.pulls = Pulls(
            fabric,
            device=device,
            min_lead=config.min_lead,
            in_flight=config.in_flight,
            settle=self._settle,
            changed=self._changed,
        )

    def join(self, worker: Worker) -> None:
        """Let ``worker`` pull, and let others pull from it."""
        self._workers[worker.number] = worker
        for core in worker.cores:
            assert core.offload is not None
            core.offload.join(self.pulls, worker.number)
        self.back(worker)

    def leave(self, worker: Worker, now: int) -> None:
        """Remove ``worker``, and everything that others pull from it."""
        for holder in worker.holders:
            self._alive.pop(holder, None)
        self._known = False
        self.pulls.fail(worker.number, now)

    def back(self, worker: Worker) -> None:
        """Add ``worker``, for the first time or again."""
        for holder in worker.holders:
            self._alive[holder] = None
            self.pulls.back(str(holder))
        self._known = False

    def pull_ms(self, tokens: int) -> float | None:
        """Return milliseconds that ``tokens`` take on an idle network; ``None`` for too few to be pulled."""
        if tokens < self.pulls.min_lead:
            return None
        return self.pulls.fabric.alone_ms(tokens * self._token_bytes)

    def expect(self, job: Job, booking: Booking, load_of: Callable[[Holder], WorkerLoad]) -> None:
        """Choose the worker from which ``job`` may pull, now that it is booked."""
        if not self._known:
            self._known = True
            self.sources.changed(list(self._alive))
        source = self.sources.choose(
            job.chain.keys,  # type: ignore[arg-type]  # trace keys are integers
            job.num_prompt_tokens,
            booking.worker.name,
            booking.overlap,
            load_of,
        )
        self.pulls.expect(job.id, None if source is None else PullSource(str(source.holder), source.tokens))

    def _settle(self, number: int, now: int) -> None:
        worker = self._workers[number]
        if worker.alive:
            worker.engine.advance(now)
            if self._device:
                for core in worker.cores:
                    core.occupy()

    def _changed(self, number: int, now: int, by: int) -> None:
        worker = self._workers[number]
        if not worker.alive:
            return
        # Workers start their passes in the order of their numbers, so those before the one that pulls have.
        worker.engine.cut(now + 1 if number < by else now)
        worker.touch()
