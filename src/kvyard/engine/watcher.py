"""Reports of an engine to its watcher: the one way for results to leave the core.

A watcher receives an event with its instant in the middle of a change; it must neither raise nor call back. Decode passes
are reported in groups: many passes of one unchanged batch at once, since that is how they are computed.
"""

from collections.abc import Sequence

from kvyard.engine.job import Job
from kvyard.engine.passes import Pass
from kvyard.engine.timing.model import Durations
from kvyard.events.types import EventBatch


class Watcher:
    """Ignores everything; override what you want to know."""

    wants_tokens = False
    """True if ``decoded`` should name the jobs of each group of passes. That costs, so it must be asked for."""
    waits_for_first_tokens = True
    """True if a first token is acted on at the instant at which it comes. Otherwise, where another worker computed the
    prompt, it may be reported later, with its time, which makes for fewer and longer plans.
    """

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        """``job`` begins to run in the pass that starts at ``now``, with ``cached`` tokens found on the device and
        ``external`` ones loaded before. Also called on every return after a preemption.
        """

    def decided(self, batch: Pass, now: int) -> None:
        """``batch`` was decided at ``now``, and its jobs have their blocks. Called once for a plan."""

    def passed(self, start: int, end: int, chunks: Sequence[tuple[Job, int, int]], decoding: int) -> None:
        """A pass from ``start`` to ``end`` computed prompt ``chunks`` (job, new, past) and one step of ``decoding`` jobs."""

    def paused(self, start: int, end: int, decoding: int) -> None:
        """``decoding`` jobs that decode had no step in a pass from ``start`` to ``end``, which had prompts only. Told before
        ``passed``, by engines that keep prompts apart.
        """

    def decoded(self, start: int, durations: Durations, decoding: int, jobs: Sequence[Job]) -> None:
        """Passes from ``start`` on, one after the other, each one step of the same ``decoding`` jobs."""

    def produced(self, job: Job, count: int, end: int) -> None:
        """``job`` produced ``count`` tokens in a pass that ended at ``end``, its first ones or a burst of accepted drafts.
        Plain decode steps are reported by ``passed`` and ``decoded``.
        """

    def preempted(self, job: Job, now: int) -> None:
        """``job`` lost its blocks and waits again."""

    def loading(self, job: Job, now: int, tokens: int) -> None:
        """``job`` waits for ``tokens`` tokens of its prompt to come from a lower tier."""

    def ended(self, job: Job, now: int, reason: str) -> None:
        """``job`` ended: ``job.state`` says how, ``reason`` why in words if it isn't simply finished."""

    def announced(self, batch: EventBatch, now: int) -> None:
        """KV events of a pass that ended at ``now``."""


NO_WATCHER = Watcher()
