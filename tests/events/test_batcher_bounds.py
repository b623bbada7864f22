"""Limits of the batcher and the outbox: they lose nothing that matters, and show what was lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.events.fake_map import FakeMap, token_chain

from kvyard.events import Batcher, Cleared, EventBatch, GroupMeta, Mirror, Removed, Tier
from kvyard.events.outbox import Outbox
from kvyard.hashing import Run

G1, G2, G3, *_ = Tier
GROUPS = (GroupMeta(block_size=1), GroupMeta(block_size=1))


def make(**options) -> tuple[FakeMap, Batcher]:
    held = FakeMap()
    held.sink = batcher = Batcher(GROUPS, snapshot=held.snapshot, **options)
    return held, batcher


class TestClearOfOneTier:
    def test_other_tiers_are_announced_anew(self):
        held, batcher = make()
        mirror = Mirror()
        chain = token_chain(1, 2, 3)
        held.enter(Run(chain), 0, G1)
        held.enter(Run(chain), 0, G2)
        mirror.apply(batcher.end_iteration(0).events)
        held.clear(G1)
        batch = batcher.end_iteration(1)
        mirror.apply(batch.events)
        assert batch.events[0] == Cleared() and batch.seq == 1
        assert mirror.held == held.held(narrow=False) != {}

    def test_without_a_snapshot_the_event_names_the_tier(self):
        batcher = Batcher(GROUPS)
        batcher.cleared(G2)
        assert batcher.end_iteration(0).events == [Cleared(tier=G2)]


class TestResync:
    def test_parents_come_first_and_chains_are_whole(self):
        held, batcher = make()
        trunk, branch = token_chain(1, 2, 3, 4), token_chain(1, 2, 9)
        for run in (Run(trunk, 3, 4), Run(branch, 2, 3), Run(trunk, 0, 2), Run(trunk, 2, 3)):
            held.enter(run, 0, G1)
        batcher.end_iteration(0)
        batch = batcher.resync(5)
        known = set()
        for event in batch.events[1:]:
            assert event.parent is None or event.parent in known
            known.update(event.hashes)
        assert [len(event.hashes) for event in batch.events[1:]] in ([4, 1], [3, 2])
        assert (batch.seq, batcher.end_iteration(6)) == (2, None), "a number is left out, so that the loss shows"


class TestTooMuchInOneIteration:
    def test_the_map_is_announced_instead(self):
        held, batcher = make(max_runs=10)
        mirror = Mirror()
        held.enter(Run(token_chain(1)), 0, G1)
        mirror.apply(batcher.end_iteration(0).events)
        for at in range(50):
            held.enter(Run(token_chain(100 + at)), at % 2, G1)
        held.leave(Run(token_chain(1)), 0, G1)
        batch = batcher.end_iteration(1)
        mirror.apply(batch.events)
        assert batch.seq == 2 and batch.first_id > 1, "the loss must show as a gap"
        assert mirror.held == held.held(narrow=False)
        assert batcher.counters.resyncs == 1 and batcher.counters.lost_runs > 10

    def test_without_a_snapshot_nothing_untrue_is_left(self):
        batcher = Batcher(GROUPS, max_runs=2)
        for at in range(5):
            batcher.left(Run(token_chain(at)), 0, G1, True)
        batch = batcher.end_iteration(0)
        assert batch.events == [Cleared()] and batch.seq == 1


class TestOutbox:
    def test_overflow_leaves_a_gap_then_clear_and_snapshot(self):
        held, batcher = make()
        outbox = Outbox(batcher.resync, max_events=5)
        for at in range(8):
            held.enter(Run(token_chain(at)), 0, G1)
            if at:
                held.leave(Run(token_chain(at - 1)), 0, G1)
            outbox.offer(batcher.end_iteration(at), at)
        taken = []
        while (batch := outbox.take()) is not None:
            taken.append(batch)
        assert taken[0].events[0] == Cleared() and taken[0].seq > 0
        assert [batch.seq for batch in taken] == list(range(taken[0].seq, taken[0].seq + len(taken)))
        assert outbox.counters.overflows >= 1 and outbox.counters.lost_batches >= 1
        assert outbox.waiting_events == 0

    def test_as_many_wait_as_the_bound_says(self):
        outbox = Outbox(lambda now: EventBatch(stream="s", seq=9, events=[Cleared()]), max_events=3)
        one = EventBatch(stream="s", seq=0, events=[Removed(hashes=[1])])
        assert [outbox.offer(one, 0) for _ in range(4)] == [True, True, True, False]
        assert (outbox.waiting_events, len(outbox), outbox.counters.lost_batches) == (0, 1, 4)

    def test_a_bound_is_needed(self):
        with pytest.raises(ValueError, match="at least one event"):
            Outbox(lambda now: None, max_events=0)

    @settings(max_examples=200, deadline=None)
    @given(
        steps=st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 1), st.sampled_from(Tier), st.booleans(), st.integers(0, 3)),
            max_size=60,
        ),
        bound=st.integers(1, 6),
    )
    def test_draining_always_ends_at_the_map(self, steps, bound):
        """However slow the consumer, it never believes in a block that is gone once it has drained the queue."""
        held, batcher = make(max_runs=4)
        outbox = Outbox(batcher.resync, max_events=bound)
        mirror = Mirror()
        for now, (name, group, tier, enter, takes) in enumerate(steps):
            run = Run(token_chain(name, name))
            if enter:
                held.enter(run, group, tier)
            else:
                held.leave(run, group, tier)
            batch = batcher.end_iteration(now)
            if batch is not None:
                outbox.offer(batch, now)
            for _ in range(takes):
                batch = outbox.take()
                if batch is not None:
                    mirror.apply(batch.events)
            if not len(outbox):
                assert mirror.held == held.held(narrow=False)
        while (batch := outbox.take()) is not None:
            mirror.apply(batch.events)
        assert mirror.held == held.held(narrow=False)
