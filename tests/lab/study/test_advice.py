"""Decisions of the adviser: the cheapest that keeps limits, nearly the lowest TTFT, the least behind, better and worse."""

from __future__ import annotations

from msgspec.structs import replace

from kvyard.lab.study.advice import (
    AdviceOption,
    answer,
    at_edges,
    choose,
    compared,
    front,
    least_behind,
    lowest_ttft,
    middle,
)
from kvyard.lab.study.cost import FleetSize, Prices, currency_of, fleet_size, foresees
from kvyard.replay.report.metrics import COST, METRICS
from kvyard.replay.report.slo import Limit, violation
from kvyard.replay.settings import make_config

GIB = 1 << 30
TTFT, ITL = METRICS["ttft_mean"], METRICS["itl_p99"]
LIMIT = Limit("ttft_mean", 500.0)


def fleet(workers: int, ttft: float, limits: tuple[Limit, ...] = (), **more: float) -> AdviceOption:
    values = {"ttft_mean": ttft, **more}
    return AdviceOption(f"workers={workers}", values, FleetSize(workers, 100 * workers, ()), violation(values, limits))


def test_a_fleet_is_described_by_its_parts() -> None:
    settings = {"workers": 4, "num_gpu_blocks": 1000, "host_bytes": "2GiB", "block_size": 64}
    assert fleet_size(make_config(settings))[:2] == (4, 4000)
    assert sum(fleet_size(make_config(settings)).lower) == 8 * GIB
    assert sum(fleet_size(make_config({**settings, "host_scope": "shared"})).lower) == 2 * GIB
    assert fleet_size(make_config({"workers": 3, "num_gpu_blocks": 10})) < fleet_size(
        make_config({"workers": 4, "num_gpu_blocks": 1})
    )
    assert str(fleet_size(make_config(settings))) == "4 workers, 4,000 device blocks and 8.0 GiB of host memory in all"


def test_a_replay_by_belady_foresees() -> None:
    assert foresees(make_config({"eviction": "belady"})) and not foresees(make_config({"eviction": "slru"}))


def test_the_cheapest_that_is_nearly_as_good() -> None:
    said = lowest_ttft([fleet(2, 900.0), fleet(4, 410.0), fleet(8, 400.0), fleet(16, 500.0)])
    assert said.choice == "workers=4"
    assert "workers=8 has the lowest mean TTFT, 400.0 ms" in said.sentences[0] and "410.0 ms" in said.sentences[0]
    best = lowest_ttft([fleet(2, 400.0), fleet(4, 430.0)])
    assert best.choice == "workers=2" and "none within 5% of it is cheaper" in best.sentences[0]
    assert not lowest_ttft([]).choice


def test_what_is_as_good_at_the_same_cost_is_named() -> None:
    said = lowest_ttft([fleet(2, 400.0), replace(fleet(2, 403.0), name="lru"), replace(fleet(2, 410.0), name="lfu")])
    assert "There is little to choose: at the same cost, lru is within 1% of it." in said.sentences


def test_a_choice_that_rejects_requests_says_so() -> None:
    few, many = (lowest_ttft([fleet(2, 400.0, rejected_share=share)]) for share in (0.01, 0.065))
    assert len(few.sentences) == 1
    assert (
        many.sentences[-1].startswith("But 6.50% of the requests are rejected") and "--max-tokens" in many.sentences[-1]
    )


def test_the_cheapest_that_keeps_the_limits() -> None:
    fleets = [fleet(count, ttft, (LIMIT,)) for count, ttft in ((2, 900.0), (4, 410.0), (8, 300.0))]
    said = answer(fleets, [COST], [LIMIT], str(LIMIT))
    assert said.choice == "workers=4" and "2 of 3 points keep ttft_mean ≤ 500 ms" in said.sentences[0]
    assert "4 workers and 400 device blocks in all" in said.sentences[0]
    none = answer(fleets[:1], [COST], [LIMIT], str(LIMIT), count=7)
    assert not none.choice and "No point of 7 meets the SLO" in none.sentences[0]
    assert "closest is workers=2: TTFT mean is 900.0 ms (limit 500 ms)" in none.sentences[0]
    assert answer([], [COST], [LIMIT], "").sentences == []


def test_a_cost_has_its_currency_where_that_is_known() -> None:
    own, listed = Prices(card=9.0), Prices()
    assert (currency_of(own, None), currency_of(listed, None)) == ("", "USD")
    for currency, said in (("USD", "cost 4.70 USD an hour"), ("", "cost 4.70 an hour")):
        known = AdviceOption("a", {"ttft_mean": 400.0}, 4.7, currency=currency)
        assert said in answer([known], [COST], [LIMIT], "ttft_mean < 500 ms").sentences[0]


