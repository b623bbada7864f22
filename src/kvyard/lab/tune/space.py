"""Search space: settings with a range or with choices, from text such as ``router.*,host_bytes=0..1TiB,workers=2..32``.

A range of whole numbers, sizes or times is a ladder of round values, so two nearly equal points are one point. A setting that
only exists beside another (an option of the chosen routing policy) is searched only there. It doesn't know the search
algorithm.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.league import LEFT_OUT
from kvyard.lab.tune.ladder import counts, durations, sizes
from kvyard.registry import defaults
from kvyard.replay.settings import SETTINGS
from kvyard.router import POLICIES, RouterConfig
from kvyard.router.policies import make_policy
from kvyard.settings import as_it_is, count, duration, number, size

ROUTER = "router"
OPTION = "router."
"""Prefix of the names of a policy's options."""
EVERYTHING = f"{OPTION}*"
WIDTH = 4.0
"""Without a range an option is searched from its default divided by this to its default times this."""
DIGITS = 3
"""Significant digits of a number that isn't whole."""
FORMS = "write NAME=LOW..HIGH, NAME=A|B|C or router.*, as in router.*,host_bytes=0..1TiB,workers=2..32"


class Chooser(Protocol):
    """Chooses points of the search space."""

    def choice(self, name: str, count: int, /) -> int:
        """Return one of ``count`` unordered choices."""
        ...

    def step(self, name: str, count: int, /) -> int:
        """Return one of ``count`` ordered choices, counted from 0."""
        ...

    def real(self, name: str, low: float, high: float, log: bool, /) -> float:
        """Return a number between two others."""
        ...


class Choices(msgspec.Struct, frozen=True):
    """Values without an order."""

    name: str
    values: tuple[str, ...]

    def pick(self, chooser: Chooser, as_: str = "") -> object:
        """Return one of the choices."""
        return self.values[chooser.choice(as_ or self.name, len(self.values))]

    def edge(self, value: object) -> str:
        """Return the end of the range that ``value`` is at, if a better one might lie beyond: never here."""
        return ""

    def place(self, value: object) -> float:
        """Return its position among the others."""
        return float(self.values.index(str(value)))


class Steps(msgspec.Struct, frozen=True):
    """Values in order."""

    name: str
    values: tuple[object, ...]
    places: tuple[float, ...]
    """``values`` as numbers."""

    def pick(self, chooser: Chooser, as_: str = "") -> object:
        return self.values[chooser.step(as_ or self.name, len(self.values))]

    def edge(self, value: object) -> str:
        return _edge(self.place(value), self.places[0], self.places[-1], floor=1.0)

    def place(self, value: object) -> float:
        return self.places[self.values.index(value)]


class Reals(msgspec.Struct, frozen=True):
    """Numbers between two others."""

    name: str
    low: float
    high: float

    def pick(self, chooser: Chooser, as_: str = "") -> object:
        log = self.low > 0 and self.high / self.low >= 10
        value = float(f"{chooser.real(as_ or self.name, self.low, self.high, log):.{DIGITS}g}")
        return min(self.high, max(self.low, value))

    def edge(self, value: object) -> str:
        reach = 0.02 * (self.high - self.low)
        place = self.place(value)
        near = self.low if place <= self.low + reach else self.high if place >= self.high - reach else place
        return _edge(near, self.low, self.high, floor=0.0)

    def place(self, value: object) -> float:
        return float(str(value))


Dimension = Choices | Steps | Reals


class Space(msgspec.Struct, frozen=True):
    """All that is searched."""

    dimensions: dict[str, Dimension]
    """Settings, by name."""
    policies: tuple[str, ...] = ()
    """Routing policies to choose among; more than one only where the policy is searched."""
    options: dict[str, dict[str, Reals]] = {}
    """Options that are searched, by policy and name."""

    @property
    def size(self) -> int | None:
        """Return the number of points; ``None`` if they can't be counted."""
        points = 1
        for dimension in self.dimensions.values():
            if isinstance(dimension, Reals):
                return None
            points *= len(dimension.values)
        return None if self.options else points

    def pick(self, chooser: Chooser) -> dict[str, object]:
        """Return settings of one point, by flat names and in a fixed order."""
        point: dict[str, object] = {}
        policy = self.policies[0] if len(self.policies) == 1 else ""
        for name, dimension in self.dimensions.items():
            point[name] = dimension.pick(chooser)
            if name == ROUTER:
                policy = str(point[name])
        own = self.options.get(policy, {})
        picked = {name: option.pick(chooser, f"{OPTION}{policy}.{name}") for name, option in own.items()}
        if picked:
            point["router_options"] = picked
        return point

    def edges(self, point: Mapping[str, object]) -> dict[str, str]:
        """Return settings of ``point`` that are at the ``low`` or ``high`` end of their range, where it goes on beyond that
        end.
        """
        ends = {name: dimension.edge(point[name]) for name, dimension in self.dimensions.items()}
        policy = str(point.get(ROUTER, self.policies[0] if self.policies else ""))
        options = point.get("router_options")
        for name, value in options.items() if isinstance(options, Mapping) else ():
            ends[OPTION + name] = self.options[policy][name].edge(value)
        return {name: end for name, end in ends.items() if end}

    def flat(self, point: Mapping[str, object]) -> dict[str, object]:
        """Return ``point`` with options of the policy as settings of their own, named after it."""
        values = {name: point[name] for name in self.dimensions}
        policy = str(point.get(ROUTER, self.policies[0] if self.policies else ""))
        options = point.get("router_options")
        for name, value in options.items() if isinstance(options, Mapping) else ():
            values[f"{OPTION}{policy}.{name}"] = value
        return values


