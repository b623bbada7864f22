"""The scheduler: decides what each pass computes, and takes the jobs of a pass to their next steps when it is over.

It is put together from parts: ``Lifecycle`` knows where every job is and carries out each step, a policy (``PassMaker``)
decides which jobs a pass has. It never reads a clock and doesn't know how long a pass takes: ``EngineCore`` does.
"""

from collections.abc import Sequence

from kvyard.engine.job import Job
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.passes import Pass
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.role import Role
from kvyard.integers import ceil_div


class Scheduler:
    """Scheduler of one engine, as the core sees it."""

    def __init__(self, jobs: Lifecycle, policy: PassMaker, limits: Sequence[tuple[int, int, str]], role: Role) -> None:
        """``limits``: how many tokens a request may have, prompt and output together, where the prompt counts in multiples of a
        page, and what sets each limit.
        """
        self.jobs = jobs
        self.policy = policy
        self.role = role
        """Part of a request that this engine computes."""
        # The parts that are looked at from outside.
        self.manager = jobs.manager
        self.waiting = jobs.waiting
        self.running = jobs.running
        self.stores = jobs.stores
        self.batch = jobs.batch
        self.blocks = jobs.blocks
        self._limits = limits
        self.reads_queue = jobs.manager.reads_queue
        """True if the eviction policy reads the waiting requests."""

    def add(self, job: Job, now: int) -> None:
        """``job`` has arrived. Its output is cut to what there is room for; one that can never be served is turned away."""
        for tokens, page, where in self._limits:
            room = tokens - ceil_div(job.num_prompt_tokens, page) * page
            if room < 1:
                self.jobs.reject(job, now, f"its prompt of {job.num_prompt_tokens} tokens leaves no room in {where}")
                return
            if room < job.max_tokens:
                job.max_tokens = room
        self.jobs.enqueue(job)

    def form(self, now: int, longest: int = 1) -> Pass | None:
        """Decide what the pass that starts at ``now`` computes, and take its blocks; transfers that have ended take effect
        first. The pass says for how many passes, up to ``longest``, it stays as it is. ``None`` if there is nothing to do.
        """
        jobs, policy = self.jobs, self.policy
        jobs.land(now)
        if self.reads_queue:
            jobs.manager.note_queue(jobs.waiting)
        before = jobs.preemptions
        formed = policy.form(now, longest)
        while formed is None and not jobs.in_flight and (jobs.preemptions != before or jobs.resolve_deadlock(now)):
            # The last ones running preempted themselves, and in such a pass no job is let in; or those that wait were in each
            # other's way. So try once more.
            before = jobs.preemptions
            formed = policy.form(now, longest)
        if jobs.stores is not None:
            jobs.stores.pass_formed()
        return formed

    def complete(self, done: Pass, end: int) -> None:
        """Complete the pass ``done``, which ended at ``end``, its lockstep part included
        (``DecodeBatch.advance`` was called).
        """
        self.policy.computed(done)
        self.jobs.complete(done, end)

    def lockstep(self) -> list[Job]:
        """Return the jobs that take part in every decode pass, in order of admission."""
        return self.jobs.lockstep()

    @property
    def may_reconsider(self) -> bool:
        """Return true if a pass formed again may differ, though nothing happens until then."""
        return len(self.waiting) > 0 or (self.stores is not None and self.stores.cleaning)

    @property
    def disturbed(self) -> bool:
        """Return true if a shared tier has changed since the last pass was formed, and a job here may be about to ask for
        it."""
        return self.stores is not None and self.stores.disturbed(len(self.waiting) > 0)

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless every job is in one place and the blocks add up."""
        self.jobs.check_integrity()
        self.policy.check_integrity()