def test_too_many_rejected_keep_nothing() -> None:
    greedy = fleet(2, 100.0, (LIMIT,), rejected_share=0.02)
    assert choose([greedy, fleet(4, 200.0, (LIMIT,))], [COST])[0].name == "workers=4"
    assert "rejected" in answer([greedy], [COST], [LIMIT], str(LIMIT)).sentences[0]


def test_several_goals_have_a_front_and_a_middle() -> None:
    fleets = [
        AdviceOption(str(cost), {"ttft_mean": ttft}, cost)
        for cost, ttft in ((1.0, 9.0), (2.0, 3.0), (3.0, 2.0), (4.0, 5.0))
    ]
    assert [one.name for one in front(fleets, [COST, TTFT])] == ["1.0", "2.0", "3.0"]
    assert middle(choose(fleets, [COST, TTFT]), [COST, TTFT]).name == "2.0"
    said = answer(fleets, [COST, TTFT], [], "")
    assert said.choice == "2.0" and "3 of 4 points are on the Pareto front" in said.sentences[0]


def test_a_goal_that_is_to_be_large() -> None:
    reuse = METRICS["reuse"]
    fleets = [AdviceOption("a", {"reuse": 0.2}, 1.0), AdviceOption("b", {"reuse": 0.4}, 2.0)]
    assert choose(fleets, [reuse])[0].name == "b"


def test_edges() -> None:
    assert at_edges({"workers=8": "high", "x 2": "low"}) == [
        "workers=8 is at the high end of its range: look above it too.",
        "x 2 is at the low end of its range: look below it too.",
    ]


def policies(**values: tuple[float, float]) -> list[AdviceOption]:
    found = [AdviceOption(name, {"ttft_mean": ttft, "itl_p99": itl}) for name, (ttft, itl) in values.items()]
    return sorted(found, key=lambda one: one.values["ttft_mean"] or 0.0)


def test_one_group_of_policies() -> None:
    said = least_behind({"a": policies(kv=(276.0, 11.5), mine=(237.0, 12.2), rr=(321.0, 13.4))})
    assert said.choice == "mine"
    assert "237.0 ms; next is kv with 276.0 ms" in said.sentences[0]
    assert "12.20 ms, where kv has 11.50 ms" in said.sentences[1]
    assert "costs nothing" in least_behind({"a": policies(kv=(276.0, 11.5), rr=(321.0, 13.4))}).sentences[1]
    assert "Only kv was run" in least_behind({"a": policies(kv=(276.0, 11.5))}).sentences[0]
    assert "choose by the rest" in least_behind({"a": policies(kv=(276.0, 11.5), rr=(276.0, 13.4))}).sentences[0]


def test_several_groups_of_policies() -> None:
    one, two = policies(kv=(276.0, 11.5), mine=(237.0, 12.2)), policies(kv=(300.0, 20.0), mine=(306.0, 18.0))
    said = least_behind({"a": one, "b": two})
    assert said.choice == "mine" and "1.0% above the lowest on average, and 2.0% at worst (b)" in said.sentences[0]
    assert "lowest mean TTFT at both loads" in least_behind({"a": one, "b": one}).sentences[0]
    only_here = policies(kv=(276.0, 11.5), mine=(237.0, 12.2), new=(1.0, 1.0))
    assert least_behind({"a": only_here, "b": two}).choice == "mine", "a policy counts that has run everywhere"
    assert not least_behind({}).choice


def run(name: str, **values: float) -> AdviceOption:
    return AdviceOption(name, values)


def test_better_and_worse_than_the_first() -> None:
    old, new = run("old", ttft_mean=100.0, itl_mean=10.0), run("new", ttft_mean=50.0, itl_mean=10.0)
    mixed = run("third", ttft_mean=80.0, itl_mean=11.0)
    said = compared([old, new]).sentences
    assert said == ["new is better than old in TTFT mean (50.00 ms, -50.0%), and worse in nothing."]
    assert "old is worse than new in TTFT mean" in compared([new, old]).sentences[0]
    assert "within 0.5% of each other" in compared([old, run("b", ttft_mean=100.4, itl_mean=10.0)]).sentences[0]
    three = compared([old, new, mixed])
    assert three.choice == "new" and three.sentences == [
        "TTFT mean: best new 50.00 ms (-50.0%), next third 80.00 ms (-20.0%); worst old 100.0 ms.",
        "ITL mean: best old 10.00 ms, next new 10.00 ms (±0%); worst third 11.00 ms (+10.0%).",
    ]
    alike = compared([old, run("b", ttft_mean=100.4, itl_mean=10.0), run("c", ttft_mean=100.2, itl_mean=10.0)])
    assert alike.sentences[0] == "TTFT mean: all are within 0.5% of 100.0 ms." and not alike.choice
