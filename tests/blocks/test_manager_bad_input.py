"""What makes no sense is refused with one clear sentence, and nothing has changed afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.blocks.support import FULL, WINDOW, XXH3, cache, make, run, snapshot

from kvyard.blocks import BlockManager, ConfigError, GroupSpec, Hints, Request, RequestError, Retention
from kvyard.blocks.extent import Extent
from kvyard.errors import KvyardError
from kvyard.hashing import TokenChain, TraceChain


def spec(kind: str = "full", **fields: Any) -> GroupSpec:
    return GroupSpec(kind=kind, **{"block_size": 4, **fields})


# -- configurations ---------------------------------------------------------------------------------------------------

CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("no groups", {"groups": []}, "at least one group is needed"),
    (
        "unknown kind",
        {"groups": [FULL, spec("linear")]},
        "group 1: unknown kind 'linear': choose one of full, mla, sliding_window, sliding_window_mla, chunked_local, ",
    ),
    ("block size 0", {"groups": [spec(block_size=0)]}, "group 0: block_size must be at least 1, got 0"),
    ("block size negative", {"groups": [spec(block_size=-4)]}, "group 0: block_size must be at least 1, got -4"),
    (
        "window missing",
        {"groups": [spec("sliding_window")]},
        "group 0: a sliding_window group needs a window of at least 1 token, got None",
    ),
    (
        "window 0",
        {"groups": [FULL, spec("sliding_window_mla", window=0)]},
        "group 1: a sliding_window_mla group needs a window of at least 1 token, got 0",
    ),
    (
        "chunk missing",
        {"groups": [spec("chunked_local")]},
        "group 0: a chunked_local group needs a chunk of at least 1 token, got None",
    ),
    (
        "chunk negative",
        {"groups": [spec("chunked_local", chunk=-8)]},
        "group 0: a chunked_local group needs a chunk of at least 1 token, got -8",
    ),
    (
        "unknown mode",
        {"groups": [spec("mamba", mode="some")]},
        "group 0: unknown state mode 'some': choose one of none, all, align",
    ),
    (
        "a window for full attention",
        {"groups": [spec(window=8)]},
        "group 0: a full group has no window; leave it out or choose sliding_window",
    ),
    (
        "a chunk for a window",
        {"groups": [FULL, spec("sliding_window", window=8, chunk=8)]},
        "group 1: a sliding_window group has no chunk; leave it out or choose chunked_local",
    ),
    (
        "speculative blocks without states",
        {"groups": [spec(spec_blocks=2)]},
        "group 0: a full group has no spec_blocks",
    ),
    (
        "checkpoints of states that are all kept",
        {"groups": [spec(), spec("mamba", mode="all", checkpoint_unit=16)]},
        "group 1: checkpoint_unit must be at least 1, and is for mode align alone",
    ),
    (
        "nothing to cache",
        {"groups": [spec("ring"), spec("sliding_window", window=64, cached=False)]},
        "at least one group is needed that can be cached",
    ),
    ("spec blocks", {"groups": [spec("mamba", spec_blocks=-1)]}, "group 0: spec_blocks must not be negative, got -1"),
    (
        "hash size that doesn't divide",
        {"groups": [spec(block_size=8), spec(block_size=12)], "hash_block_size": 8},
        "every block size ([8, 12]) must be a multiple of hash_block_size 8",
    ),
    (
        "hash size 0",
        {"groups": [FULL, WINDOW], "hash_block_size": 0},
        "block sizes must be at least 1, got hash 0 and scheduler 4",
    ),
    (
        "scheduler size negative",
        {"groups": [FULL, WINDOW], "scheduler_block_size": -4},
        "block sizes must be at least 1, got hash 4 and scheduler -4",
    ),
    (
        "scheduler size that doesn't align",
        {"groups": [spec(block_size=8), spec(block_size=12)], "scheduler_block_size": 16},
        "scheduler_block_size 16 must be a multiple of every block size ([8, 12], hash 4)",
    ),
    (
        "hash size with one group",
        {"groups": [spec(block_size=8)], "hash_block_size": 4},
        "one group caches whole blocks: hash_block_size 4 must equal its block_size 8",
    ),
    (
        "chunks next to other block sizes",
        {"groups": [spec(block_size=8), spec("chunked_local", chunk=16)]},
        "chunked_local groups need one block size for all groups",
    ),
    (
        "cached cross attention",
        {"groups": [FULL, spec("cross")]},
        "a cross group can't be cached: switch caching off",
    ),
    (
        "chunks and drafts",
        {"groups": [FULL, spec("chunked_local", chunk=8)], "use_eagle": True},
        "chunked_local groups can't be cached next to a draft head: switch one of the two off",
    ),
    (
        "chunks and drafts of one group",
        {"groups": [spec(eagle=True), spec("chunked_local", chunk=8)]},
        "chunked_local groups can't be cached next to a draft head: switch one of the two off",
    ),
    (
        "retention without anything sparse",
        {"groups": [FULL], "retention_interval": 16},
        "there is no sliding-window or Mamba group for retention_interval: use 0",
    ),
    (
        "retention that doesn't align",
        {"groups": [spec(block_size=8), spec("sliding_window", window=8)], "retention_interval": 12},
        "retention_interval must be a non-negative multiple of scheduler_block_size 8, got 12",
    ),
    (
        "negative retention",
        {"groups": [FULL, WINDOW], "retention_interval": -4},
        "retention_interval must be a non-negative multiple of scheduler_block_size 4, got -4",
    ),
    ("watermark 1", {"watermark": 1.0}, "watermark is a share of the pool, from 0 to below 1, got 1.0"),
    ("watermark negative", {"watermark": -0.1}, "watermark is a share of the pool, from 0 to below 1, got -0.1"),
    ("watermark nan", {"watermark": math.nan}, "watermark is a share of the pool, from 0 to below 1, got nan"),
    ("model length", {"max_model_len": -1}, "max_model_len must not be negative, got -1"),
    ("in flight", {"max_in_flight_tokens": -1}, "max_in_flight_tokens must not be negative, got -1"),
    ("prefill lookahead", {"num_prefill_lookahead": -2}, "num_prefill_lookahead must not be negative, got -2"),
    (
        "prefill lookahead beyond a block",
        {"use_eagle": True, "num_prefill_lookahead": 5},
        "num_prefill_lookahead 5 must not exceed the scheduler's block size 4",
    ),
    ("no blocks", {"num_blocks": 0}, "a pool needs at least the null block, got num_blocks=0"),
    ("negative blocks", {"num_blocks": -7}, "a pool needs at least the null block, got num_blocks=-7"),
    (
        "eviction",
        {"eviction": "random"},
        "unknown eviction policy 'random': choose one of belady, hits-per-token, lfu, lru",
    ),
]


@pytest.mark.parametrize(("options", "message"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_a_configuration_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BlockManager(**{"num_blocks": 20, "groups": [FULL], **options})
    assert message in str(refused.value)
    assert isinstance(refused.value, KvyardError)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 1},
        {"groups": [FULL, spec("cross")], "caching": False},
        {"groups": [spec(block_size=8), spec("chunked_local", chunk=16)], "caching": False},
        {"groups": [spec(block_size=8)], "hash_block_size": 4, "caching": False},
        {"groups": [FULL], "retention_interval": 0},
        {"groups": [FULL, WINDOW], "retention_interval": 8},
        {"groups": [spec(block_size=8), spec(block_size=12)], "scheduler_block_size": 48},
        {"groups": [spec("mamba", mode="none")], "caching": False},
        {"max_model_len": 0},
        {"use_eagle": True, "num_prefill_lookahead": 4},
    ],
    ids=str,
)
def test_a_configuration_that_can(options: dict[str, Any]) -> None:
    """The neighbours of what is refused: refusing too much would be as wrong."""
    BlockManager(**{"num_blocks": 20, "groups": [FULL], **options}).check_integrity()


# -- calls ------------------------------------------------------------------------------------------------------------


class Stage:
    """A manager in the middle of its work: something cached, one request that runs, one that waits."""

    def __init__(self, groups: list[GroupSpec]) -> None:
        self.manager = BlockManager(40, groups)
        cache(self.manager, "gone", range(16))
        self.running = make(self.manager, "running", [*range(8), *range(100, 110)])
        assert run(self.manager, self.running, 6)
        self.waiting = make(self.manager, "waiting", [*range(16), 1, 2, 3])
        self.hit = self.manager.lookup(self.waiting)
        assert self.hit.tokens == 16

    def refuses(self, call: Callable[[], object], message: str, error: type[Exception] = RequestError) -> None:
        before = snapshot(self.manager, self.running, self.waiting)
        with pytest.raises(error) as refused:
            call()
        assert message in str(refused.value)
        assert snapshot(self.manager, self.running, self.waiting) == before
        self.manager.check_integrity()
        assert run(self.manager, self.running, 1), "and life goes on"


@pytest.fixture(params=[[FULL], [FULL, WINDOW]], ids=["one-group", "two-groups"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


@pytest.mark.parametrize(
    "counts",
    [{"num_new_tokens": -1}, {"external": -4}, {"lookahead": -1}, {"encoder": -1}, {"reserved": -2}],
    ids=lambda counts: next(iter(counts)),
)
@pytest.mark.parametrize("who", ["waiting", "running"])
def test_negative_counts(stage: Stage, counts: dict[str, int], who: str) -> None:
    request: Request = getattr(stage, who)
    hit = stage.hit if who == "waiting" else None
    stage.refuses(
        lambda: stage.manager.allocate(request, **{"num_new_tokens": 1, "hit": hit, **counts}),
        f"request {who}: token and block counts must not be negative",
    )


@pytest.mark.parametrize("who", ["waiting", "running"])
def test_nothing_to_do(stage: Stage, who: str) -> None:
    stage.refuses(
        lambda: stage.manager.allocate(getattr(stage, who), 0, lookahead=3),
        f"request {who}: nothing to allocate (no new, external or hit tokens)",
    )


def test_an_id_that_is_in_use(stage: Stage) -> None:
    twin = make(stage.manager, "running", range(500, 510))
    stage.refuses(lambda: stage.manager.allocate(twin, 5), "request id 'running' is in use by another request")
    assert stage.manager.block_ids(twin) == [[] for _ in stage.manager.groups]


def test_an_id_is_free_again_after_its_request(stage: Stage) -> None:
    stage.manager.free(stage.running)
    assert run(stage.manager, make(stage.manager, "running", range(500, 510)))


def test_freeing_what_is_not_there(stage: Stage) -> None:
    manager = stage.manager
    stage.refuses(lambda: manager.free(stage.waiting), "request 'waiting' holds no blocks here")
    stage.refuses(lambda: manager.preempt(stage.waiting), "request 'waiting' holds no blocks here")
    twin = make(manager, "running", range(8))
    stage.refuses(lambda: manager.free(twin), "request 'running' holds no blocks here")


def test_freeing_twice(stage: Stage) -> None:
    extra = make(stage.manager, "extra", range(700, 710))
    assert run(stage.manager, extra)
    stage.manager.free(extra)
    stage.refuses(lambda: stage.manager.free(extra), "request 'extra' holds no blocks here")


def test_a_request_of_another_manager(stage: Stage) -> None:
    other = Stage([FULL])
    stage.refuses(lambda: stage.manager.free(other.running), "request 'running' holds no blocks here")


@pytest.mark.parametrize("how", ["taken", "evicted", "reset"])
def test_a_stale_hit(stage: Stage, how: str) -> None:
    manager = stage.manager
    if how == "taken":
        flood = make(manager, "flood", range(1000, 1000 + 4 * (manager.pool.free // len(manager.groups))))
        assert run(manager, flood)
        manager.free(flood)
    elif how == "evicted":
        manager.evict([stage.hit.block_ids()[0][3]])
    else:
        manager.free(stage.running)
        assert manager.reset()
        assert run(manager, stage.running, 1)
    stage.refuses(
        lambda: manager.allocate(stage.waiting, 3, stage.hit),
        "request waiting: the hit is out of date, look it up again",
    )
    assert run(manager, stage.waiting)
    manager.check_integrity()


def test_a_stale_hit_inside_a_block() -> None:
    """A state that ends inside a block moves to a copy when its request goes on; the old place is about to be written."""
    manager = BlockManager(60, [spec(block_size=8), spec("mamba", block_size=8)], hash_block_size=4)
    first = make(manager, "first", range(13))
    assert run(manager, first, 8) and run(manager, first, 4)
    manager.take_copies()
    second = make(manager, "second", [*range(12), 99, 98])
    hit = manager.lookup(second)
    assert hit.tokens == 12
    assert run(manager, first, 1)
    manager.take_copies()
    assert manager.lookup(second).block_ids() != hit.block_ids()
    before = snapshot(manager, first, second)
    with pytest.raises(RequestError, match="request second: the hit is out of date, look it up again"):
        manager.allocate(second, 2, hit)
    assert snapshot(manager, first, second) == before


def test_hits_for_a_request_that_runs(stage: Stage) -> None:
    manager = stage.manager
    message = "request running runs already and can't adopt hits again before a preemption"
    hit = manager.lookup(stage.running)
    assert any(group.blocks for group in hit.groups)
    stage.refuses(lambda: manager.allocate(stage.running, 1, hit), message)
    stage.running.num_computed_tokens = 0  # as if it had not advanced: its table tells
    stage.refuses(lambda: manager.allocate(stage.running, 1, hit), message)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_chain_of_another_block_size(stage: Stage, size: int) -> None:
    manager = stage.manager
    odd = Request("odd", TokenChain(list(range(24)), size, XXH3))
    message = f"request odd: its chain has blocks of {size} tokens, here they have 4"
    stage.refuses(lambda: manager.allocate(odd, 24), message)
    stage.refuses(lambda: manager.lookup(odd), message)


def test_without_caching_any_chain_will_do() -> None:
    manager = BlockManager(20, [FULL], caching=False)
    odd = Request("odd", TokenChain(list(range(24)), 7, XXH3))
    assert manager.lookup(odd).tokens == 0
    assert manager.allocate(odd, 24) == ([1, 2, 3, 4, 5, 6],)


@pytest.mark.parametrize("tokens", [-1, 19, 1000])
def test_caching_more_than_there_is(stage: Stage, tokens: int) -> None:
    stage.refuses(
        lambda: stage.manager.cache(stage.running, tokens),
        f"request running has 18 tokens and 16 slots, can't cache {tokens}",
    )


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ((-1, None, 50), "a retention range needs at least one token, from 0 on; not -1 to None"),
        ((8, 8, 50), "a retention range needs at least one token, from 0 on; not 8 to 8"),
        ((0, None, 101), "a retention priority is from 0 to 100, got 101"),
        ((0, None, -1), "a retention priority is from 0 to 100, got -1"),
        ((0, None, 50, -1), "a retention lasts 0 ns or longer, got -1"),
    ],
)
def test_an_invalid_retention_is_refused(wish: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Retention(*wish)
    assert message in str(refused.value)


def test_a_retention_that_needs_another_policy_is_refused(stage: Stage) -> None:
    wishful = make(stage.manager, "wishful", range(8), hints=Hints(retention=(Retention(0, None, 80),)))
    stage.refuses(
        lambda: stage.manager.allocate(wishful, 8),
        'request wishful asks for retention: that needs eviction="priority"',
    )


def test_the_hit_of_another_request(stage: Stage) -> None:
    thief = make(stage.manager, "thief", range(300, 330))
    stage.refuses(
        lambda: stage.manager.allocate(thief, 4, stage.hit), "request thief: the hit belongs to request waiting"
    )


@pytest.mark.parametrize("tokens", [-1, 15, 1000])
def test_rolling_back_too_far(stage: Stage, tokens: int) -> None:
    assert stage.running.num_computed_tokens == 14
    stage.refuses(
        lambda: stage.manager.rollback(stage.running, tokens),
        f"request running has computed 14 tokens, can't take back {tokens}",
    )


def test_dropping_a_negative_count(stage: Stage) -> None:
    stage.refuses(
        lambda: stage.manager.drop_stale(stage.running, -1), "request running: token counts must not be negative"
    )


@pytest.mark.parametrize("verb", ["cache", "rollback", "drop_stale"])
def test_verbs_for_those_who_hold_blocks(stage: Stage, verb: str) -> None:
    stage.refuses(lambda: getattr(stage.manager, verb)(stage.waiting, 0), "request 'waiting' holds no blocks here")


@pytest.mark.parametrize("block", [-1, 40, 10**6])
def test_evicting_outside_the_pool(stage: Stage, block: int) -> None:
    stage.refuses(lambda: stage.manager.evict([1, block]), f"no block {block} in a pool of 40", ValueError)


def test_tokens_for_a_trace_and_a_count_for_tokens(stage: Stage) -> None:
    traced = Request("traced", TraceChain([1, 2], 4, 8, 4, own=1))
    stage.refuses(
        lambda: traced.append([1]),
        "request traced comes from a trace and has no tokens to append to: grow it",
        TypeError,
    )
    stage.refuses(lambda: stage.waiting.grow(1), "request waiting has real tokens: append them", TypeError)
    assert stage.waiting.num_tokens == 19


# -- allocations that don't fit ---------------------------------------------------------------------------------------

SETS = {
    "full": [FULL],
    "full+window": [FULL, spec("sliding_window", window=9)],
    "full+chunk": [FULL, spec("chunked_local", chunk=8)],
    "full+states": [FULL, spec("mamba", mode="all")],
    "full+aligned": [FULL, spec("mamba", spec_blocks=2)],
    "mixed": [spec(block_size=8), spec("sliding_window", window=9)],
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"external": 8},
        {"must_fit": True},
        {"lookahead": 7},
        {"reserved": 30},
        {"external": 8, "must_fit": True, "delay_caching": True},
    ],
    ids=str,
)
def test_a_refused_admission_leaves_no_trace(name: str, options: dict[str, Any]) -> None:
    manager = BlockManager(30, SETS[name], watermark=0.1)
    cache(manager, "gone", range(24))
    blocker = make(manager, "blocker", range(500, 516))
    assert run(manager, blocker)
    manager.begin_step()
    big = make(manager, "big", [*range(24), *range(900, 1000)])
    hit = manager.lookup(big)
    assert hit.tokens
    before = snapshot(manager, blocker, big)
    assert manager.allocate(big, 92, hit, **options) is None
    assert snapshot(manager, blocker, big) == before
    manager.check_integrity()
    # The same hit serves for a smaller wish: nothing of it was lost.
    assert manager.allocate(big, 1, hit) is not None
    assert [ids[: len(found)] for ids, found in zip(manager.block_ids(big), hit.block_ids(), strict=True)] == (
        hit.block_ids()
    )
    manager.check_integrity()


def test_a_refused_step_releases_only_what_left_the_window() -> None:
    manager = BlockManager(11, [FULL, spec("sliding_window", window=4)])
    request = make(manager, "a", range(40))
    assert run(manager, request, 16)
    assert manager.block_ids(request) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    before = snapshot(manager, request)
    assert manager.allocate(request, 24) is None
    after = snapshot(manager, request)
    assert manager.block_ids(request) == [[1, 2, 3, 4], [0, 0, 0, 8]]
    assert after["line"] == [9, 10, 7, 6, 5]
    assert after["cached"] == before["cached"]
    assert after["references"] == {block: 1 for block in (1, 2, 3, 4, 8)}
    manager.check_integrity()
    settled = snapshot(manager, request)
    assert manager.allocate(request, 24) is None
    assert snapshot(manager, request) == settled, "the second time there is nothing left to release"


def test_a_surplus_in_one_group_is_no_help_to_another() -> None:
    """Rejected drafts leave the state group a block too many; that block is not there for the full group to take.

    vLLM 0.32 adds the two up, finds that nothing is needed, and then fails to take a block.
    """
    manager = BlockManager(8, [FULL, spec("mamba")])
    request = make(manager, "a", range(4))
    assert run(manager, request, 4)
    request.append([9])
    assert run(manager, request, 8)
    manager.rollback(request, 8)
    assert manager.block_ids(request) == [[1, 3, 4], [2, 0, 5]]
    rest = manager.pool.take(2)  # somebody else's
    assert manager.pool.free == 0
    before = snapshot(manager, request)
    assert manager.allocate(request, 1, lookahead=8) is None
    assert snapshot(manager, request) == before
    manager.pool.release([Extent(rest, 0)])
    assert manager.allocate(request, 1, lookahead=8) == ([rest[1]], [])
    manager.check_integrity()


@pytest.mark.parametrize(("reserved", "granted"), [(1, True), (2, False)])
def test_a_surplus_in_one_group_counts_towards_what_is_reserved(reserved: int, granted: bool) -> None:
    """As vLLM has it: the sum of what groups need, surpluses included, must leave the reserve; and so it may be used up."""
    manager = BlockManager(8, [FULL, spec("mamba")])
    request = make(manager, "a", range(4))
    assert run(manager, request, 4)
    request.append([9])
    assert run(manager, request, 8)
    manager.rollback(request, 8)
    manager.pool.take(1)  # somebody else's
    assert manager.pool.free == 1
    taken = manager.allocate(request, 1, lookahead=8, reserved=reserved)
    assert (taken is not None) == granted
    assert manager.pool.free == (0 if granted else 1)


def test_a_state_that_is_loaded_is_counted() -> None:
    """vLLM 0.32 forgets the block of the state to be loaded, and fails to take one if it is the last."""
    for blocks, granted in ((6, False), (7, True)):
        manager = BlockManager(blocks, [FULL, spec("mamba")])
        request = make(manager, "a", range(16))
        taken = manager.allocate(request, 4, external=12)
        assert (taken is not None) == granted
        assert manager.pool.free == (0 if granted else blocks - 1)
        manager.check_integrity()


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "full", "window": 512},
        {"kind": "full", "chunk": 3},
        {"kind": "sliding_window", "window": 8, "mode": "all"},
        {"kind": "full", "spec_blocks": 4},
    ],
)
def test_options_of_another_kind_are_refused(spec):
    with pytest.raises(ConfigError):
        BlockManager(10, [GroupSpec(**spec)])


def test_retention_that_cannot_be_honoured_is_refused():
    for start, stop, priority, duration in ((50, 10, 40, None), (0, 1, 101, None), (0, 1, 40, -4)):
        with pytest.raises(ConfigError):
            Retention(start, stop, priority, duration)
    lru, timeless = BlockManager(10), BlockManager(10, eviction="priority")
    chain = TokenChain(range(20), 16, XXH3)
    with pytest.raises(RequestError, match="priority"):
        lru.allocate(Request("a", chain, hints=Hints(retention=(Retention(0, 16, 80),))), 20)
    with pytest.raises(RequestError, match="clock"):
        timeless.allocate(Request("a", chain, hints=Hints(retention=(Retention(0, 16, 80, 5),))), 20)
