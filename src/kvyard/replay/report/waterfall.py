"""Where the reuse went: from an endless cache to what was delivered, step by step, each with what it cost.

The steps add up: each is the difference of two levels, and the last level is the report's own reuse. A step may be a gain, as
where more was found at admission than the router knew of. Milliseconds are what computing that many prompt tokens takes in full
passes on a worker of the first kind.
"""

import msgspec

from kvyard.replay.report.report import Report
from kvyard.replay.report.words import percent, span, whole

LEVELS = {
    "infinite": "an endless cache, shared by all",
    "belady": "one cache as large as all together, ideal eviction",
    "pooled": "the same, evicting the least recently used",
    "routed": "split up, and routed as it was",
    "believed": "as the router knew it",
    "delivered": "found at admission",
}
"""Where each step leads, in words."""
LOSSES = {
    "belady": "too little room",
    "pooled": "eviction without foresight",
    "routed": "routed elsewhere",
    "believed": "not known to the router",
    "delivered": "gone, or more than was known",
}
"""What each step is a loss by."""


class WaterfallStep(msgspec.Struct, frozen=True):
    """One level, and the step to it."""

    level: str
    """A name of ``LEVELS``."""
    tokens: int
    """Prompt tokens that needn't be computed at this level."""
    change: int
    """From the level before; 0 for the first."""
    ms: float | None
    """Milliseconds of prefill that the change costs (or saves, below 0); ``None`` where that isn't known."""


def waterfall(report: Report) -> list[WaterfallStep]:
    """The steps of a report that has bounds; none without. Levels that aren't known there are left out."""
    bounds, router = report.bounds, report.router
    if not bounds:
        return []
    levels = {name: bounds[name].part for name in LEVELS if name in bounds}
    if router is not None and router.regret.whole:
        levels["believed"] = int(router.belief.whole)
    levels["delivered"] = int(report.reuse["all"].part)
    steps: list[WaterfallStep] = []
    rate = report.prefill_ms_per_token
    for name, tokens in levels.items():
        change = int(tokens) - steps[-1].tokens if steps else 0
        steps.append(WaterfallStep(name, int(tokens), change, None if rate is None else -change * rate))
    return steps


def step_cells(step: WaterfallStep, report: Report) -> list[str]:
    """A step for a table's row: tokens, their share, the change, its prefill time, and what it is a loss by."""
    all_tokens = report.reuse["all"].whole
    cells = [whole(step.tokens), percent(step.tokens / all_tokens) if all_tokens else "–"]
    if not step.change:
        return [*cells, "", "", ""]
    lost = LOSSES.get(step.level, "") if step.change < 0 else ""
    time = "" if step.ms is None else f"{'+' if step.ms > 0 else '-'}{span(abs(step.ms) / 1e3)}"
    return [*cells, f"{step.change:+,}", time, lost]
