"""The search, on fleets whose violation is known by a formula: it finds the cheapest, and replays few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil

import numpy as np
import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.lab.plan.search import FROM_HOST, FleetOption, FleetSearch
from kvyard.lab.plan.shape import HOST_GIB, Alone, Shape, shapes
from kvyard.lab.plan.traffic import Traffic
from kvyard.lab.study.cost import Prices
from kvyard.replay import replay
from kvyard.replay.report.slo import Limit
from kvyard.replay.settings import make_config

MODEL = {"model": "llama-3.1-8b"}
PRICES = {"h100": Prices(card=2.0, host=0.004), "h200": Prices(card=3.0, host=0.004)}
TRAFFIC = Traffic(np.array([100]), np.array([10]), np.array([100]), 100.0)
LIMITS = [Limit("ttft_p99", 1000.0)]
REPORT = replay(CONVERSATION, limit=2, workers=1).report
"""Of another fleet: the search reads violations alone."""


def violation(needs: dict[str, float], fleet: FleetOption) -> float:
    """Each gpu needs so many cards; more tensor parallelism wastes some, host memory and an FP8 cache help a little."""
    shape = fleet.shape
    need = needs[shape.gpu] * (1 + 0.1 * np.log2(shape.tensor_parallel_size))
    need *= 0.92 if shape.kv_cache_dtype == "fp8" else 1.0
    need *= 1 - 0.2 * min(1.0, shape.host_gib / 100)
    need *= 1.3 if fleet.prefill else 1.0
    return max(0.0, need / fleet.cards - 1)


def search(needs: dict[str, float], guess: float, monkeypatch: pytest.MonkeyPatch) -> FleetSearch:
    """A search whose estimates are wrong by the factor ``guess``."""

    def replay(fleets: Sequence[FleetOption]) -> None:
        for fleet in fleets:
            fleet.report, fleet.violation = REPORT, violation(needs, fleet)
            fleet.values = {"ttft_p99": 1000.0 * (1 + fleet.violation), "ttft_mean": 1.0}

    def at_best(shape: Shape, *_: object) -> Alone:
        engine = make_config({**MODEL, **shape.settings(), "workers": 1}).workers[0].engine
        busy = 100.0 * guess * needs[shape.gpu] / shape.tensor_parallel_size
        return Alone(engine, [1.0], 1.0, busy / 2, busy / 2)

    monkeypatch.setattr("kvyard.lab.plan.search.alone", at_best)
    return FleetSearch(MODEL, TRAFFIC, LIMITS, PRICES, replay)


def cheapest(needs: dict[str, float], found: FleetSearch) -> float:
    """Every combination, the slow way."""
    costs = []
    for gpu, degree, dtype, host in product(needs, (1, 2, 4, 8), ("auto", "fp8"), HOST_GIB):
        shape = Shape(gpu, degree, dtype, host)
        workers = next(n for n in range(1, 500) if violation(needs, found.fleet(shape, n)) <= 0)
        costs.append(found.fleet(shape, workers).cost)
    return float(min(costs))


@pytest.mark.parametrize("guess", [0.3, 0.8, 1.0, 1.6])
@pytest.mark.parametrize(
    "needs", [{"h100": 3.0, "h200": 2.5}, {"h100": 19.0, "h200": 9.0}, {"h100": 90.0, "h200": 70.0}]
)
def test_the_search_finds_the_cheapest_fleet(
    needs: dict[str, float], guess: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(needs, guess, monkeypatch)
    found.run(shapes(list(needs), None))
    best = found.best
    assert best is not None and best.met
    assert best.cost <= 1.05 * cheapest(needs, found)
    assert len(found.fleets) <= 60
    assert len({fleet.name for fleet in found.fleets}) == len(found.fleets), "a fleet was replayed twice"


def test_several_at_a_time_find_as_good_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"h100": 19.0, "h200": 9.0}
    found = search(needs, 1.0, monkeypatch)
    found.jobs = 4
    found.run(shapes(list(needs), None))
    assert found.best is not None and found.best.cost <= 1.05 * cheapest(needs, found)


def test_a_search_that_more_workers_do_not_help_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(fleets: Sequence[FleetOption]) -> None:
        for fleet in fleets:
            fleet.report, fleet.violation = REPORT, 0.5
            fleet.values = {"ttft_p99": 1500.0}

    found = search({"h100": 8.0}, 1.0, monkeypatch)
    found.replay = never
    found.run([Shape("h100", 2)])
    assert found.best is None
    assert len(found.fleets) <= 10


def split_search(
    prefill: dict[Shape, float], decode: dict[Shape, float], share: float, monkeypatch: pytest.MonkeyPatch
) -> FleetSearch:
    """A search where each shape needs so many workers of each role, whole fleets make everyone wait for prompts, and ``share``
    is the estimated share of prefill.
    """

    def replay(fleets: Sequence[FleetOption]) -> None:
        for fleet in fleets:
            plain = Shape(fleet.shape.gpu, fleet.shape.tensor_parallel_size)
            need = decode[plain] * (0.7 if fleet.shape.kv_cache_dtype == "fp8" else 1.0)
            first = 1000.0 * prefill[plain] / (fleet.prefill or fleet.workers)
            gap = 50.0 * need / (fleet.workers - fleet.prefill) if fleet.prefill else 80.0
            fleet.report, fleet.violation = REPORT, sum(max(0.0, miss) for miss in (first / 1000 - 1, gap / 50 - 1))
            fleet.values = {"ttft_p99": first, "itl_p99": gap, "ttft_mean": 1.0}

    def at_best(shape: Shape, *_: object) -> Alone:
        engine = make_config({**MODEL, **shape.settings(), "workers": 1}).workers[0].engine
        plain = Shape(shape.gpu, shape.tensor_parallel_size)
        busy = 80.0 * (prefill[plain] + decode[plain])
        return Alone(engine, [1.0], 1.0, busy * share, busy * (1 - share))

    monkeypatch.setattr("kvyard.lab.plan.search.alone", at_best)
    limits = [Limit("ttft_p99", 1000.0), Limit("itl_p99", 50.0)]
    return FleetSearch(MODEL, TRAFFIC, limits, PRICES, replay)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.65, 0.9])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((6.2, 3.6, 2.4), (3.8, 1.5, 0.9)), ((2.5, 1.9, 1.2), (9.3, 5.6, 3.4)), ((24, 13, 7), (11, 5, 2))],
)
def test_the_cheapest_split_is_found_among_all_shapes_and_ratios(
    prefill: tuple[float, ...], decode: tuple[float, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the estimated ratio is: each replay that misses the SLO shows which role lacks workers."""
    plain = shapes(["h100"])[: len(prefill)]
    found = split_search(
        dict(zip(plain, prefill, strict=True)), dict(zip(plain, decode, strict=True)), share, monkeypatch
    )
    found.run(plain)
    best = found.best
    assert best is not None and best.prefill

    def price(shape: Shape, first: float, later: float) -> float:
        return found.price(shape, ceil(first) + ceil(later))

    least = min(
        price(shape, first, later * factor)
        for shape, first, later in zip(plain, prefill, decode, strict=True)
        for factor in (1.0, 0.7)
    )
    assert best.cost <= 1.04 * least  # numbers of workers so close together count as equal
    assert len(found.fleets) <= 50
    assert len({fleet.name for fleet in found.fleets}) == len(found.fleets), "a fleet was replayed twice"


