"""Each published rule in scenes made for it: what decides, and where it stops deciding."""

from __future__ import annotations

import pytest
from tests.router.policies.scene import Scene, pick, policy

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest
from kvyard.router import POLICIES, RouterConfig
from kvyard.router.policies import make_policy


def test_least_loaded_may_compare_a_few_at_random() -> None:
    assert pick("least-loaded", requests=(3, 1, 2)) == 1
    drawn = {
        Scene(requests=(3, 1, 2), seed=seed).choice(policy("least-loaded", {"choices": 2})).slot for seed in range(40)
    }
    assert drawn == {0, 1, 2}  # the busiest where both draws are it
    many = [
        Scene(requests=(3, 1, 2), seed=seed).choice(policy("least-loaded", {"choices": 30})).slot for seed in range(20)
    ]
    assert many == [1] * 20


def test_longest_match_follows_the_cache_and_load_only_among_equals() -> None:
    assert pick("longest-match", cached=(10, 50, 0), prefill=(0, 99999, 0)) == 1
    assert pick("longest-match", cached=(50, 50, 0), prefill=(10, 5, 0)) == 1
    assert pick("longest-match", prefill=(10, 5, 7)) == 1


def test_least_prefill_counts_what_waits_and_what_is_new() -> None:
    # 1600 tokens, 50 blocks of 16 cached: 800 are new there, behind 799 or 801.
    assert pick("least-prefill", cached=(0, 50, 0), prefill=(0, 799, 5000)) == 1
    assert pick("least-prefill", cached=(0, 50, 0), prefill=(0, 801, 5000)) == 0
    assert pick("least-prefill", requests=(3, 2, 2)) == 1


def test_least_prefill_takes_turns_among_equals() -> None:
    one = policy("least-prefill")
    assert [Scene().choice(one).slot for _ in range(4)] == [0, 1, 2, 0]


def test_lmetric_multiplies_work_and_batch() -> None:
    # 1600 * (1 + 1) against 800 * (2 + 1).
    assert pick("lmetric", cached=(0, 50, 0), requests=(1, 2, 9)) == 1
    assert pick("lmetric", cached=(0, 50, 0), requests=(1, 3, 9), prefill=(0, 1, 0)) == 0


def test_sticky_stays_with_the_warm_until_they_are_saturated() -> None:
    warm = {"cached": (0, 80, 79)}  # 1280 of 1600 tokens are four fifths
    room = 15_928 * 18
    assert pick("sticky", **warm, prefill=(0, room, 0)) == 1
    assert pick("sticky", **warm, prefill=(0, room + 1, 5000)) == 0
    assert pick("sticky", {"affinity": 0.9}, **warm, prefill=(0, 5000, 5000)) == 0


def test_the_blend_adds_its_scores() -> None:
    # 3 * 0.5 for the prefix against 2 * 0.8 for the free cache.
    assert pick("llm-d-blend", cached=(50, 0, 0), held=(0, 0, 900)) == 0
    assert pick("llm-d-blend", cached=(50, 0, 0), held=(800, 0, 900)) == 1
    assert pick("llm-d-blend", {"cache": 1.0}, cached=(50, 0, 0), held=(800, 0, 900)) == 0


def test_the_blend_counts_lower_tiers_by_their_credit() -> None:
    scene = {"cached": (0, 30, 0), "host": (50, 0, 0), "held": (0, 0, 900)}
    for credit, chosen in ((0.8, 0), (0.5, 1)):
        blend = make_policy(RouterConfig(policy="llm-d-blend", host_credit=credit))
        assert Scene(**scene).choice(blend).slot == chosen
    # What counts for nothing is a new prompt, and those go round.
    blind = make_policy(RouterConfig(policy="llm-d-blend", host_credit=0.0))
    assert sorted(Scene(host=(50, 0, 0)).choice(blind).slot for _ in range(3)) == [0, 1, 2]


def test_the_blend_gives_new_prompts_to_who_had_none_for_longest() -> None:
    one = policy("llm-d-blend")
    assert sorted(Scene(first_key=at).choice(one).slot for at in range(3)) == [0, 1, 2]


def test_the_blend_reads_metrics_now_and_then() -> None:
    stale = policy("llm-d-blend", {"refresh_ms": 50.0, "no_hit": 0.0})
    idle = Scene(held=(0, 100, 100))
    assert idle.choice(stale).slot == 0
    # What it was given since is in the metrics after the pass that begins next, and not before that has ended.
    busy = {"held": (900, 100, 100), "requests": (1, 0, 0), "prefill": (300, 0, 0)}
    assert Scene(**busy, now=20 * MS).choice(stale).slot == 0
    assert Scene(**busy, now=51 * MS).choice(stale).slot == 0
    assert Scene(**busy, now=349 * MS).choice(stale).slot == 0
    assert Scene(**busy, now=352 * MS).choice(stale).slot != 0


