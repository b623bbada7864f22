"""The answer of a search in sentences: what was asked, what was found, how it does on the test part, and what to doubt."""

from collections.abc import Mapping, Sequence

from kvyard.events.tier import LOWER_TIERS
from kvyard.lab.tune.goals import COST, Limit, shown_figure
from kvyard.lab.tune.look import Look
from kvyard.lab.tune.space import ROUTER
from kvyard.lab.tune.tuned import Tuned

FIRST = (ROUTER, "workers")
"""Named before others: which, how many, how much."""


def asked(tuned: Tuned) -> str:
    """What was wanted."""
    goals = ", ".join(map(str, tuned.goals))
    return f"{goals} with {' and '.join(map(str, tuned.limits))}" if tuned.limits else goals


def point(look: Look, tuned: Tuned) -> str:
    """A point in one line."""
    flat = tuned.space.flat(look.point)
    names = sorted(flat, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return ", ".join(f"{name.rpartition('.')[2]} {flat[name]}" for name in names)


def wanted(tuned: Tuned) -> list[str]:
    """Figures of goals and limits, each once; the cost in any case."""
    return list(dict.fromkeys([*(goal.name for goal in tuned.goals), *(limit.name for limit in tuned.limits), COST]))


def results(figures: Mapping[str, float], names: Sequence[str]) -> str:
    """Some figures in one line."""
    return ", ".join(f"{name} {shown_figure(figures, name)}" for name in names)


def missed(figures: Mapping[str, float], limits: Sequence[Limit]) -> str:
    """The limits that are not kept, with what is there instead; empty where all are."""
    over = [one for one in limits if one.name in figures and one.violation(figures[one.name]) > 0]
    return ", ".join(f"{one.name} is {shown_figure(figures, one.name)} ({one})" for one in over)


def verdict(tuned: Tuned) -> str:
    """The answer's first sentence."""
    answer = tuned.answer
    if answer is None:
        return "No point could be replayed."
    names = wanted(tuned)
    if not tuned.met:
        why = missed(answer.figures, tuned.limits) or "more than 1 % of the requests were rejected"
        return f"No point of {tuned.replayed} meets the SLO. The closest is {point(answer, tuned)}: {why}."
    if len(tuned.goals) > 1:
        return (
            f"{len(tuned.best)} of {tuned.replayed} points are on the Pareto front. In its middle: {point(answer, tuned)}: "
            f"{results(answer.figures, names)}."
        )
    return f"The best of {tuned.replayed} points: {point(answer, tuned)}: {results(answer.figures, names)}."


def tested(tuned: Tuned) -> str:
    """How the answer does on the part that it was not searched on."""
    answer, parts = tuned.answer, tuned.parts
    if answer is None:
        return ""
    if parts.test is None:
        return "It was not tested on anything else: --test 0.3 keeps the last 30 % of the trace for that."
    if not answer.test:
        return "It has not been replayed on the test part yet."
    names = [name for name in wanted(tuned) if name != COST]
    said = f"On the test part ({parts.requests['test']:,} requests, later and not searched on): {results(answer.test, names)}"
    if answer.test_violation <= 0:
        return f"{said}{'; the SLO is met there too' if tuned.limits else ''}."
    why = missed(answer.test, tuned.limits) or "more than 1 % of the requests are rejected there"
    return f"{said}. The SLO is missed there: {why}."


def doubts(tuned: Tuned) -> list[str]:
    """What should be looked at before the answer is believed."""
    answer = tuned.answer
    if answer is None:
        return []
    found = []
    for name, end in tuned.space.edges(answer.point).items():
        value = tuned.space.flat(answer.point).get(name, dict(_options(answer)).get(name.rpartition(".")[2]))
        way = "above" if end == "high" else "below"
        found.append(f"{name} {value} is at the {end} end of its range: look {way} it too.")
    if tuned.met and answer.test and answer.test_violation > 0:
        found.append("What is best on one part misses the SLO on the other: leave room, with a lower limit in --slo.")
    if tuned.interrupted:
        found.append("The search was interrupted: this is the best so far.")
    failed = [one for one in tuned.looks if one.state == "failed"]
    if failed:
        found.append(f"{len(failed)} points couldn't be replayed, the first because {failed[0].why}")
    return found


def answered(tuned: Tuned) -> list[str]:
    """All of it, for the head of a file."""
    prices = tuned.prices
    tiers = ", ".join(f"{getattr(prices, tier.label):g} a GiB of {tier.place}" for tier in LOWER_TIERS)
    priced = f"Prices per hour: {prices.card:g} a card, {tiers}"
    lines = [f"kvyard tune {tuned.trace}: {asked(tuned)}", verdict(tuned), tested(tuned), *doubts(tuned), priced]
    return [line.replace("\n", " ") for line in lines if line]


def _options(look: Look) -> list[tuple[str, object]]:
    options = look.point.get("router_options")
    return list(options.items()) if isinstance(options, Mapping) else []
