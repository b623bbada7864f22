"""The one adviser of studies: what to choose, what that costs, and what to doubt, as a decision and in sentences.

It knows candidates and metrics alone, so that every study can ask it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from kvyard.lab.study.certainty import Evidence, limits_text, order_text
from kvyard.lab.study.table import Values
from kvyard.replay.report.metrics import COST, METRICS, Metric
from kvyard.replay.report.report import too_many_rejected
from kvyard.replay.report.slo import RULE, WANTED, Limit, missed
from kvyard.replay.report.words import percent

NEAR = 0.05
"""A candidate whose mean TTFT is at most this share above the lowest is as good, and may be cheaper."""
SAME = 0.01
"""One of equal cost whose mean TTFT is at most this share above the lowest is named beside it."""
TTFT = METRICS["ttft_mean"]
TRADED = METRICS["itl_p99"]
"""Metric that a lower TTFT may be traded for: requests wait for the first token, and notice gaps afterwards."""
CHOSEN_BY = tuple(
    METRICS[name]
    for name in ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "e2e_mean", "requests_per_s", "goodput", "reuse")
)
"""Metrics that people choose runs by, in order."""


class AdviceOption(msgspec.Struct):
    """Something to choose: a fleet, a policy, a run."""

    name: str
    values: Values
    cost: Any = 0.0
    """Orders candidates by price: a number, or a ``FleetSize``."""
    violation: float = 0.0
    """By how much it misses the limits; 0 if it keeps them."""
    evidence: Evidence = Evidence()
    """Known error of its values."""
    currency: str = ""
    """Of a cost that is a number; empty if prices are the user's own."""

    def losses(self, goals: Sequence[Metric]) -> list[Any]:
        """Return how bad it is by each goal: smaller is better."""
        return [self.cost if goal is COST else goal.loss(_value(self, goal)) for goal in goals]


C = TypeVar("C", bound=AdviceOption)


class Advice(msgspec.Struct, frozen=True):
    """A decision, and the sentences that explain it."""

    choice: str = ""
    """Name of the candidate to take; empty if there is none to take."""
    sentences: list[str] = []

    def also(self, *sentences: str) -> Advice:
        """Return this advice with further sentences; empty ones are left out."""
        return Advice(self.choice, [*self.sentences, *filter(None, sentences)])


def choose(candidates: Sequence[C], goals: Sequence[Metric]) -> list[C]:
    """Return the best candidate that keeps the limits, by several goals the Pareto front, in the first goal's order. If none
    keeps them, the closest. Ties go to the cheaper candidate, then to the lower TTFT, then to the first.
    """
    kept = [candidate for candidate in candidates if candidate.violation <= 0]
    if not kept:
        return [min(candidates, key=lambda candidate: candidate.violation)] if candidates else []
    if len(goals) == 1:
        return [min(kept, key=lambda candidate: (candidate.losses(goals), candidate.cost, _value(candidate, TTFT)))]
    return sorted(front(kept, goals), key=lambda candidate: candidate.losses(goals))


def front(candidates: Sequence[C], goals: Sequence[Metric]) -> list[C]:
    """Return the candidates that no other one beats: better in one of ``goals`` and worse in none."""
    losses = [candidate.losses(goals) for candidate in candidates]
    return [
        candidate
        for candidate, own in zip(candidates, losses, strict=True)
        if not any(
            other != own and all(theirs <= mine for theirs, mine in zip(other, own, strict=True)) for other in losses
        )
    ]


def middle(candidates: Sequence[C], goals: Sequence[Metric]) -> C:
    """Return the candidate of a front that is nearest to the best of each goal."""
    losses = [candidate.losses(goals) for candidate in candidates]
    ends = [(min(column), max(column)) for column in zip(*losses, strict=True)]

    def distance(index: int) -> float:
        return sum(
            ((value - low) / (high - low)) ** 2 if high > low else 0.0
            for value, (low, high) in zip(losses[index], ends, strict=True)
        )

    return candidates[min(range(len(candidates)), key=distance)]


