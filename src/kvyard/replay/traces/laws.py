"""Distributions that numbers are drawn from, as text: ``lognormal:median=1000,sigma=1``. It knows no requests.

Each has its own random generator, so changing one distribution of a workload leaves the others' numbers unchanged.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import NamedTuple, TypeVar

from kvyard.clock import SECOND
from kvyard.errors import KvyardError, suggest

Draw = Callable[[Random], float]
Gaps = Callable[[Random], Iterator[float]]
"""Seconds between arrivals, without end."""
T = TypeVar("T")


class Law(NamedTuple):
    """Form of a law: its parameters, with their defaults (None: required)."""

    parameters: Mapping[str, float | None]
    make: Callable[[Mapping[str, float]], object]


def number_law(text: str, field: str, empirical: Callable[[str], array[int]] | None = None) -> Draw:
    """Return a function that draws numbers by a law. ``empirical`` gives the numbers of a named file. Raises
    ``KvyardError``."""
    name, _, rest = text.partition(":")
    if name == "empirical":
        if empirical is None or not rest:
            raise KvyardError(f"{field}: empirical:FILE names a trace to take lengths from, and is for lengths only")
        values = empirical(rest)
        return lambda random: values[random.randrange(len(values))]
    if name == "table":
        numbers = table_numbers(text, field)
        return lambda random: numbers[random.randrange(len(numbers))]
    return _made(text, field, NUMBERS)  # type: ignore[return-value]


def arrival_law(text: str) -> Gaps:
    """Return a function that draws gaps between arrivals by a law. Raises ``KvyardError``."""
    return _made(text, "arrivals", ARRIVALS)  # type: ignore[return-value]


def arrival_times(gaps: Gaps, random: Random) -> Iterator[int]:
    """Yield nanoseconds of arrivals, the first at 0."""
    time = 0.0
    yield 0
    for gap in gaps(random):
        time += gap
        yield round(time * SECOND)


def _made(text: str, field: str, laws: Mapping[str, Law]) -> object:
    name, _, rest = text.partition(":")
    law = laws.get(name)
    if law is None:
        raise KvyardError(f"{field}: unknown law {name!r}: {suggest(name, laws)}")
    values = dict(law.parameters)
    keys = list(values)
    for position, part in enumerate(rest.split(",") if rest else ()):
        key, equals, value = part.partition("=")
        if not equals:
            if position >= len(keys):
                raise KvyardError(f"{field}: {name} takes {', '.join(keys)}; {part!r} is one too many")
            key, value = keys[position], key
        if key not in values:
            raise KvyardError(f"{field}: {name} has no {key!r}; it takes {', '.join(keys)}")
        try:
            values[key] = float(value)
        except ValueError:
            raise KvyardError(f"{field}: {key} of {name} must be a number, not {value!r}") from None
    given: dict[str, float] = {}
    for key, amount in values.items():
        if amount is None:
            raise KvyardError(f"{field}: {name} needs {key}, as in {name}:{key}=...")
        if not amount >= 0 or (amount == math.inf and key != "max"):
            raise KvyardError(f"{field}: {key} of {name} can't be {amount:g}")
        given[key] = amount
    try:
        return law.make(given)
    except ValueError as error:
        raise KvyardError(f"{field}: {name} {error}") from None


def table_numbers(text: str, field: str) -> array[float]:
    """Return the numbers of a ``table`` law. Raises ``KvyardError`` for another law or what is no number."""
    name, _, rest = text.partition(":")
    if name != "table":
        raise KvyardError(f"{field} must be a table, as in table:3,5,9, not {text[:40]!r}")
    try:
        values = array("d", map(float, rest.split(",")))
    except ValueError:
        raise KvyardError(f"{field}: table takes numbers, as in table:3,5,9") from None
    if not all(0 <= value < math.inf for value in values):
        raise KvyardError(f"{field}: numbers of a table can't be negative or infinite")
    return values


def _positive(values: Mapping[str, float], *keys: str) -> None:
    for key in keys:
        if values[key] <= 0:
            raise ValueError(f"needs {key} above 0")


def _fixed(p: Mapping[str, float]) -> Draw:
    value = p["value"]
    return lambda random: value


def _uniform(p: Mapping[str, float]) -> Draw:
    low, high = p["min"], p["max"]
    if low > high:
        raise ValueError("needs min at most max")
    return lambda random: random.uniform(low, high)


def _lognormal(p: Mapping[str, float]) -> Draw:
    _positive(p, "median")
    middle, sigma, most = math.log(p["median"]), p["sigma"], p["max"]
    return lambda random: min(random.lognormvariate(middle, sigma), most)


def _exponential(p: Mapping[str, float]) -> Draw:
    _positive(p, "mean")
    rate = 1 / p["mean"]
    return lambda random: random.expovariate(rate)


def _geometric(p: Mapping[str, float]) -> Draw:
    if p["mean"] < 1:
        raise ValueError("needs mean of at least 1")
    stay = 1 - 1 / p["mean"]

    def draw(random: Random) -> float:
        return 1 if stay == 0 else 1 + math.floor(math.log(1 - random.random()) / math.log(stay))

    return draw


def _poisson(p: Mapping[str, float]) -> Gaps:
    return _gamma({"rate": p["rate"], "cv": 1.0})


def _gamma(p: Mapping[str, float]) -> Gaps:
    _positive(p, "rate", "cv")
    shape = 1 / p["cv"] ** 2
    scale = 1 / (p["rate"] * shape)

    def gaps(random: Random) -> Iterator[float]:
        while True:
            yield random.gammavariate(shape, scale)

    return gaps


def _constant(p: Mapping[str, float]) -> Gaps:
    _positive(p, "rate")
    gap = 1 / p["rate"]

    def gaps(random: Random) -> Iterator[float]:
        while True:
            yield gap

    return gaps


def _onoff(p: Mapping[str, float]) -> Gaps:
    _positive(p, "rate", "on", "off")
    rate, on, off = p["rate"], 1 / p["on"], 1 / p["off"]

    def gaps(random: Random) -> Iterator[float]:
        left = random.expovariate(on)
        while True:
            gap, quiet = random.expovariate(rate), 0.0
            while gap > left:
                # The wait for an arrival goes on where it was after the pause: it has no memory.
                gap -= left
                quiet += left + random.expovariate(off)
                left = random.expovariate(on)
            left -= gap
            yield quiet + gap

    return gaps


def _daily(p: Mapping[str, float]) -> Gaps:
    """Poisson, with a rate that goes from ``low`` at the start to ``high`` half a ``day`` (hours) later and back."""
    _positive(p, "high", "day")
    low, high, day = p["low"], p["high"], p["day"] * 3600
    if low > high:
        raise ValueError("needs low at most high")

    def gaps(random: Random) -> Iterator[float]:
        now = last = 0.0
        while True:
            # Candidates come at the highest rate, and are taken as often as the rate then is of that.
            now += random.expovariate(high)
            rate = (low + high) / 2 - (high - low) / 2 * math.cos(2 * math.pi * now / day)
            if random.random() * high < rate:
                yield now - last
                last = now

    return gaps


NUMBERS: Mapping[str, Law] = {
    "fixed": Law({"value": None}, _fixed),
    "uniform": Law({"min": None, "max": None}, _uniform),
    "lognormal": Law({"median": None, "sigma": 1.0, "max": math.inf}, _lognormal),
    "exponential": Law({"mean": None}, _exponential),
    "geometric": Law({"mean": None}, _geometric),
}
ARRIVALS: Mapping[str, Law] = {
    "poisson": Law({"rate": None}, _poisson),
    "gamma": Law({"rate": None, "cv": 2.0}, _gamma),
    "constant": Law({"rate": None}, _constant),
    "onoff": Law({"rate": None, "on": None, "off": None}, _onoff),
    "daily": Law({"low": None, "high": None, "day": 24.0}, _daily),
}
