"""The manager against the model, operation by operation, over configurations and sequences that nobody thought of.

Every result is compared (hits, ids, failures, reference counts, the order of free blocks, events) and ``check_integrity``
is called after each operation; see ``Pair``. Nothing asked for here is illegal: what is refused is in ``test_bad_input``.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.blocks.record_golden import Job
from tests.blocks.walks import Explorer, Mismatch, Pair, draw_family, random_walk

from kvyard.blocks.attention.window import WindowRule
from kvyard.blocks.coordinator import Coordinator
from kvyard.blocks.pool import Pool

chances = st.randoms(use_true_random=False)
"""Decisions inside a rule, made by hypothesis: they shrink like everything else."""


class SideBySide(RuleBasedStateMachine):
    """Requests come, run, fork, are preempted and freed; a step ends whenever hypothesis says so."""

    @initialize(data=st.data())
    def configure(self, data: st.DataObject) -> None:
        family = draw_family(lambda options: data.draw(st.sampled_from(options)))
        note(str(family))
        self.walk = Explorer(family, 0)
        self.walk.do("config", **family.config)
        self.walk.do("new_step")
        self.scheduled: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            for op, _ in self.walk.flush():
                note(str(op))

    def runnable(self) -> list[Job]:
        """Running requests that have not been part of this step yet."""
        return [job for job in self.walk.running if job.name not in self.scheduled]

    @rule()
    def next_step(self) -> None:
        self.walk.do("take_copies")
        self.walk.do("new_step")
        self.scheduled.clear()

    @rule(rng=chances)
    def create(self, rng: random.Random) -> None:
        self.walk.rng = rng
        self.walk.create()

    @precondition(lambda self: self.walk.waiting)
    @rule(rng=chances, which=st.integers(0, 2))
    def admit(self, rng: random.Random, which: int) -> None:
        self.walk.rng = rng
        job = self.walk.waiting[which % len(self.walk.waiting)]
        if job.name not in self.scheduled:
            self.scheduled.add(job.name)
            self.walk.admit(job)

    @precondition(lambda self: self.runnable())
    @rule(rng=chances, which=st.integers(0, 3))
    def advance(self, rng: random.Random, which: int) -> None:
        self.walk.rng = rng
        jobs = self.runnable()
        job = jobs[which % len(jobs)]
        self.scheduled.add(job.name)
        self.walk.advance(job)

    @precondition(lambda self: self.runnable())
    @rule(which=st.integers(0, 3), how=st.sampled_from(["finish", "preempt"]))
    def stop(self, which: int, how: str) -> None:
        jobs = self.runnable()
        getattr(self.walk, how)(jobs[which % len(jobs)])

    @precondition(lambda self: self.walk.waiting or self.walk.running)
    @rule(rng=chances)
    def look_up(self, rng: random.Random) -> None:
        self.walk.rng = rng
        self.walk.peek()

    @precondition(lambda self: self.runnable())
    @rule(which=st.integers(0, 3), share=st.floats(0, 1))
    def remove_skipped(self, which: int, share: float) -> None:
        jobs = self.runnable()
        job = jobs[which % len(jobs)]
        settled = max(0, job.computed - sum(count for count, _, _ in job.flying))
        self.walk.do("remove_skipped", req=job.name, num_tokens=int(share * settled))

    @rule(blocks=st.lists(st.integers(0, 23), min_size=1, max_size=4))
    def evict(self, blocks: list[int]) -> None:
        self.walk.do("evict", blocks=blocks)

    @rule(drain=st.booleans())
    def reset(self, drain: bool) -> None:
        if drain and not self.scheduled:
            self.walk.drain()
        else:
            self.walk.do("reset")

    @rule(op=st.sampled_from(["take_events", "state"]))
    def look(self, op: str) -> None:
        self.walk.do(op)


TestSideBySide = SideBySide.TestCase

SHORT = range(28)
LONG = range(1000, 1200)
"""Seeds: each decides a configuration and a walk through it."""


@pytest.mark.parametrize("seeds", [SHORT[at::4] for at in range(4)], ids=str)
def test_short_walks(seeds: range) -> None:
    for seed in seeds:
        assert random_walk(seed, 500) > 30, f"seed {seed} hardly does anything"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [LONG[at : at + 10] for at in range(0, len(LONG), 10)], ids=str)
def test_long_walks(seeds: range) -> None:
    """All of them together are a million operations."""
    for seed in seeds:
        allocations = random_walk(seed, 1_000_000 // len(LONG))
        print(f"seed {seed}: {1_000_000 // len(LONG)} operations, {allocations} successful allocations", flush=True)
        assert allocations > 200, f"seed {seed} hardly does anything"


@pytest.mark.parametrize("seeds", [SHORT, LONG], ids=["short", "long"])
def test_the_walks_reach_everything(seeds: range) -> None:
    """A configuration that is never drawn is never tested."""
    families = [draw_family(random.Random(seed).choice) for seed in seeds]
    configs = [family.config for family in families]
    groups = [group for config in configs for group in config["groups"]]
    kinds = {"full", "mla", "sliding_window", "sliding_window_mla", "chunked_local", "mamba"}
    assert {group["type"] for group in groups} >= kinds
    assert {group["mode"] for group in groups if group["type"] == "mamba"} >= {"all", "align"}
    assert any(len({group.get("block_size") for group in config["groups"]}) > 1 for config in configs)
    assert any(config.get("use_eagle") for config in configs)
    assert any(group.get("eagle") for group in groups)
    assert {config["caching"] for config in configs} == {True, False}
    assert {None, 0} <= {config.get("retention_interval") for config in configs}
    assert any(config.get("retention_interval") for config in configs)
    assert any(config["watermark"] for config in configs)
    assert any(config["max_in_flight_tokens"] for config in configs)
    for feature in ("drafts", "lookahead", "overlap", "external", "cold", "reserve", "keys", "report"):
        assert any(getattr(family, feature) for family in families), feature


def full_and_states(**options: object) -> dict[str, object]:
    groups = [{"type": "mamba", "mode": "align"}, {"type": "full"}]
    return {"op": "config", "num_blocks": 40, "block_size": 4, "hash_block_size": 2, "groups": groups, **options}


WENT_WRONG: dict[str, list[dict[str, object]]] = {
    # The private copy of a block that a hit ended in was completed, and joined to the block before it, while the copy
    # was still to be run.
    "copy completed at once": [
        full_and_states(trace=True),
        {"op": "new", "req": "a", "tokens": [1, 2, 3, 4, 5, 6, 7, 8]},
        {"op": "new_step"},
        {"op": "allocate", "req": "a", "num_new_tokens": 4},
        {"op": "new_step"},
        {"op": "allocate", "req": "a", "num_new_tokens": 2},
        {"op": "preempt", "req": "a"},
        {"op": "new_step"},
        {"op": "get_computed", "req": "a"},
        {"op": "allocate", "req": "a", "num_new_tokens": 2},
        {"op": "free", "req": "a"},
        {"op": "take_copies"},
        {"op": "state"},
    ],
    # A prompt ends with a block whose state isn't worth keeping otherwise: vLLM announces one hash unit, not the block.
    "state at the end of a prompt": [
        full_and_states(events=True, retention_interval=0, use_eagle=True),
        {"op": "new", "req": "a", "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]},
        {"op": "new_step"},
        {"op": "allocate", "req": "a", "num_new_tokens": 8},
        {"op": "take_events", "wire": True},
        {"op": "state"},
    ],
    # A load lands next to cross attention, whose slots are for other tokens.
    "load next to cross attention": [
        {
            "op": "config",
            "num_blocks": 40,
            "block_size": 4,
            "caching": False,
            "groups": [{"type": "full"}, {"type": "cross"}],
        },
        {"op": "new", "req": "a", "tokens": {"seq": [0, 28]}},
        {"op": "allocate", "req": "a", "num_new_tokens": 0, "num_external": 16, "delay_cache": True, "num_encoder": 2},
        {"op": "cache", "req": "a", "num_tokens": 16},
        {"op": "state"},
    ],
    # What was looked up is split by another request before it is adopted.
    "hit split by another": [
        {"op": "config", "num_blocks": 40, "block_size": 4, "trace": True},
        {"op": "new", "req": "a", "tokens": {"seq": [0, 20]}},
        {"op": "allocate", "req": "a", "num_new_tokens": 20},
        {"op": "free", "req": "a"},
        {"op": "new", "req": "b", "tokens": {"seq": [0, 21]}},
        {"op": "new", "req": "c", "tokens": {"seq": [0, 9]}},
        {"op": "get_computed", "req": "b"},
        {"op": "get_computed", "req": "c"},
        {"op": "allocate", "req": "c", "num_new_tokens": 1},
        {"op": "allocate", "req": "b", "num_new_tokens": 1},
        {"op": "state"},
    ],
}


@pytest.mark.parametrize("name", WENT_WRONG)
def test_regressions(name: str) -> None:
    pair = Pair()
    for op in WENT_WRONG[name]:
        pair.apply(op)


# -- and it does see mistakes -----------------------------------------------------------------------------------------


def forgets_to_unname(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "unname", lambda self, extent: None)


def frees_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowRule, "stale", lambda self, computed: max(0, computed - self.window))


def registers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "cacheable", lambda self, tokens, group: tokens)


@pytest.mark.source
@pytest.mark.parametrize("mistake", [forgets_to_unname, frees_too_late, registers_too_much])
def test_a_mistake_is_seen(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(mistake)
    mistake(monkeypatch)
    with pytest.raises((Mismatch, AssertionError, KeyError)):
        for seed in SHORT:
            random_walk(seed, 500)


def test_a_mismatch_shows_the_operations_before_it() -> None:
    pair = Pair()
    pair.apply({"op": "config", "num_blocks": 10, "block_size": 4, "trace": True})
    pair.apply({"op": "new", "req": "a", "tokens": [1, 2, 3, 4, 5]})
    pair.model.pool.queue.reverse()
    with pytest.raises(Mismatch) as seen:
        pair.apply({"op": "allocate", "req": "a", "num_new_tokens": 5})
    message = str(seen.value)
    assert "'num_blocks': 10" in message
    assert "{'op': 'new', 'req': 'a', 'tokens': [1, 2, 3, 4, 5]}\n" in message
    assert message.endswith("result.blocks[0]: model [9, 8]\n  result.blocks[0]: ours  [1, 2]")