def answer(
    candidates: Sequence[AdviceOption], goals: Sequence[Metric], limits: Sequence[Limit], wanted: str, count: int = 0
) -> Advice:
    """Advise on the best candidate that keeps ``limits``, which ``wanted`` names. ``count`` points were looked at, if not as
    many as there are candidates.
    """
    chosen, count = choose(candidates, goals), count or len(candidates)
    if not chosen:
        return Advice()
    best = chosen[0] if len(chosen) == 1 else middle(chosen, goals)
    if best.violation > 0:
        why = missed(best.values, limits)
        slo = f" ({wanted})" if wanted else ""
        return Advice(
            "", [f"No point of {count} meets the SLO{slo}. The closest is {best.name}: {why}; {_price(best)}."]
        ).also(rejection_rule(candidates))
    if len(chosen) > 1:
        sentence = f"{len(chosen)} of {count} points are on the Pareto front. In its middle: {best.name}"
    else:
        kept = sum(candidate.violation <= 0 for candidate in candidates)
        keeping = f"{kept} of {count} points keep {wanted}" if wanted else f"of {count} points"
        by = "it is the cheapest" if goals[0] is COST else f"it has the best {goals[0].name}"
        sentence = f"Take {best.name}: {keeping}, and {by}" if wanted else f"Take {best.name}: {keeping} {by}"
    asked = [metric for metric in _asked(goals, limits) if metric is not COST]
    results = ", ".join([f"{metric.title} {metric.text(best.values.get(metric.name), unit=True)}" for metric in asked])
    advice = Advice(best.name, [f"{sentence}: {f'{results}, ' if results else ''}{_price(best)}."])
    if len(goals) == 1 and goals[0] is not COST:
        rest = [candidate for candidate in candidates if candidate is not best and candidate.violation <= 0]
        advice = advice.also(in_order(best, choose(rest, goals)[0], goals[0]) if rest else "")
    return advice.also(limits_text(limits, best.evidence), rejection_rule(candidates) if limits else "")


def rejection_rule(candidates: Sequence[AdviceOption]) -> str:
    """Return how rejected requests count, if any candidate rejects some."""
    return RULE if any(candidate.values.get("rejected_share") for candidate in candidates) else ""


def rejections(values: Values) -> str:
    """Return that a run rejects more than may be, and what helps; empty if it doesn't."""
    share = values.get("rejected_share") or 0.0
    if not too_many_rejected(share):
        return ""
    return (
        f"{percent(share)} of the requests are rejected, and times are those of the others (--max-tokens leaves out requests "
        "that are too long, more memory for KV blocks takes them)"
    )


def in_order(best: AdviceOption, other: AdviceOption, metric: Metric) -> str:
    """Say whether the order of two candidates in ``metric`` stands in spite of the error; empty without evidence."""
    both = [(candidate.name, _value(candidate, metric), candidate.evidence) for candidate in (best, other)]
    return order_text(metric, both[0], both[1])


def lowest_ttft(candidates: Sequence[AdviceOption]) -> Advice:
    """Advise on the lowest mean TTFT, and on the cheapest candidate that is nearly as good."""
    if not candidates:
        return Advice()
    best = min(candidates, key=lambda candidate: (_value(candidate, TTFT), candidate.cost))
    near = [candidate for candidate in candidates if _value(candidate, TTFT) <= _value(best, TTFT) * (1 + NEAR)]
    cheap = min(near, key=lambda candidate: (candidate.cost, _value(candidate, TTFT)))
    lowest = f"the lowest mean TTFT, {_text(best, TTFT)}"
    rest = [candidate for candidate in candidates if candidate is not best]
    second = min(rest, key=lambda candidate: (_value(candidate, TTFT), candidate.cost)) if rest else None
    if cheap.cost == best.cost:
        return Advice(
            best.name, [f"Take {best.name}: {lowest}, and none within {NEAR:.0%} of it is cheaper: {_price(best)}."]
        ).also(_as_good(best, rest), in_order(best, second, TTFT) if second is not None else "", _rejecting(best))
    cheapest = f"Within {NEAR:.0%} of it, {cheap.name} is the cheapest: {_text(cheap, TTFT)}, {_price(cheap)}."
    return Advice(cheap.name, [f"{best.name} has {lowest}: {_price(best)}. {cheapest}"]).also(_rejecting(cheap))