def parse_space(texts: Iterable[str], base: Mapping[str, object]) -> Space:
    """Parse the search space from ``texts``, on top of the settings in ``base``. Raises ``KvyardError``, naming what is
    wrong."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not any(parts):
        raise KvyardError(f"a search needs something to search: {FORMS}")
    dimensions: dict[str, Dimension] = {}
    ranges: dict[str, Reals] = {}
    everything = False
    for part in parts:
        name, equals, values = part.partition("=")
        name = name.strip()
        if part == EVERYTHING:
            everything = True
            continue
        if not equals or not name or not values.strip():
            raise KvyardError(f"--search {part!r} can't be read: {FORMS}")
        if name.startswith(OPTION):
            option = name.removeprefix(OPTION)
            ranges[option] = _reals(option, *_ends(part, values))
            continue
        name = _known(name.replace("-", "_"))
        if name in dimensions:
            raise KvyardError(f"{name} is searched twice: put all its values into one")
        if base.get(name) is not None and not (name == "router" and everything):
            raise KvyardError(f"{name} is both set and searched: leave one of the two out")
        dimensions[name] = _dimension(part, name, values.strip())
    if everything and ROUTER not in dimensions and base.get(ROUTER) is None:
        names = tuple(name for name in POLICIES.names() if name not in LEFT_OUT)
        dimensions = {ROUTER: Choices(ROUTER, names), **dimensions}
    router = dimensions.get(ROUTER)
    fixed = str(base.get(ROUTER) or RouterConfig().policy)
    policies = router.values if isinstance(router, Choices) else (fixed,)
    options = _options(policies, ranges, everything)
    if (ranges or options) and base.get("router_options") is not None:
        raise KvyardError("router_options is set, and options of the router are searched: leave one of the two out")
    space = Space(dimensions, policies, options)
    if not dimensions and not options:
        raise KvyardError(
            f"the routing policy {fixed} has no options to search: name something else, or leave --router out"
        )
    return space


def _options(policies: Sequence[str], ranges: Mapping[str, Reals], everything: bool) -> dict[str, dict[str, Reals]]:
    by_policy: dict[str, dict[str, Reals]] = {}
    unknown = dict(ranges)
    for policy in policies:
        own: dict[str, Reals] = {}
        for name, default in defaults(make_policy(RouterConfig(policy=policy)).OPTIONS).items():
            unknown.pop(name, None)
            if name in ranges:
                own[name] = ranges[name]
            elif everything:
                own[name] = Reals(name, default / WIDTH, default * WIDTH) if default else Reals(name, 0.0, 1.0)
        if own:
            by_policy[policy] = own
    for name in unknown:
        raise KvyardError(
            f"--search {OPTION}{name}: no policy that is searched ({', '.join(policies)}) has that option"
        )
    return by_policy


def _known(name: str) -> str:
    SETTINGS.check_names([name], " after --search")
    (first,) = SETTINGS.named({name: None})
    return first


def _dimension(part: str, name: str, values: str) -> Dimension:
    if ".." in values:
        return _range(part, name, *_ends(part, values))
    mark = SETTINGS[name].mark
    if values == "*":
        names = mark.choices() if mark.choices is not None else ""
        if not names or isinstance(names, str):
            raise KvyardError(f"--search {part}: {name} has no list to choose from; {FORMS}")
        return Choices(name, tuple(choice for choice in names if name != ROUTER or choice not in LEFT_OUT))
    choices = tuple(choice.strip() for choice in values.split("|"))
    if len(choices) < 2 or not all(choices):
        raise KvyardError(f"--search {part}: that is one value, so there is nothing to search; {FORMS}")
    if len(set(choices)) < len(choices):
        raise KvyardError(f"--search {part}: the same value twice")
    for choice in choices:
        SETTINGS[name].parse(name, choice)
    return Choices(name, choices)


def _range(part: str, name: str, low: str, high: str) -> Dimension:
    parse = SETTINGS[name].parse
    if name == "workers":
        parse = count
    ladders: Mapping[Callable[..., Any], Callable[[int, int], list[tuple[object, float]]]] = {
        count: counts,
        size: sizes,
        duration: durations,
    }
    if parse is number:
        return _reals(name, low, high)
    if parse is as_it_is or parse not in ladders:
        raise KvyardError(f"--search {part}: {name} has no range; name its values, as in {name}=A|B")
    first, last = parse(name, low), parse(name, high)
    if not 0 <= first < last:
        raise KvyardError(f"--search {part}: a range goes from a lower to a higher value, and not below 0")
    values, places = zip(*ladders[parse](first, last), strict=True)
    return Steps(name, values, places)


def _reals(name: str, low: str, high: str) -> Reals:
    ends = number(name, low), number(name, high)
    if not 0 <= ends[0] < ends[1] < float("inf"):
        raise KvyardError(
            f"--search {name}={low}..{high}: a range goes from a lower to a higher value, and not below 0"
        )
    return Reals(name, *ends)


def _ends(part: str, values: str) -> tuple[str, str]:
    low, dots, high = values.partition("..")
    if not dots or not low.strip() or not high.strip() or ".." in high:
        raise KvyardError(f"--search {part!r} can't be read: {FORMS}")
    return low.strip(), high.strip()


def _edge(value: float, low: float, high: float, floor: float) -> str:
    """``floor``: nothing lies below this, so the low end is none there."""
    if value == high:
        return "high"
    return "low" if value == low > floor else ""
