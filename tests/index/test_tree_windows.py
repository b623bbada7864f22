"""Events of an engine that names no groups and has sliding windows: SGLang's, whose tree keeps windows at the ends of runs."""

from __future__ import annotations

from tests.index.support import Bench, removed, stored

from kvyard.blocks.spec import GroupSpec
from kvyard.index import Holder

GROUPS = (GroupSpec(kind="full", block_size=4), GroupSpec(kind="sliding_window", block_size=4, window=8))
"""A window reaches two blocks."""
TEXT = list(range(100, 141))
"""Ten blocks and a token."""


def cached(bench: Bench, tokens: list[int]) -> int:
    return bench.indexer.score(tokens).workers[Holder("a")].tokens


def computed(bench: Bench, tokens: list[int], worker: str = "a") -> None:
    keys = bench.indexer.identity.keys(tokens)
    bench.indexer.computed(Holder(worker), len(tokens), lambda count: keys[-count:])
    bench.indexer.check_integrity()


def test_a_prefix_is_usable_where_a_run_ended() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    assert cached(bench, TEXT) == 40
    assert cached(bench, TEXT[:40]) == 0  # the window before the last block is not whole
    assert cached(bench, TEXT[:24]) == 0


def test_a_prompt_that_fills_its_last_block_has_a_block_more() -> None:
    """The last block of a prompt is never reused, so that the same prompt needs the window before it."""
    bench = Bench(groups=GROUPS)
    computed(bench, TEXT[:40])  # it isn't announced yet
    bench.say(stored(TEXT, 4))
    assert cached(bench, TEXT[:40]) == 0
    computed(bench, TEXT[:40])
    assert cached(bench, TEXT[:40]) == 36
    assert cached(bench, TEXT[:36]) == 0


def test_where_a_run_branches_off_the_window_before_it_is_there() -> None:
    """A request went on from there, or computed the window again and inserted that part first."""
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    other = [*TEXT[:24], *range(4)]
    bench.say(stored(other, 4, 6))
    assert cached(bench, [*other, 7]) == 28
    assert cached(bench, TEXT[:25]) == 24
    assert cached(bench, TEXT[:21]) == 20
    assert cached(bench, TEXT[:17]) == 0


def test_a_run_that_continues_another_adds_nothing_before_it() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    bench.say(stored([*TEXT[:40], *range(8)], 4, 10))
    assert cached(bench, [*TEXT[:40], *range(9)]) == 48
    assert cached(bench, TEXT) == 40
    assert cached(bench, TEXT[:40]) == 0


def test_a_prompt_computed_again_has_its_window_though_nothing_announces_it() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    computed(bench, TEXT[:26], "b")
    computed(bench, [*TEXT[:20], *range(6)])
    assert cached(bench, TEXT[:25]) == 0
    computed(bench, TEXT[:26])
    assert cached(bench, TEXT[:25]) == 24
    assert cached(bench, TEXT[:24]) == 20
    computed(bench, TEXT[:16])
    assert cached(bench, TEXT[:16]) == 12
    assert cached(bench, TEXT[:17]) == 16
    bench.say(removed(TEXT, 4))
    assert cached(bench, TEXT[:25]) == 0
    assert not bench.indexer.dedup.outstanding


def test_a_removal_covers_every_group() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    bench.say(stored([*TEXT[:40], *range(4)], 4, 10))
    bench.say(removed(TEXT, 4, 8))
    assert cached(bench, TEXT) == 0
    bench.say(stored(TEXT, 4, 8))
    assert cached(bench, TEXT) == 40
    bench.say(removed(TEXT, 4))
    assert not bench.indexer.dedup.outstanding
    assert cached(bench, TEXT) == 0


def test_a_worker_whose_groups_are_not_given_is_full_attention() -> None:
    bench = Bench()
    bench.say(stored(TEXT, 4))
    assert cached(bench, TEXT[:24]) == 20
