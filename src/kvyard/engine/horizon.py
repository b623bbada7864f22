"""The horizon: for how many passes a decode batch stays exactly as it is. This is what makes plans possible.

Nothing that could change the batch may fall into them: a last token, a shortage of blocks, or anything that would let a
waiting job in. The answer may be too small, never too large; tests hold plans against single steps.
"""

from __future__ import annotations

from kvyard.engine.scheduler import Scheduler
from kvyard.hashing import TraceChain


def static_passes(scheduler: Scheduler, most: int) -> int:
    """How many passes from now on are nothing but the same decode steps, up to ``most``; at least one.

    To be asked when a pass was formed that has no chunks and no bursts.
    """
    cohort, loads, manager = scheduler.cohort, scheduler.loads, scheduler.manager
    if scheduler.preempted or scheduler.steps_alone or (scheduler.prefilling and not scheduler.prompts_apart):
        return 1
    cleans = loads is not None and loads.cleans
    if cleans and loads is not None and (scheduler.took_blocks or loads.stalled or loads.cleaning):
        return 1
    end = cohort.next_end()
    assert end is not None
    passes = min(most, end - cohort.tick)
    # A block taken may be of the head's own prefix, and that it then asks lower tiers for.
    asks = loads is not None
    if passes > 1 and (cleans or (scheduler.waiting and (asks or not _only_shrinks(scheduler)))):
        touch = cohort.next_touch()
        if touch is not None:
            # A pass that sees to blocks may free or register some, and then lets somebody in: it must be formed.
            passes = min(passes, max(1, touch - cohort.tick))
    if passes > 1:
        passes = scheduler.shut_passes(passes)
    if passes > 1 and loads is not None and loads.stores_output:
        passes = min(passes, loads.quiet_passes())
    if passes > 1:
        size = min(group.block_size for group in manager.groups)
        room = manager.pool.free // (cohort.count * len(manager.groups))
        if passes // size + 1 > room:
            passes = max(1, (room - 1) * size)
    return passes


def _only_shrinks(scheduler: Scheduler) -> bool:
    """Whether decode steps can do nothing for a job that couldn't be admitted: no window gives blocks back, and what is
    registered has hashes nobody else can have.
    """
    if scheduler.growth is not None and not scheduler.cohort.exact:
        return True
    return all(not group.rule.forgets for group in scheduler.manager.groups) and all(
        isinstance(job.chain, TraceChain) for job in scheduler.running.values()
    )