def _as_good(best: AdviceOption, rest: Sequence[AdviceOption]) -> str:
    """Return a sentence on the candidates whose mean TTFT is hardly longer at the same cost; empty if there are none."""
    most = _value(best, TTFT) * (1 + SAME)
    names = [candidate.name for candidate in rest if candidate.cost == best.cost and _value(candidate, TTFT) <= most]
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f"There is little to choose: at the same cost, {', '.join(names)} {verb} within {SAME:.0%} of it."


def _rejecting(choice: AdviceOption) -> str:
    words = rejections(choice.values)
    return f"But {words}." if words else ""


def with_foresight(candidates: Sequence[AdviceOption]) -> str:
    """Return a sentence on the best candidate that knows the future; empty if there is none."""
    if not candidates:
        return ""
    best = min(candidates, key=lambda candidate: _value(candidate, TTFT))
    return (
        f"{best.name} knows the future, so no engine can have it: with foresight the mean TTFT is {_text(best, TTFT)}."
    )


def at_edges(edges: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting of a choice that is at the ``low`` or ``high`` end of its range."""
    return [
        f"{setting} is at the {end} end of its range: look {'above' if end == 'high' else 'below'} it too."
        for setting, end in edges.items()
    ]


def least_behind(groups: Mapping[str, Sequence[AdviceOption]]) -> Advice:
    """Advise on the candidate whose mean TTFT is least behind the lowest, over all groups that have the same candidates.
    Candidates are in order of TTFT.
    """
    behind: dict[str, dict[str, float]] = {}
    for group, candidates in groups.items():
        least = _value(candidates[0], TTFT)
        for candidate in candidates:
            if least:
                behind.setdefault(candidate.name, {})[group] = _value(candidate, TTFT) / least - 1
    everywhere = {name: losses for name, losses in behind.items() if len(losses) == len(groups)}
    if not everywhere:
        return Advice()
    choice = min(everywhere, key=lambda name: (fmean(everywhere[name].values()), name))
    group, candidates = next(iter(groups.items()))
    own = next(candidate for candidate in candidates if candidate.name == choice)
    why = _among(own, candidates) if len(groups) == 1 else _over(choice, everywhere[choice])
    calm = min(candidates, key=lambda candidate: (_value(candidate, TRADED), candidate.name))
    where = f" at {group}" if len(groups) > 1 else ""
    if calm.name == choice:
        trade = f"It costs nothing{where}: its ITL p99, {_text(own, TRADED)}, is the lowest too."
    else:
        trade = (
            f"What it costs{where}: an ITL p99 of {_text(own, TRADED)}, where {calm.name} has {_text(calm, TRADED)} and a mean "
            f"TTFT of {_text(calm, TTFT)}."
        )
    second = next((candidate for candidate in candidates if candidate is not own), None)
    return Advice(choice, [why, trade]).also(in_order(own, second, TTFT) if second is not None else "")


def _among(own: AdviceOption, candidates: Sequence[AdviceOption]) -> str:
    if len(candidates) == 1:
        return f"Only {own.name} was run: mean TTFT {_text(own, TTFT)}."
    second = candidates[1] if candidates[0] is own else candidates[0]
    if _text(own, TTFT) == _text(second, TTFT):
        return f"{own.name} and {second.name} have the same mean TTFT, {_text(own, TTFT)}: choose by the rest."
    return f"Take {own.name}: lowest mean TTFT, {_text(own, TTFT)}; next is {second.name} with {_text(second, TTFT)}."


def _over(choice: str, behind: Mapping[str, float]) -> str:
    worst = max(behind, key=lambda group: behind[group])
    if behind[worst] <= 0:
        loads = "both loads" if len(behind) == 2 else f"all {len(behind)} loads"
        return f"Take {choice}: lowest mean TTFT at {loads}."
    mean = fmean(behind.values())
    return (
        f"Take {choice}: over {len(behind)} loads its mean TTFT is {mean:.1%} above the lowest on average, and "
        f"{behind[worst]:.1%} at worst ({worst})."
    )


def compared(runs: Sequence[AdviceOption]) -> Advice:
    """Advise on runs beside the first: of two, what the second is better and worse in; of more, a sentence for each metric that
    people choose by.
    """
    wins: dict[str, list[str]] = {}
    for metric in CHOSEN_BY:
        best = metric.best([_known(run, metric) for run in runs])
        if len(best) == 1:
            wins.setdefault(runs[best[0]].name, []).append(metric.title)
    sentences = [_beside(runs[1], runs[0])] if len(runs) == 2 else [_ranked(metric, runs) for metric in CHOSEN_BY]
    return Advice(next(iter(wins)) if len(wins) == 1 else "").also(*sentences)


def _beside(run: AdviceOption, first: AdviceOption) -> str:
    """Say what ``run`` is better and worse in than ``first``."""
    better, worse = (
        [metric for metric in CHOSEN_BY if metric.beats(_known(run, metric), _known(first, metric)) == sign]
        for sign in (1, -1)
    )
    if better:
        rest = f"worse in {changes(worse, run.values, first.values)}" if worse else "worse in nothing"
        return f"{run.name} is better than {first.name} in {changes(better, run.values, first.values)}, and {rest}."
    if worse:
        return f"{run.name} is worse than {first.name} in {changes(worse, run.values, first.values)}, and better in nothing."
    return f"{run.name} and {first.name} are within 0.5% of each other in all that people choose by."


def _ranked(metric: Metric, runs: Sequence[AdviceOption]) -> str:
    """Say which runs are best, next and worst in ``metric``, with their changes against the first run; empty if none has it."""
    known = sorted(
        (run for run in runs if _known(run, metric) is not None), key=lambda run: metric.loss(_value(run, metric))
    )
    if not known:
        return ""
    if not metric.best([_known(run, metric) for run in known]):
        return f"{metric.title}: all are within 0.5% of {_text(known[0], metric)}."

    def named(run: AdviceOption) -> str:
        change = "" if run is runs[0] else metric.change_text(_value(run, metric), _known(runs[0], metric))
        return f"{run.name} {_text(run, metric)}{f' ({change})' if change else ''}"

    worst = f"; worst {named(known[-1])}" if len(known) > 2 else ""
    return f"{metric.title}: best {named(known[0])}, next {named(known[1])}{worst}."


def changes(metrics: Sequence[Metric], values: Values, base: Values) -> str:
    """Return values with their changes from ``base``, in words."""
    pieces = []
    for metric in metrics:
        value = values.get(metric.name)
        change = metric.change_text(value, base.get(metric.name)) or "no change known"
        pieces.append(f"{metric.title} ({metric.text(value, unit=True)}, {change})")
    return pieces[0] if len(pieces) == 1 else f"{', '.join(pieces[:-1])} and {pieces[-1]}"


def _asked(goals: Sequence[Metric], limits: Sequence[Limit]) -> list[Metric]:
    return list(dict.fromkeys([*goals, *(WANTED[limit.name] for limit in limits)]))


def _price(candidate: AdviceOption) -> str:
    if not isinstance(candidate.cost, float):
        return str(candidate.cost)
    return " ".join(filter(None, ("cost", COST.text(candidate.cost), candidate.currency, "an hour")))


def _text(candidate: AdviceOption, metric: Metric) -> str:
    return metric.text(_value(candidate, metric), unit=True)


def _known(candidate: AdviceOption, metric: Metric) -> float | None:
    return candidate.values.get(metric.name)


def _value(candidate: AdviceOption, metric: Metric) -> float:
    return _known(candidate, metric) or 0.0
