"""Interface of a scheduling policy: the part of a scheduler that chooses the jobs of a pass. Everything else is common to
all."""

from typing import ClassVar

from mypy_extensions import mypyc_attr

from kvyard.engine.horizon import Horizon
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.passes import Pass


@mypyc_attr(allow_interpreted_subclasses=True)  # policies from outside the package derive from it
class PassMaker:
    """Makes passes of the jobs of a ``Lifecycle``, by taking them through it."""

    spare_tokens: ClassVar[int] = 0
    """Tokens that must be left of the pool's for a request alone in it, its prompt in whole pages, to be admitted."""

    def __init__(self, jobs: Lifecycle) -> None:
        self.jobs = jobs
        self.horizon = Horizon(
            jobs.manager,
            jobs.batch,
            jobs.blocks,
            jobs.waiting,
            jobs.running,
            stores=jobs.stores,
            handovers=jobs.handovers,
            may_load=jobs.may_load,
        )

    def form(self, now: int, longest: int) -> Pass | None:
        """Decide what the pass that starts at ``now`` computes, take its blocks, and say for how many passes, up to
        ``longest``, it stays so. ``None`` if nothing can be computed now.
        """
        raise NotImplementedError

    def computed(self, done: Pass) -> None:
        """Called when the pass ``done`` is over, before its jobs take their next steps."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if what this keeps contradicts the jobs."""