def test_splits_are_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape("h100")
    found = split_search({shape: 3.0}, {shape: 2.0}, 0.5, monkeypatch)
    found.split = False
    found.run([shape])
    assert found.best is None and not any(fleet.prefill for fleet in found.fleets)


@pytest.mark.parametrize(("slow", "more"), [("ttft_p99", True), ("itl_p99", False)])
def test_roles_shift_to_what_is_too_slow(slow: str, more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search({"h100": 8.0}, 1.0, monkeypatch)
    found.limits = [Limit("ttft_p99", 1000.0), Limit("itl_p99", 50.0)]
    found._possible(Shape("h100"))
    steps = found.fewest_split(Shape("h100"))
    first = next(steps)
    first.report, first.violation = REPORT, 0.3
    first.values = {"ttft_p99": 900.0, "itl_p99": 40.0, slow: 1300.0}
    second = steps.send(first)
    assert second.workers == first.workers
    assert second.prefill > first.prefill if more else second.prefill < first.prefill


def test_a_shape_that_only_an_8_bit_cache_makes_good_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(fleets: Sequence[FleetOption]) -> None:
        for fleet in fleets:
            smaller = fleet.shape.gpu == "h200" and fleet.shape.kv_cache_dtype == "fp8"
            need = 4 if smaller else 6 if fleet.shape.gpu == "h100" else 100
            fleet.report, fleet.violation = REPORT, max(0.0, need / fleet.cards - 1)
            fleet.values = {"ttft_p99": 1000.0 * (1 + fleet.violation), "ttft_mean": 1.0}

    found = search({"h100": 6.0, "h200": 4.0}, 1.0, monkeypatch)
    found.prices = {"h100": Prices(card=2.35), "h200": Prices(card=3.14)}
    found.replay = replay
    found.run(shapes(["h100", "h200"], None))
    assert found.best is not None and found.best.cost == pytest.approx(4 * 3.14)
    assert found.best.shape.kv_cache_dtype == "fp8"


def test_host_memory_that_nothing_is_read_from_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(fleets: Sequence[FleetOption], read: float = 0.0) -> None:
        for fleet in fleets:
            host = fleet.shape.host_gib
            ms = 1004.0 if fleet.cards == 5 else 900.0 if fleet.cards > 5 else 2000.0
            ms -= 8.0 if host >= 32 else 0.0
            fleet.report, fleet.violation = REPORT, max(0.0, ms / 1000 - 1)
            fleet.values = {"ttft_p99": ms, "ttft_mean": 1.0, FROM_HOST: read if host else None}

    found = search({"h100": 6.0}, 1.0, monkeypatch)
    found.replay = replay
    found.run([Shape("h100")])
    unread = [fleet for fleet in found.fleets if fleet.host_unread]
    assert unread and any(fleet.met and fleet.cards == 5 for fleet in unread), "it would have been the answer"
    assert found.best is not None and (found.best.cards, found.best.shape.host_gib) == (6, 0)
    assert {ruled.shape for ruled in found.ruled_out} == {fleet.shape for fleet in unread}
    assert all("from host memory" in ruled.why for ruled in found.ruled_out)

    found = search({"h100": 6.0}, 1.0, monkeypatch)
    found.replay = lambda fleets: replay(fleets, 0.1)
    found.run([Shape("h100")])
    assert found.best is not None and (found.best.cards, found.best.shape.host_gib) == (5, 32)


def test_a_smaller_cache_is_found_where_its_host_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(fleets: Sequence[FleetOption]) -> None:
        for fleet in fleets:
            need = 4 if fleet.shape.kv_cache_dtype == "fp8" else 6
            fleet.report, fleet.violation = REPORT, max(0.0, need / fleet.cards - 1)
            host = 0.0 if fleet.shape.host_gib else None
            fleet.values = {"ttft_p99": 1000.0 * (1 + fleet.violation), "ttft_mean": 1.0, FROM_HOST: host}

    found = search({"h100": 6.0}, 1.0, monkeypatch)
    found.replay = replay
    found.run([Shape("h100")])
    assert found.best is not None and found.best.shape == Shape("h100", 1, "fp8") and found.best.cards == 4
    assert len({fleet.name for fleet in found.fleets}) == len(found.fleets), "a fleet was replayed twice"
