"""Where loads come from, as the scheduler sees it: what it asks before a prompt is computed, and what it tells.

``Loads`` has them from lower tiers, ``HandoverLoads`` from other workers. A log of vLLM's scheduler has them from a script
(``ScriptedLoads``).
"""

from collections.abc import Iterable
from typing import Final

from mypy_extensions import mypyc_attr

from kvyard.blocks import Hit
from kvyard.engine.job import Job
from kvyard.engine.queue import Queue

NO_HELP: Final = -1
"""There is nothing that a job could use."""
NO_ROOM: Final = -2
"""There is, and the device has no room for it yet."""
AT_ONCE: Final = -3
"""There is, and it counts as computed from now on: ``Job.loaded`` says how many tokens."""


@mypyc_attr(allow_interpreted_subclasses=True)  # scripts aren't compiled
class LoadSource:
    """Of one engine. What isn't overridden is that of a source whose loads are in no other's way."""

    def __init__(self) -> None:
        self.parked: dict[str, Job] = {}
        """Jobs in no queue, because their blocks are on the way."""
        self.stalled: dict[int, Job] = {}
        """Decoding jobs that sit out until the block they need has been copied, by serial."""
        self.leaving: dict[str, Job] = {}
        """Jobs that have ended, whose blocks are still in use."""
        self.cleans = False
        """Whether blocks must be copied before they are taken."""
        self.weighs = False
        """Whether it weighs loading against computing, and wants to know the ``backlog`` before it is asked."""
        self.backlog = 0
        """Prompt tokens that running jobs have still to compute."""
        self.stores_output = False
        """Whether complete blocks of decoding jobs may be stored."""

    def queue(self, waiting: Queue) -> Queue:
        """The queue of the engine, made of the one that its policy asks for."""
        return waiting

    # -- prompts ----------------------------------------------------------------------------------------------------

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool) -> int:
        """See whether there is more of a prompt than ``hit``. If so, ``job`` is parked until it is here, and the answer is how
        many tokens it waits for. Otherwise ``NO_HELP``, ``AT_ONCE``, or ``NO_ROOM``: then it must wait where it is.
        """
        raise NotImplementedError

    def land(self, now: int) -> list[Job]:
        """Transfers that ended by ``now`` take effect. Returns the jobs that wait in the queue again, each to be put before the
        one returned before it.
        """
        raise NotImplementedError

    def earliest_deadline(self) -> int | None:
        """When the next transfer ends, if nothing else begins."""
        raise NotImplementedError

    def admitted(self, job: Job) -> None:
        """``job`` begins to run, with what was loaded for it."""

    def receive(self, job: Job) -> None:
        """A ``job`` that was loaded for is next in the queue."""

    def entered(self, job: Job, now: int) -> None:
        """A ``job`` whose prompt another worker computed decodes in the pass that starts at ``now``."""

    def parked_in_line(self) -> int:
        """How many of the parked count among those that wait, where a long prompt is cut for others' sake."""
        return 0

    # -- the ways out -----------------------------------------------------------------------------------------------

    def can_give_back(self) -> bool:
        """Whether waiting jobs that hold loaded blocks may have to give them back, since no transfer will ever change
        anything.
        """
        return False

    def give_back(self, job: Job, now: int, bar: bool) -> None:
        """A waiting ``job`` gives back what was loaded for it; ``bar``: it must compute it from now on."""

    def forget(self, job: Job, now: int) -> None:
        """``job`` has ended or is preempted; before its blocks are freed."""

    def claim(self, job: Job, now: int) -> None:
        """``job`` has ended at ``now``, and its blocks are about to be freed: it may have said what becomes of its session."""

    def keeps(self, job: Job, now: int) -> bool:
        """Whether the blocks of a ``job`` that has ended are still in use, and go back with a later ``land``."""
        return False

    def free_ended(self, now: int) -> None:
        """Blocks of ended jobs that no transfer uses any more by ``now`` go back. ``land`` does that too; told before a job is
        given up between passes, which comes later.
        """

    def drops_with_pass(self, job: Job) -> bool:
        """Whether a ``job`` that doesn't run and is given up inside a pass goes when that is over, as one that runs does."""
        return False

    # -- blocks that must be copied before they are taken -----------------------------------------------------------

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        """Whether the blocks that ``job`` would get for ``tokens`` more tokens, after ``hit``, are still being copied out."""
        return False

    def stall(self, job: Job) -> None:
        """``job`` leaves the decode batch until a copy has landed."""
        raise NotImplementedError

    @property
    def cleaning(self) -> bool:
        """Whether blocks were sent to be copied or were taken since ``land``: the next pass may find others to send."""
        return False

    # -- stores -----------------------------------------------------------------------------------------------------

    def store(self, job: Job, end: int) -> None:
        """``job`` has computed more tokens by ``end``, which may be stored."""

    def store_output(self, decoding: Iterable[Job], end: int) -> None:
        """Complete blocks that ``decoding`` jobs generated may be stored too."""

    def quiet_passes(self, decoding: Iterable[Job]) -> int:
        """How many passes until one of the ``decoding`` jobs may have something to store; at least one."""
        raise NotImplementedError

    # -- shared tiers -----------------------------------------------------------------------------------------------

    def formed(self) -> None:
        """A pass was formed, with all that is known now."""

    def disturbed(self, waiting: bool) -> bool:
        """Whether what there is to load has changed since, and a job here may be about to ask for it: one that is ``waiting``,
        or one that is parked.
        """
        return False
