"""The batcher's rules: the TensorRT-LLM seed's three tests, its golden counts, and what we promise beyond them."""

from array import array

import pytest
from tests.events.fake_map import XXH3, FakeMap, token_chain, trace_chain

from kvyard.errors import KvyardError
from kvyard.events import Batcher, Cleared, GroupMeta, Removed, Stored, Tier
from kvyard.hashing import Namespace, Run, TokenChain

FULL, SWA = 0, 1
GROUPS = (GroupMeta(block_size=1, kind="full_attention"), GroupMeta(block_size=1, kind="sliding_window", window=8))
G1, G2, G3, *_ = Tier


def block(name: int) -> Run:
    """One block that belongs to no other's chain."""
    return Run(token_chain(name))


def outline(batch) -> list[str]:
    """A batch in short: ``R0(6)`` is a Removed of six blocks in group 0, with the tier named below the device."""
    out = []
    for event in batch.events:
        if isinstance(event, Cleared):
            out.append("C" if event.tier is None else f"C@{event.tier.name}")
        else:
            where = "" if event.tier == G1 else f"@{event.tier.name}"
            out.append(f"{'S' if isinstance(event, Stored) else 'R'}{event.group}{where}({len(event.hashes)})")
    return out


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(GROUPS)


def test_a_store_after_a_clear_is_an_event_of_its_own(batcher: Batcher) -> None:
    """Merged into the store before the clear, it would be announced and then be cleared."""
    chain = token_chain(1, 2, 3, 4)
    batcher.entered(Run(chain, 0, 2), FULL, G1, True)
    batcher.cleared()
    batcher.entered(Run(chain, 2, 4), FULL, G1, True)
    assert outline(batcher.end_iteration(0)) == ["S0(2)", "C", "S0(2)"]