def test_the_blend_may_draw_by_scores() -> None:
    drawn = policy("llm-d-blend", {"weighted": 1, "prefix": 0.0, "queue": 0.0, "no_hit": 0.0})
    scenes = [Scene(held=(1000, 750, 500), seed=seed) for seed in range(300)]
    slots = [scene.choice(drawn).slot for scene in scenes]
    assert 0 not in slots, "it has no free block, and no score"
    assert 70 <= slots.count(1) <= 130, "a third of the scores"


def test_cache_aware_leaves_the_cache_when_loads_are_far_apart() -> None:
    cached = (0, 60, 0)
    assert pick("cache-aware", cached=cached, requests=(10, 74, 20)) == 1
    assert pick("cache-aware", cached=cached, requests=(10, 75, 20)) == 0
    # Far apart, but not by half.
    assert pick("cache-aware", cached=cached, requests=(200, 290, 210)) == 1


def test_cache_aware_fills_the_emptiest_where_matches_are_poor() -> None:
    one = policy("cache-aware")
    assert {Scene(cached=(0, 30, 0), first_key=at).choice(one).slot for at in range(3)} == {0, 1, 2}
    assert Scene(cached=(0, 31, 0)).choice(policy("cache-aware")).why == "match"


def test_prefix_hash_sends_a_prefix_to_one_place_unless_it_is_overloaded() -> None:
    one = policy("prefix-hash")
    home = Scene(first_key=5).choice(one).slot
    assert all(Scene(first_key=5).choice(one).slot == home for _ in range(5))
    assert {Scene(first_key=key).choice(one).slot for key in range(50)} == {0, 1, 2}
    busy = [9 if slot == home else 0 for slot in range(3)]
    assert Scene(first_key=5, requests=busy).choice(one).slot != home


def test_prefix_hash_moves_few_when_a_worker_comes() -> None:
    one = policy("prefix-hash")
    three = {key: Scene(first_key=key).choice(one).slot for key in range(300)}
    four = {
        key: Scene(first_key=key, prefill=[0] * 4, requests=[0] * 4, held=[0] * 4, cached=[0] * 4).choice(one).slot
        for key in three
    }
    moved = [key for key in three if three[key] != four[key]]
    assert moved and all(four[key] == 3 for key in moved) and len(moved) < 150


def test_preble_exploits_a_match_of_more_than_half() -> None:
    one = policy("preble")
    for key in range(4):
        Scene(first_key=key, cached=(0, 60, 0)).choice(one)
    # The holder has all of the window's work by now, and still gets what it has more than half of.
    assert Scene(cached=(0, 51, 0)).choice(one).slot == 1
    assert Scene(cached=(0, 50, 0)).choice(one).slot != 1


def test_preble_forgets_work_that_is_older_than_its_window() -> None:
    one = policy("preble", {"window_s": 10})
    Scene(cached=(60, 0, 0)).choice(one)
    Scene(cached=(0, 0, 60), now=11 * 10**9).choice(one)
    assert Scene(prefill=(0,), requests=(0,), held=(0,), cached=(0,), now=11 * 10**9).choice(one).cost == pytest.approx(
        1600 + 45 * 10
    )


def test_aibrix_takes_the_best_match_that_is_not_too_busy() -> None:
    assert pick("aibrix", cached=(50, 60, 0), requests=(2, 2, 2)) == 1
    # Mean 3, deviation 2.16: 6 is too busy.
    assert pick("aibrix", cached=(50, 60, 0), requests=(2, 6, 1)) == 0
    assert pick("aibrix", cached=(0, 60, 0), requests=(2, 9, 0)) == 2
    assert pick("aibrix", cached=(0, 60, 0), requests=(1, 4, 0)) == 2


def test_aibrix_takes_any_of_equals() -> None:
    assert {Scene(cached=(60, 60, 60), seed=seed).choice(policy("aibrix")).slot for seed in range(40)} == {0, 1, 2}


@pytest.mark.parametrize("name", ["aibrix", "llm-d-blend", "sticky"])
def test_a_router_may_go_by_what_it_routed(name: str) -> None:
    assert policy(name).needs_index and policy(name).memory is None
    one = policy(name, {"approximate": 1})
    assert not one.needs_index and one.memory is not None


def test_dualmap_chooses_between_two_and_keeps_to_the_cache_within_its_promise() -> None:
    eight = {"prefill": [0] * 8, "requests": [0] * 8, "held": [0] * 8}
    seen = {Scene(first_key=3, cached=[0] * 8, **eight, seed=seed).choice(policy("dualmap")).slot for seed in range(40)}
    assert len(seen) == 2
    first, second = seen
    cached = [40 if slot == first else 0 for slot in range(8)]
    busy = {**eight, "prefill": [1000 if slot == first else 0 for slot in range(8)]}
    assert Scene(first_key=3, cached=cached, **busy).choice(policy("dualmap")).slot == first  # 1960 ms
    assert Scene(first_key=3, cached=cached, **busy).choice(policy("dualmap", {"slo_ms": 1900})).slot == second


