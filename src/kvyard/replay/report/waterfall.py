"""Losses of reuse: from an endless cache to what was delivered, step by step, each with its cost.

The steps add up: each is the difference of two levels, and the last level is the report's own reuse. A step may be a gain,
as where more was found at admission than the router knew of. Milliseconds are what computing that many prompt tokens takes
in full passes on a worker of the first kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvyard.replay.report.numbers import Share
from kvyard.replay.report.plain_cache import absent_levels
from kvyard.replay.report.report import Report, RouterReport, Waterfall, WaterfallStep
from kvyard.replay.report.words import percent, span, whole

if TYPE_CHECKING:
    from kvyard.replay.config import ReplayConfig

LEVELS = {
    "infinite": "endless cache, shared by all",
    "belady": "one cache, ideal eviction",
    "pooled": "one cache, this eviction",
    "routed": "split, routed as it was",
    "believed": "as the router knew it",
    "kept": "still there at admission",
    "delivered": "found at admission",
}
"""Levels, in words."""
LOSSES = {
    "belady": "too little room",
    "pooled": "eviction without foresight",
    "routed": "routed elsewhere",
    "believed": "not known, or no room for it",
    "kept": "gone before it was admitted",
    "delivered": "no room beside running ones",
}
"""Loss of each step, in words."""
GAINS = {
    "routed": "apart from what evicts it",
    "believed": "expected of running ones",
    "delivered": "there without being known",
}
"""Gain of each step, in words."""


def make_waterfall(
    config: ReplayConfig, bounds: Mapping[str, Share], router: RouterReport, reused: Share, rate: float | None
) -> Waterfall:
    """Return the steps of a run; none without ``bounds``. ``rate`` is what a prompt token takes, in milliseconds."""
    if not bounds:
        return Waterfall()
    levels = {name: bounds[name].part for name in LEVELS if name in bounds}
    absent = {name: why for name, why in absent_levels(config).items() if name not in levels}
    if router.regret.whole:
        levels["believed"], levels["kept"] = router.belief.whole, router.belief.part
    else:
        absent["believed"] = absent["kept"] = f"{router.policy} knew of no worker that had any of a prompt"
    levels["delivered"] = reused.part
    steps: list[WaterfallStep] = []
    for name, tokens in levels.items():
        change = tokens - steps[-1].tokens if steps else 0
        ms = None if rate is None else -change * rate + 0.0  # no -0.0
        steps.append(WaterfallStep(level=name, tokens=tokens, change=change, ms=ms))
    return Waterfall(steps=steps, absent=absent)


def lost_tokens(report: Report) -> dict[str, int]:
    """Return the tokens that each step lost; a step that won some takes them off the losses after it. They add up to what an
    endless cache has beyond what was delivered.
    """
    steps = report.waterfall.steps
    if not steps:
        return {}
    left, delivered, lost = steps[0].tokens, steps[-1].tokens, {}
    for step in steps[1:]:
        level = max(step.tokens, delivered)
        lost[step.level] = max(0, left - level)
        left = min(left, level)
    return lost


def lost_ms(report: Report) -> dict[str, float]:
    """Return the prefill time of what each step lost; empty if what a prompt token takes isn't known."""
    rate = next(
        (step.ms / -step.change for step in report.waterfall.steps if step.change and step.ms is not None), None
    )
    return {} if rate is None else {level: tokens * rate for level, tokens in lost_tokens(report).items()}


EXPLAINED = (
    "What eviction without foresight loses is counted against ideal eviction in one cache; tokens evicted before, above, are "
    "counted at their own worker, for whatever reason it had no room."
)


def step_cells(step: WaterfallStep, report: Report) -> list[str]:
    """Return a step for a table's row: tokens, their share, the change, its prefill time, and what it is a loss by."""
    all_tokens = report.reuse["all"].whole
    cells = [whole(step.tokens), percent(step.tokens / all_tokens) if all_tokens else "–"]
    if not step.change:
        return [*cells, "", "", ""]
    by = LOSSES.get(step.level, "") if step.change < 0 else GAINS.get(step.level, "")
    time = "" if step.ms is None else f"{'+' if step.ms > 0 else '-'}{prefill_time(abs(step.ms))}"
    return [*cells, f"{step.change:+,}", time, by]


def prefill_time(ms: float) -> str:
    """Format the time of computing, in milliseconds up to ten seconds."""
    return span(ms / 1e3) if ms >= 10_000 else f"{ms:,.0f} ms"


def absent_notes(report: Report) -> list[str]:
    """Return why levels aren't given, a sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in report.waterfall.absent.items():
        reasons.setdefault(why, []).append(LEVELS[name])
    return [f"Not given: {', and '.join(levels)}; {why}." for why, levels in reasons.items()]