class TestSeed:
    """The three tests of TensorRT-LLM #11883, without the pool that made one of them doubtful."""

    def test_removals_of_one_window_become_one_event(self, batcher):
        batcher.left(block(1), FULL, G1, True)
        batcher.left(block(2), FULL, G1, True)
        batch = batcher.end_iteration(0)
        assert outline(batch) == ["R0(2)"]
        assert batch.events[0].hashes == [block(1)[0], block(2)[0]]

    def test_removed_comes_before_the_stored_that_followed_it(self, batcher):
        batcher.left(block(1), FULL, G1, True)
        batcher.entered(block(2), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["R0(1)", "S0(1)"]

    def test_a_stored_does_not_flush_another_window(self, batcher):
        batcher.left(block(1), SWA, G1, True)
        batcher.left(block(2), FULL, G1, True)
        batcher.entered(block(3), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["R0(1)", "S0(1)", "R1(1)"]


class TestGoldenCounts:
    def test_twelve_alternating_evictions_in_two_windows(self, batcher):
        for at in range(6):
            batcher.left(block(at), FULL, G1, True)
            batcher.left(block(at), SWA, G1, True)
        assert outline(batcher.end_iteration(0)) == ["R0(6)", "R1(6)"]

    def test_six_evictions_each_with_a_tier_move(self, batcher):
        for at in range(6):
            batcher.left(block(at), FULL, G1, True)
            moved = block(100 + at)
            batcher.entered(moved, FULL, G2, True)
            batcher.left(moved, FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0@G2(1)"] * 6 + ["R0(12)"]

    def test_six_evictions_each_with_a_move_of_one_chain(self, batcher):
        chain = token_chain(*range(6))
        for at in range(6):
            batcher.left(block(50 + at), FULL, G1, True)
            batcher.entered(Run(chain, at, at + 1), FULL, G2, True)
            batcher.left(Run(chain, at, at + 1), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0@G2(6)", "R0(12)"]

    def test_mixed_pressure(self, batcher):
        """64 evictions per window, 8 moves, 4 stores per window: 144 events one by one, at most 24 here."""
        for at in range(64):
            for group in (FULL, SWA):
                batcher.left(block(at), group, G1, True)
                if at % 16 == 15:
                    batcher.entered(block(1000 + at), group, G1, True)
            if at % 8 == 0:
                moved = block(2000 + at)
                batcher.entered(moved, FULL, G2, True)
                batcher.left(moved, FULL, G1, True)
        batch = batcher.end_iteration(0)
        assert len(batch.events) <= 24
        assert sum(len(event.hashes) for event in batch.events if isinstance(event, Removed)) == 136

    def test_decode_commits_in_two_windows(self, batcher):
        chain = token_chain(1, 2, 3, 4)
        for at in range(4):
            for group in (FULL, SWA):
                batcher.entered(Run(chain, at, at + 1), group, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(4)", "S1(4)"]


class TestOrder:
    def test_the_end_of_an_iteration_flushes_by_group_then_tier(self, batcher):
        for group, tier in [(SWA, G3), (FULL, G2), (SWA, G1), (FULL, G3), (FULL, G1)]:
            batcher.left(block(1), group, tier, True)
        assert outline(batcher.end_iteration(0)) == ["R0(1)", "R0@G2(1)", "R0@G3(1)", "R1(1)", "R1@G3(1)"]

    @pytest.mark.parametrize("leave_first", [False, True])
    def test_a_demotion_announces_the_lower_copy_first(self, batcher, leave_first):
        moved = block(1)
        if leave_first:
            batcher.left(moved, FULL, G1, True)
        batcher.entered(moved, FULL, G2, True)
        if not leave_first:
            batcher.left(moved, FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0@G2(1)", "R0(1)"]

    def test_removed_and_stored_again(self, batcher):
        one = block(1)
        batcher.left(one, FULL, G1, True)
        batcher.entered(one, FULL, G1, True)
        batcher.left(one, FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["R0(1)", "S0(1)", "R0(1)"]

    def test_an_empty_run_flushes_nothing(self, batcher):
        batcher.left(block(1), FULL, G1, True)
        batcher.entered(block(2)[:0], FULL, G1, True)
        batcher.left(block(2), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["R0(2)"]

    def test_the_removals_of_one_group_can_be_flushed(self, batcher):
        batcher.left(block(1), FULL, G1, True)
        batcher.left(block(2), SWA, G1, True)
        batcher.left(block(3), FULL, G2, True)
        batcher.flush_removed(FULL)
        batcher.left(block(4), FULL, G1, True)
        batcher.flush_removed(FULL)
        batcher.flush_removed(FULL)
        assert outline(batcher.end_iteration(0)) == ["R0(1)", "R0@G2(1)", "R0(1)", "R1(1)"]
        batcher.check_integrity()

    def test_a_stored_does_not_grow_over_removals_that_were_flushed(self, batcher):
        chain = token_chain(1, 2)
        batcher.entered(Run(chain, 0, 1), FULL, G1, True)
        batcher.left(Run(chain, 1, 2), FULL, G1, True)
        batcher.flush_removed(FULL)
        batcher.entered(Run(chain, 1, 2), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(1)", "R0(1)", "S0(1)"]

    def test_flushing_an_unknown_group_is_refused_in_words(self, batcher):
        with pytest.raises(KvyardError, match="group 2 is unknown"):
            batcher.flush_removed(2)

    def test_a_clear_flushes_everything_before_it(self, batcher):
        batcher.left(block(1), SWA, G1, True)
        batcher.entered(block(2), FULL, G1, True)
        batcher.cleared()
        batcher.entered(block(3), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(1)", "R1(1)", "C", "S0(1)"]

    def test_nothing_survives_an_iteration(self, batcher):
        chain = token_chain(1, 2)
        batcher.entered(Run(chain, 0, 1), FULL, G1, True)
        batcher.left(block(5), SWA, G2, True)
        batcher.end_iteration(0)
        batcher.check_integrity()
        assert batcher.end_iteration(1) is None
        batcher.entered(Run(chain, 1, 2), FULL, G1, True)
        assert outline(batcher.end_iteration(2)) == ["S0(1)"]


class TestMerging:
    def test_a_chain_in_pieces_is_one_stored(self, batcher):
        chain = token_chain(*range(10))
        for at in range(0, 10, 2):
            batcher.entered(Run(chain, at, at + 2), FULL, G1, True)
        (event,) = batcher.end_iteration(0).events
        assert event.hashes == chain.hashes(0, 10) and list(event.tokens) == list(range(10)) and event.parent is None

    def test_two_objects_for_one_text_merge(self, batcher):
        one, other = token_chain(1, 2), token_chain(1, 2, 3, 4)
        batcher.entered(Run(one), FULL, G1, True)
        batcher.entered(Run(other, 2, 4), FULL, G1, True)
        (event,) = batcher.end_iteration(0).events
        assert event.hashes == other.hashes(0, 4) and event.tokens == [1, 2, 3, 4]

    def test_chains_that_part_do_not(self, batcher):
        batcher.entered(Run(token_chain(1, 2)), FULL, G1, True)
        batcher.entered(Run(token_chain(7, 8, 9), 2, 3), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(2)", "S0(1)"]

    def test_other_lanes_in_between_do_not_hinder(self, batcher):
        chain = token_chain(1, 2)
        batcher.entered(Run(chain, 0, 1), FULL, G1, True)
        batcher.entered(block(9), FULL, G2, True)
        batcher.left(block(8), SWA, G1, True)
        batcher.entered(Run(chain, 1, 2), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(2)", "S0@G2(1)", "R1(1)"]

    def test_pending_removals_do(self, batcher):
        chain = token_chain(1, 2)
        batcher.entered(Run(chain, 0, 1), FULL, G1, True)
        batcher.left(block(9), FULL, G1, True)
        batcher.entered(Run(chain, 1, 2), FULL, G1, True)
        assert outline(batcher.end_iteration(0)) == ["S0(1)", "R0(1)", "S0(1)"]

    def test_parent_and_metadata(self, batcher):
        space = Namespace(lora_name="ad", lora_id=7, salt="s")
        chain = TokenChain([1, 2, 3], 1, XXH3, space)
        batcher.entered(Run(chain, 0, 2), SWA, G2, True)
        (event,) = batcher.end_iteration(2_500_000_000).events
        assert event == Stored(
            hashes=chain.hashes(0, 2),
            parent=None,
            tokens=array("I", [1, 2]),
            block_size=1,
            group=SWA,
            tier=G2,
            lora_name="ad",
            lora_id=7,
            extra_keys=[("ad", "s"), ("ad",)],
            kind="sliding_window",
            window=8,
            salt="s",
        )
        batcher.entered(Run(chain, 2, 3), SWA, G2, True)
        assert batcher.end_iteration(0).events[0].parent == chain.keys[1]

    def test_a_trace_has_no_tokens(self, batcher):
        chain = trace_chain(1, 4)
        batcher.entered(Run(chain), FULL, G1, True)
        (event,) = batcher.end_iteration(0).events
        assert event.tokens is None and event.hashes == chain.hashes(0, 4) and event.block_size == 1


class TestFirstAndLast:
    def test_only_the_first_copy_in_and_the_last_out(self, batcher):
        held = FakeMap(batcher)
        chain = token_chain(1, 2, 3)
        held.enter(Run(chain), FULL, G1)
        held.enter(Run(chain, 0, 2), FULL, G1)
        held.leave(Run(chain), FULL, G1)
        assert outline(batcher.end_iteration(0)) == ["S0(3)", "R0(1)"]
        assert batcher.counters.repeats == 2

    def test_reasons(self, batcher):
        batcher.left(block(1), FULL, G1, True, "evicted")
        batcher.left(block(2), FULL, G1, True, "evicted")
        batcher.left(block(1), SWA, G1, True, "evicted")
        batcher.left(block(2), SWA, G1, True, "demoted")
        assert [event.reason for event in batcher.end_iteration(0).events] == ["evicted", None]


class TestAnnounced:
    """What was announced and not taken back is what the map holds."""

    def test_waiting_stores_count_as_announced(self, batcher):
        one, two = block(1), block(2)
        batcher.entered(one, FULL, G1, True)
        batcher.check_announced([(FULL, G1, [one])])
        batcher.end_iteration(0)
        batcher.entered(two, SWA, G2, True)
        batcher.left(one, FULL, G1, True)
        batcher.check_announced([(SWA, G2, [two])])
        batcher.cleared()
        batcher.check_announced([])
        batcher.end_iteration(1)
        batcher.check_announced([])

    def test_a_block_never_taken_back_is_named(self, batcher):
        batcher.entered(block(1), FULL, G1, True)
        batcher.end_iteration(0)
        with pytest.raises(AssertionError, match=r"I4.*group 0 in G1': 1"):
            batcher.check_announced([])

    @pytest.mark.source  # it derives from a compiled class
    def test_a_removal_that_lost_its_hashes_is_never_sent(self):
        class Forgetful(TokenChain):
            def packed_hashes(self, start, stop):
                return []

        held = [block(1)]
        batcher = Batcher(GROUPS, snapshot=lambda: [(FULL, G1, held)])
        batcher.entered(block(1), FULL, G1, True)
        batcher.end_iteration(0)
        batcher.left(Run(Forgetful([7], 1, XXH3)), FULL, G1, True)
        assert outline(batcher.end_iteration(1)) == ["C", "S0(1)"]
        assert batcher.counters.miscounted == 1
        batcher.check_announced([(FULL, G1, held)])


class TestIds:
    def test_sequence_and_ids_are_dense(self, batcher):
        seq = next_id = 0
        for at in range(20):
            if at % 3:
                batcher.left(block(at), at % 2, G1, True)
                batcher.entered(block(at), FULL, G2, True)
            batch = batcher.end_iteration(at)
            if at % 3 == 0:
                assert batch is None, "silence takes no number"
                continue
            assert (batch.seq, batch.first_id) == (seq, next_id)
            seq, next_id = seq + 1, next_id + len(batch.events)
        assert batcher.counters.batches == seq and batcher.counters.iterations == 20

    def test_ids_are_taken_at_emission(self, batcher):
        batcher.left(block(1), SWA, G1, True)
        batcher.entered(block(2), FULL, G1, True)
        one = batcher.end_iteration(0)
        batcher.entered(block(3), FULL, G1, True)
        two = batcher.end_iteration(0)
        assert (one.seq, one.first_id, two.seq, two.first_id) == (0, 0, 1, 2)

    def test_stamps(self):
        batcher = Batcher(GROUPS, stream="w0", rank=3, epoch=9)
        batcher.left(block(1), FULL, G1, True)
        batch = batcher.end_iteration(1_500_000_000)
        assert (batch.stream, batch.rank, batch.epoch, batch.ts) == ("w0", 3, 9, 1.5)


def test_an_unknown_group_is_refused_in_words():
    with pytest.raises(KvyardError, match="group 2 is unknown: the batcher was made for 2 groups"):
        Batcher(GROUPS).entered(block(1), 2, G1, True)