def test_dualmap_has_two_workers_though_both_hashes_lead_to_one() -> None:
    for key in range(20):
        assert pick("dualmap", first_key=key, cached=(0, 40), prefill=(0, 0), requests=(0, 0), held=(0, 0)) == 1


def test_load_aware_weighs_the_match_against_the_mean() -> None:
    # Mean 2: 0.5 - 1 / 2 = 0 for the holder, 0.5 for the idle one.
    assert pick("load-aware", cached=(50, 0, 0), requests=(3, 2, 1)) == 2
    assert pick("load-aware", {"beta": 0.4}, cached=(50, 0, 0), requests=(3, 2, 1)) == 0


def test_ray_goes_by_the_match_only_while_queues_are_even() -> None:
    assert pick("ray-prefix", cached=(0, 10, 0), requests=(0, 10, 5)) == 1
    assert pick("ray-prefix", cached=(0, 9, 0), requests=(0, 10, 5)) in (0, 1, 2)
    chosen = [pick("ray-prefix", cached=(0, 90, 0), requests=(0, 11, 5), seed=seed) for seed in range(20)]
    assert set(chosen) == {0, 2}  # of two by chance the shorter, and never the longest


def test_conductor_adds_queue_and_prefill() -> None:
    assert pick("conductor", cached=(0, 50, 0), prefill=(100, 850, 5000)) == 1
    assert pick("conductor", cached=(0, 50, 0), prefill=(0, 850, 5000)) == 0


def test_conductor_counts_a_transfer_instead_of_the_prefill_where_workers_pull() -> None:
    scene = {"cached": (0, 50, 0), "prefill": (0, 700, 5000)}
    one = policy("conductor")
    # 800 tokens more to compute here, against 700 that wait there.
    assert Scene(**scene).choice(one).slot == 1
    whole = Scene(**scene).costs(one)
    one.pull_ms = lambda tokens: 3.0 if tokens >= 800 else None
    assert Scene(**scene).choice(one).slot == 0
    costs = Scene(**scene).costs(one)
    pace = Scene(**scene).routing.workers[0].pace
    assert costs[1] == whole[1] and costs[0] == pytest.approx(3.0 + pace.prefill(800))
    one.pull_ms = lambda tokens: None
    assert Scene(**scene).costs(one) == whole
    other = policy("conductor", {"balancing": 3.0})
    other.pull_ms = lambda tokens: 3.0
    some = {"cached": (20, 50, 0), "prefill": (0, 0, 0)}
    plain = Scene(**some).costs(policy("conductor"))
    assert Scene(**some).costs(other)[:2] == plain[:2], "50 blocks are less than three times 20"


@pytest.mark.parametrize("name", [name for name in POLICIES.names() if name != "approx"])
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(KvyardError, match="unknown option 'nope' of the routing policy"):
        make_policy(RouterConfig(policy=name, options={"nope": 1.0}))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_figures_that_make_no_sense_are_refused(value: float) -> None:
    for name in ("preble", "dualmap", "least-time", "load-aware"):
        option = next(iter(POLICIES.get(name).OPTIONS))  # type: ignore[attr-defined]
        with pytest.raises(KvyardError, match=f"{option} of the routing policy {name} must be at least 0, got"):
            make_policy(RouterConfig(policy=name, options={option: value}))


@pytest.mark.parametrize("name", ["lmetric", "conductor", "load-aware", "least-prefill", "least-time"])
def test_a_choice_costs_what_its_own_measure_says(name: str) -> None:
    scene = Scene(cached=(0, 50, 20), prefill=(0, 799, 5000), requests=(1, 2, 0))
    one = policy(name)
    choice = one.choose(scene.routing)
    assert scene.costs(one)[choice.slot] == choice.cost


def test_a_worker_that_is_gone_leaves_nothing_behind() -> None:
    for name in ("cache-aware", "ray-prefix", "preble", "llm-d-blend"):
        one, fresh = policy(name), policy(name)
        for key in range(6):
            Scene(first_key=key).choice(one)
        for slot in range(3):
            one.gone(slot)
        assert Scene(first_key=9).choice(one) == Scene(first_key=9).choice(fresh), name


@pytest.mark.parametrize(
    ("router", "options", "together"), [("llm-d-blend", {"refresh_ms": 50.0}, True), ("kv", {}, False)]
)
def test_the_blend_counts_what_it_sent_for_hybrid_models_too(
    router: str, options: dict[str, float], together: bool
) -> None:
    """llm-d's index knows no groups, so a shared prefix draws a burst to one worker; kv waits for events of all groups."""
    rows = [
        TraceRequest(str(number), 0, 2560, 2, (*range(40), *range(1000 * number, 1000 * number + 120)), 16)
        for number in range(1, 5)
    ]
    settings = {"model": "gpt-oss-120b", "gpu": "h200", "block_size": 64, "workers": 4, "router": router}
    done = replay(rows, **settings, router_options=options)
    assert (len({record.worker for record in done.records}) == 1) is together
