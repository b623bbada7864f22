"""Search space: ranges, choices, the options of the policy that was chosen; and refusals."""

from __future__ import annotations

from random import Random

import pytest

from kvyard.errors import KvyardError
from kvyard.lab.league import LEFT_OUT
from kvyard.lab.tune.ladder import counts, durations, sizes
from kvyard.lab.tune.space import Choices, Reals, Steps, parse_space
from kvyard.replay.settings import make_config
from kvyard.router import POLICIES
from kvyard.settings import duration, size


class Drawn:
    """Chooses by chance, and remembers what it was asked."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.asked: list[str] = []

    def choice(self, name: str, count: int, /) -> int:
        self.asked.append(name)
        return self.random.randrange(count)

    step = choice

    def real(self, name: str, low: float, high: float, log: bool, /) -> float:
        self.asked.append(name)
        return self.random.uniform(low, high)


def test_the_issue_s_own_example() -> None:
    space = parse_space(["router.*,host_bytes=0..1TiB,workers=2..32"], {})
    assert list(space.dimensions) == ["router", "host_bytes", "workers"]
    router, host, workers = space.dimensions.values()
    assert isinstance(router, Choices) and set(router.values) == set(POLICIES.names()) - set(LEFT_OUT)
    assert isinstance(host, Steps) and host.values[:3] == (0, "1GiB", "1.25GiB") and host.values[-1] == "1TiB"
    assert isinstance(workers, Steps) and workers.values == tuple(range(2, 33))
    assert set(space.options["least-time"]) == set(POLICIES.get("least-time").OPTIONS)  # type: ignore[attr-defined]


def test_every_point_of_it_is_a_replay_and_has_the_options_of_its_own_policy_alone() -> None:
    space = parse_space(["router.*,host_bytes=0..1TiB,workers=2..32,overlap_credit=0..2"], {})
    seen = set()
    for seed in range(150):
        chooser = Drawn(seed)
        point = space.pick(chooser)
        config = make_config(point)
        seen.add(config.router.policy)
        own = [name for name in chooser.asked if name.startswith("router.")]
        assert own == [f"router.{config.router.policy}.{name}" for name in config.router.options]
        assert set(space.flat(point)) == {"router", "host_bytes", "workers", "overlap_credit", *own}
    assert len(seen) > 15


def test_ladders_are_in_order_and_read_back() -> None:
    for made, parse in (
        (counts(0, 100_000), int),
        (sizes(0, 1 << 40), lambda value: size("", value)),
        (sizes(3 << 30, 100 * 10**9), lambda value: size("", value)),
        (durations(0, 10**9), lambda value: duration("", value)),
        (durations(10**6, 60 * 10**9), lambda value: duration("", value)),
    ):
        places = [place for _, place in made]
        assert places == sorted(set(places)) and 20 < len(made) < 90
        assert [parse(value) for value, _ in made] == places  # type: ignore[operator]
    assert [value for value, _ in counts(2, 5)] == [2, 3, 4, 5]


def test_fixed_policies_and_ranges_of_options() -> None:
    fixed = parse_space(["router.*"], {"router": "least-time"})
    assert not fixed.dimensions and list(fixed.options) == ["least-time"]
    assert set(fixed.pick(Drawn(0))) == {"router_options"}
    listed = parse_space(["router=aibrix|ray-prefix|kv", "router.imbalance=1..20"], {})
    assert {policy: list(options) for policy, options in listed.options.items()} == {
        "aibrix": ["imbalance"],
        "ray-prefix": ["imbalance"],
    }
    assert listed.options["aibrix"]["imbalance"] == Reals("imbalance", 1.0, 20.0)
    both = parse_space(["router.*,router=aibrix|kv"], {})
    assert {"imbalance", "deviations"} <= set(both.options["aibrix"])


def test_edges() -> None:
    space = parse_space(["router=kv|random,host_bytes=0..1TiB,workers=2..32,overlap_credit=0.5..2"], {})
    inside = {"router": "kv", "host_bytes": "64GiB", "workers": 5, "overlap_credit": 1.0}
    assert space.edges(inside) == {}
    assert space.edges({**inside, "overlap_credit": 0.54}) == {}, "a fiftieth of the range is near"
    assert space.edges({**inside, "overlap_credit": 0.52}) == {"overlap_credit": "low"}
    assert space.edges({**inside, "host_bytes": 0}) == {}, "nothing lies below none"
    assert space.edges({**inside, "host_bytes": "1TiB", "workers": 2, "overlap_credit": 1.99}) == {
        "host_bytes": "high",
        "workers": "low",
        "overlap_credit": "high",
    }
    options = parse_space(["router.stickiness=0.5..2"], {"router": "least-time"})
    assert options.edges({"router_options": {"stickiness": 0.5}}) == {"router.stickiness": "low"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a search needs something to search"),
        ("workers", "--search 'workers' can't be read: write NAME=LOW..HIGH"),
        ("workers=2..", "can't be read"),
        ("workers=8..2", "a range goes from a lower to a higher value"),
        ("workers=4", "that is one value"),
        ("wrokers=2..4", "unknown setting 'wrokers' after --search: did you mean workers"),
        ("workers=2..8,workers=9..12", "workers is searched twice"),
        ("block_size=16..64", "block_size is both set and searched"),
        ("host_bytes=0..lots", "host_bytes is 'lots': it must be a size"),
        ("model=a..b", "model has no range; name its values"),
        ("watermark=0.5..0.1", "a range goes from a lower"),
        ("router=kv|kv", "the same value twice"),
        ("router.*,router.nonsense=0..1", "no policy that is searched"),
        ("model=*", "model has no list to choose from"),
        ("event_lag=0..50", "event_lag is '50': it must be a length of time"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(KvyardError) as error:
        parse_space([text], {"block_size": 64})
    assert words in str(error.value)


def test_a_policy_without_options_has_nothing_to_search() -> None:
    with pytest.raises(KvyardError, match="round-robin has no options to search"):
        parse_space(["router.*"], {"router": "round-robin"})
    with pytest.raises(KvyardError, match="router_options is set"):
        parse_space(["router.*"], {"router_options": "imbalance=3"})


def test_choices_of_a_registry() -> None:
    space = parse_space(["host_eviction=*", "router=*"], {})
    eviction, router = space.dimensions["host_eviction"], space.dimensions["router"]
    assert isinstance(eviction, Choices) and {"lru", "priority"} <= set(eviction.values)
    assert isinstance(router, Choices) and "kv" in router.values and "affinity" not in router.values
