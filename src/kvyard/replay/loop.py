"""The loop of a replay: takes what comes next from the agenda and has the parts of the fleet carry it out."""

from collections.abc import Callable

from kvyard.replay.agenda import (
    ARRIVAL,
    HANDOVER,
    LANDING,
    NETWORK,
    PASS_END,
    PASS_START,
    REROUTING,
    SAMPLE,
    SCALING,
    WORKER_CHANGE,
    Agenda,
)
from kvyard.replay.intake import Intake
from kvyard.replay.passes import Passes
from kvyard.replay.placement import Placement
from kvyard.replay.scaling.autoscaler import Autoscaler
from kvyard.replay.shared import SharedTiers
from kvyard.replay.worker import SampleSeries
from kvyard.replay.worker_lifecycle import WorkerLifecycle
from kvyard.tiers.fabric import Fabric


class Loop:
    """Loop of one run."""

    def __init__(
        self,
        agenda: Agenda,
        intake: Intake,
        placement: Placement,
        passes: Passes,
        lifecycle: WorkerLifecycle,
        *,
        autoscaler: Autoscaler | None,
        shared: SharedTiers,
        fabric: Fabric | None,
        timeline: SampleSeries,
        now: int = 0,
    ) -> None:
        self.now = now
        self._agenda = agenda
        self._intake = intake
        self._placement = placement
        self._passes = passes
        self._lifecycle = lifecycle
        self._autoscaler = autoscaler
        self._shared = shared
        self._fabric = fabric
        self._timeline = timeline

    def run(self, progress: Callable[[int, int, int], None] | None) -> None:
        """Go on until nothing is left to do. For ``progress`` see ``Fleet.run``."""
        agenda, passes, shared = self._agenda, self._passes, self._shared
        rounds = 0
        while True:
            if passes.touched and not agenda.has_before(self.now, PASS_START):
                # What the agenda would say next, without a way through its heap for each pass.
                self._start_passes(self.now)
                if progress is not None:
                    rounds += 1
                    if not rounds & 1023:
                        self._report(progress)
                continue
            entry = agenda.pop()
            if entry is None:
                break
            now, what, which = entry
            if what == SAMPLE:
                if self._is_over():
                    break
                if agenda.holds_beyond(SAMPLE):
                    agenda.put(passes.sample(now, self._timeline), SAMPLE)
                elif self._intake.fail_unplaced(self.now):
                    agenda.put(now, SAMPLE)  # others may have waited for those
                continue
            if what in (WORKER_CHANGE, SCALING) and self._is_over():
                break
            self.now = now
            if shared.active:
                if what >= LANDING:
                    shared.land(now)  # each later step sees what has landed by now
                if what < PASS_START:
                    agenda.put(now, PASS_START)  # all workers plan by what is certain now
            if what == PASS_END:
                passes.end(which, now)
            elif what == PASS_START:
                self._start_passes(now)
            else:
                self._carry_out(what, which, now)
        if progress is not None:
            self._report(progress)
        self._intake.check_through()

    def _carry_out(self, what: int, which: int, now: int) -> None:
        if what == ARRIVAL:
            if not self._intake.records:
                self._begin(now)
            self._intake.arrive(now)
        elif what == HANDOVER:
            if self._fabric is not None:
                self._fabric.land(now)
            self._placement.hand_over(now)
            self._await_network()
        elif what == SCALING and self._autoscaler is not None:
            self._agenda.put(self._autoscaler.tick(now), SCALING)
        elif what == WORKER_CHANGE:
            self._lifecycle.carry_out(which, now)
        elif what == REROUTING:
            self._intake.place_unplaced(now)
            self._intake.grant(now)
            self._placement.resume(now)

    def _begin(self, now: int) -> None:
        """Start samples and the autoscaler's periods at the first request."""
        self._agenda.put(now, SAMPLE)
        if self._autoscaler is not None:
            self._agenda.put(self._autoscaler.begin(now), SCALING)

    def _start_passes(self, now: int) -> None:
        self._passes.start(now)
        self._placement.passes_started(now)
        self._await_network()

    def _await_network(self) -> None:
        if self._fabric is not None:
            self._agenda.put(self._fabric.due(), HANDOVER, NETWORK)

    def _is_over(self) -> bool:
        """True if nothing is left to do but to sample, and to start, drain and fail workers for nothing."""
        return (
            not self._passes.touched
            and not self._agenda.holds_beyond(SAMPLE, WORKER_CHANGE, SCALING)
            and self._intake.exhausted
        )

    def _report(self, progress: Callable[[int, int, int], None]) -> None:
        records = self._intake.records
        progress(len(records), max(0, len(records) - len(records.open)), self.now)
