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


def test_a_prefix_is_usable_where_a_run_ended() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    assert cached(bench, TEXT) == 40
    assert cached(bench, TEXT[:40]) == 36  # the last block of a prompt is never reused
    assert cached(bench, TEXT[:24]) == 0  # its window was freed
    bench.say(stored([*TEXT[:24], *range(20)], 4, 6))
    assert cached(bench, [*TEXT[:24], *range(20), 7]) == 44
    assert cached(bench, TEXT) == 40


def test_a_prompt_computed_again_has_its_window_though_nothing_announces_it() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    keys = bench.indexer.identity.keys(TEXT[:24])
    assert cached(bench, TEXT[:25]) == 0
    bench.indexer.computed(Holder("b"), lambda count: keys[-count:])
    bench.indexer.computed(Holder("a"), lambda count: bench.indexer.identity.keys([*TEXT[:20], *range(4)])[-count:])
    assert cached(bench, TEXT[:25]) == 0
    bench.indexer.computed(Holder("a"), lambda count: keys[-count:])
    bench.indexer.check_integrity()
    assert cached(bench, TEXT[:25]) == 24
    bench.say(removed(TEXT, 4))
    assert cached(bench, TEXT[:25]) == 0
    assert not bench.indexer.dedup.outstanding


def test_a_short_run_has_the_window_of_what_it_continues() -> None:
    bench = Bench(groups=GROUPS)
    bench.say(stored(TEXT, 4))
    other = [*TEXT[:24], *range(4)]
    bench.say(stored(other, 4, 6))
    # The request that computed the last block had the window before it, too: from there it can be continued.
    assert cached(bench, [*other, 7]) == 28
    assert cached(bench, TEXT[:25]) == 24
    assert cached(bench, TEXT[:21]) == 0


def test_what_is_removed_is_gone_from_every_group() -> None:
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
