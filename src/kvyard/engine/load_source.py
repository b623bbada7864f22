"""Sources of the rest of a prompt, as the scheduler sees them.

``Loads`` has it from lower tiers, a log of vLLM's scheduler from a script (``ScriptedLoads``). Prompts that another worker
computed come by ``EngineHandovers``, blocks go to lower tiers by ``Stores``.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvyard.blocks import Hit
from kvyard.engine.job import Job

NO_HELP: Final = -1
"""There is nothing that a job could use."""
NO_ROOM: Final = -2
"""There is, and the device has no room for it yet."""
AT_ONCE: Final = -3
"""There is, and it counts as computed from now on: ``Job.loaded`` says how many tokens."""


@mypyc_attr(allow_interpreted_subclasses=True)  # scripts aren't compiled
class LoadSource:
    """Loads of one engine's jobs. The verbs that aren't overridden do nothing."""

    def __init__(self) -> None:
        self.weighs = False
        """True if it weighs loading against computing, and needs the backlog to do so."""
        self.in_line = False
        """True if jobs that load, or hold what was loaded, count among those that wait, as in vLLM: a long prompt is cut for
        their sake, one that is given up inside a pass goes when that is over, and none gives back what it holds."""
        self.leaving: dict[str, Job] = {}
        """Jobs that have ended, whose blocks are still in use."""

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool, backlog: int) -> int:
        """See whether there is more of a prompt than ``hit``. If so, ``job`` is ``LOADING`` until ``land`` returns it, and the
        answer is how many tokens it waits for. Otherwise ``NO_HELP``, ``AT_ONCE``, or ``NO_ROOM``: then it must wait where it
        is. ``backlog``: prompt tokens that running jobs have still to compute, if the source weighs.
        """
        raise NotImplementedError

    def land(self, now: int) -> list[Job]:
        """Let transfers that ended by ``now`` take effect. Returns the jobs that wait again, each to be put before the one
        returned before it.
        """
        raise NotImplementedError

    def earliest_deadline(self) -> int | None:
        """Return the end of the next transfer, if nothing else begins."""
        raise NotImplementedError

    def arrived(self, job: Job) -> None:
        """``job`` has arrived, and is in the queue."""

    def receive(self, job: Job) -> None:
        """A ``job`` that was loaded for is next in the queue."""

    def admitted(self, job: Job) -> None:
        """``job`` begins to run, with what was loaded for it."""

    def preempted(self, job: Job, now: int, bar: bool = False) -> None:
        """``job`` loses its blocks and will be asked for again; ``bar``: it must compute what it could load from now on."""

    def ended(self, job: Job, now: int) -> bool:
        """``job`` has ended at ``now``. Returns true if its blocks are still in use: ``free_ended`` gives them back."""
        return False

    def free_ended(self, now: int) -> None:
        """Give back blocks of ended jobs that no transfer uses any more by ``now``. Called before a job is given up between
        passes; ``land`` does it too.
        """
