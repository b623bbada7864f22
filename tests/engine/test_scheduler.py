"""The rules of the batcher, one by one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Log, Row, replay

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.policies.mixed import least_important
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TokenChain, TraceChain, algorithm

MS = 1_000_000
SMALL = EngineConfig(block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1))


def unique(at: int, blocks: int = 4) -> tuple[int, ...]:
    return tuple(1000 * at + level for level in range(blocks))


def chunks(log: Log) -> list[list[tuple[str, int, int]]]:
    """The prompt chunks of every pass that has any."""
    return [entry[2] for entry in log.passes if entry[2] and isinstance(entry[2][0], tuple)]


def test_running_before_waiting_and_the_budget_is_shared():
    config = replace(SMALL, max_num_batched_tokens=64, max_num_seqs=8)
    log = replay(config, [Row(0, 100, 5, unique(1)), Row(0, 40, 5, unique(2))])
    # r0's rest goes first, and r1 gets what is left of the budget; then r0 decodes and r1's rest has all but one token.
    assert chunks(log) == [[("r0", 64, 0)], [("r0", 36, 64), ("r1", 28, 0)], [("r1", 12, 28)]]


def test_a_long_prompt_does_not_take_more_than_the_threshold():
    config = replace(SMALL, long_prefill_token_threshold=32)
    log = replay(config, [Row(0, 80, 1, unique(1)), Row(0, 20, 3, unique(2))])
    assert chunks(log) == [[("r0", 32, 0), ("r1", 20, 0)], [("r0", 32, 32)], [("r0", 16, 64)]]


def test_the_threshold_does_not_hold_for_a_request_that_is_alone():
    """Nobody else runs or waits from the second pass on."""
    config = replace(SMALL, long_prefill_token_threshold=32)
    log = replay(config, [Row(0, 80, 1, unique(1)), Row(0, 20, 1, unique(2))])
    assert chunks(log) == [[("r0", 32, 0), ("r1", 20, 0)], [("r0", 48, 32)]]


def test_an_adaptive_threshold_is_an_even_share_of_the_budget():
    config = replace(SMALL, long_prefill_token_threshold=32, max_num_batched_tokens=120, max_num_seqs=8)
    rows = [Row(0, 100, 9, unique(1)), Row(0, 50, 9, unique(2))]
    assert chunks(replay(config, rows))[0] == [("r0", 32, 0), ("r1", 32, 0)]
    config = replace(config, long_prefill_token_threshold_adaptive=True)
    assert chunks(replay(config, rows))[0] == [("r0", 60, 0), ("r1", 50, 0)]


def test_a_pass_hands_out_fewer_tokens_than_it_could_take_in():
    config = replace(SMALL, max_num_scheduled_tokens=48, max_num_seqs=8)
    assert chunks(replay(config, [Row(0, 100, 1, unique(1))])) == [[("r0", 48, 0)], [("r0", 48, 48)], [("r0", 4, 96)]]


@pytest.mark.parametrize("plans", [True, False])
def test_a_decoding_request_behind_a_prompt_can_be_left_without_a_token(plans):
    """Tokens are handed out in order of admission. r0's chunks end where its states are kept, so every other one is shorter:
    the requests that came in beside such a one have nothing beside the next.
    """
    groups = (GroupSpec(kind="full", block_size=64), GroupSpec(kind="mamba", block_size=64))
    config = EngineConfig(groups=groups, max_num_batched_tokens=40, max_num_seqs=8, timing=SMALL.timing)
    rows = [Row(0, 200, 2, unique(1)), *(Row(1, 1, 4, unique(2 + at)) for at in range(3))]
    log = replay(config, rows, plans=plans)
    assert chunks(log) == [
        [("r0", 40, 0)],
        [("r0", 24, 40), ("r1", 1, 0), ("r2", 1, 0), ("r3", 1, 0)],
        [("r0", 40, 64)],
        [("r0", 24, 104)],
        [("r0", 40, 128)],
        [("r0", 24, 168)],
        [("r0", 8, 192)],
    ]
    assert [decoding for *_, decoding in log.passes] == [0, 0, 0, 3, 0, 3, 3, 1]
    assert all(output == row.output for row, (*_, output, _) in zip(rows[1:], log.of("ended"), strict=False))


def test_those_that_end_in_one_pass_end_in_order_of_admission():
    """r0's one answer token comes with its last chunk, in the pass of r1's last step."""
    config = replace(SMALL, long_prefill_token_threshold=32)
    log = replay(config, [Row(0, 96, 1, unique(1)), Row(0, 20, 3, unique(2))])
    assert log.of("ended") == [("r0", 32 * MS, "FINISHED", 1, ""), ("r1", 32 * MS, "FINISHED", 3, "")]


def test_without_chunks_a_prompt_waits_for_a_budget_of_its_own():
    config = replace(SMALL, max_num_batched_tokens=100, max_num_seqs=8, enable_chunked_prefill=False)
    log = replay(config, [Row(0, 80, 2, unique(1)), Row(0, 50, 2, unique(2))])
    assert chunks(log) == [[("r0", 80, 0)], [("r1", 50, 0)]]


def test_without_chunks_a_prompt_larger_than_any_pass_is_rejected():
    config = replace(SMALL, max_num_batched_tokens=100, max_num_seqs=8, enable_chunked_prefill=False)
    log = replay(config, [Row(0, 300, 2, unique(1)), Row(0, 50, 2, unique(2))])
    assert {name: state for name, _, state, *_ in log.of("ended")} == {"r0": "REJECTED", "r1": "FINISHED"}


def test_max_num_seqs():
    config = replace(SMALL, max_num_seqs=2)
    log = replay(config, [Row(0, 20, 3, unique(at)) for at in range(4)])
    assert max(decoding for *_, decoding in log.passes) == 2
    assert [name for name, *_ in log.of("admitted")] == ["r0", "r1", "r2", "r3"]


def test_nobody_overtakes_the_head():
    # r1 doesn't fit while r0 runs; r2 would, and waits all the same.
    rows = [Row(0, 700, 30, unique(1)), Row(0, 700, 1, unique(2)), Row(0, 16, 1, unique(3))]
    log = replay(SMALL, rows)
    assert [name for name, *_ in log.of("ended")] == ["r0", "r1", "r2"]


def test_the_whole_sequence_must_fit_unless_configured_otherwise():
    config = replace(SMALL, max_num_batched_tokens=256)
    rows = [Row(0, 600, 20, unique(1)), Row(0, 700, 1, unique(2))]
    careful = replay(config, rows)
    assert not careful.of("preempted")
    bold = replay(replace(config, scheduler_reserve_full_isl=False), rows)
    admitted = {name: now for name, now, *_ in bold.of("admitted")[:2]}
    assert admitted["r1"] < {name: now for name, now, *_ in careful.of("admitted")}["r1"]


def test_preemption_takes_the_newest_and_it_comes_back_first():
    rows = [Row(0, 300, 200, unique(1)), Row(0, 300, 200, unique(2)), Row(50 * MS, 100, 1, unique(3))]
    log = replay(replace(SMALL, num_gpu_blocks=48), rows)
    assert log.of("preempted")[0][0] == "r1"
    order = [name for name, *_ in log.of("admitted")]
    assert order == ["r0", "r1", "r1", "r2"]
    back = [entry for entry in log.of("admitted") if entry[0] == "r1"][1]
    assert back[2] > 0, "what was cached of it is found again"


def test_or_the_oldest():
    rows = [Row(0, 300, 200, unique(1)), Row(0, 300, 200, unique(2))]
    log = replay(replace(SMALL, num_gpu_blocks=48, preemption_mode="oldest"), rows)
    assert log.of("preempted")[0][0] == "r0"


def test_nobody_is_admitted_in_a_pass_that_preempted():
    rows = [Row(0, 300, 200, unique(1)), Row(0, 300, 200, unique(2)), Row(1 * MS, 20, 1, unique(3))]
    log = replay(replace(SMALL, num_gpu_blocks=48, max_num_seqs=2), rows)
    preempted = {now for _, now, *_ in log.of("preempted")}
    assert preempted and not preempted & {now for _, now, *_ in log.of("admitted")}


def test_priorities():
    config = replace(SMALL, scheduling_policy="priority", max_num_seqs=1)
    rows = [
        Row(0, 20, 5, unique(0)),
        Row(1, 20, 1, unique(1), 5),
        Row(2, 20, 1, unique(2), 1),
        Row(3, 20, 1, unique(3), 1),
    ]
    assert [name for name, *_ in replay(config, rows).of("admitted")] == ["r0", "r2", "r3", "r1"]


def test_a_low_priority_is_pushed_out_first():
    config = replace(SMALL, scheduling_policy="priority", num_gpu_blocks=48)
    rows = [Row(0, 300, 200, unique(1), 5), Row(0, 300, 200, unique(2), 1)]
    assert replay(config, rows).of("preempted")[0][0] == "r0"


def test_a_full_hit_computes_its_last_block_again():
    log = replay(SMALL, [Row(0, 64, 1, (1,)), Row(100 * MS, 64, 1, (1,)), Row(200 * MS, 65, 1, (1,))])
    # With a token more there is something to compute after it, and all of it counts.
    assert [cached for _, _, cached, _ in log.of("admitted")] == [0, 48, 64]


def test_max_model_len_ends_the_answer_and_refuses_the_prompt():
    config = replace(SMALL, max_model_len=100)
    log = replay(config, [Row(0, 90, 50, unique(1)), Row(0, 100, 5, unique(2)), Row(0, 99, 5, unique(3))])
    ended = {name: (state, output) for name, _, state, output, _ in log.of("ended")}
    assert ended == {"r0": ("FINISHED", 10), "r1": ("REJECTED", 0), "r2": ("FINISHED", 1)}
    assert "max_model_len" in next(entry[-1] for entry in log.of("ended") if entry[0] == "r1")


def test_a_request_that_can_never_fit_is_rejected_and_the_rest_goes_on():
    log = replay(SMALL, [Row(0, 64 * 16 + 1, 5, unique(1)), Row(0, 20, 2, unique(2))])
    ended = {name: state for name, _, state, *_ in log.of("ended")}
    assert ended == {"r0": "REJECTED", "r1": "FINISHED"}
    assert log.of("ended")[0][1] == 0, "at once, though nothing else has happened yet"


def test_a_request_that_outgrows_the_pool_is_rejected():
    log = replay(replace(SMALL, num_gpu_blocks=4), [Row(0, 60, 500, unique(1))])
    ((_, _, state, output, reason),) = log.of("ended")
    assert state == "REJECTED" and output == 5 and "blocks" in reason


@pytest.mark.parametrize("when", [0, 1, 9 * MS, 10 * MS, 10 * MS + 1, 13 * MS, 200 * MS])
def test_cancellation_at_any_point(when):
    rows = [Row(0, 100, 50, unique(1), cancel=when), Row(0, 100, 50, unique(2)), Row(5 * MS, 700, 2, unique(3))]
    log = replay(SMALL, rows)
    ended = {name: (now, state) for name, now, state, *_ in log.of("ended")}
    assert ended["r1"][1] == ended["r2"][1] == "FINISHED"
    now, state = ended["r0"]
    if when < 60 * MS:
        assert state == "CANCELLED"
        # It leaves with the pass that is under way; between two passes, at once.
        assert now == next((end for start, end, *_ in log.passes if start < when < end), when)
    else:
        assert state == "FINISHED"


def test_a_cancelled_head_lets_the_next_one_in():
    rows = [Row(0, 700, 40, unique(1)), Row(1, 700, 1, unique(2), cancel=20 * MS), Row(2, 16, 1, unique(3))]
    log = replay(SMALL, rows)
    admitted = {name: now for name, now, *_ in log.of("admitted")}
    # The pass under way ends first.
    assert "r1" not in admitted and admitted["r2"] == 21 * MS


def test_real_tokens_are_hit_by_others():
    """What one request generated is found in the next one's prompt."""
    log = Log()
    core = make_core(SMALL, watcher=log, events=True)
    names = algorithm("xxh3")
    first = Job(
        "a", TokenChain(list(range(30)), 16, names), 40, sample=lambda low, high: list(range(1000 + low, 1000 + high))
    )
    core.submit(first, 0)
    now = 0
    core.begin(0)
    while (due := core.next_decision()) is not None:
        now = due
        core.advance(now)
        core.begin(now)
    history = [*range(30), *range(1000, 1040)]
    assert list(first.chain.tokens_of(0, 4) or ()) == history[:64]
    core.submit(Job("b", TokenChain([*history, 5], 16, names), 1, sample=lambda low, high: [0] * (high - low)), now)
    core.begin(now)
    assert log.of("admitted")[1][2] == 64


def test_a_request_given_up_in_its_last_pass_has_no_token_of_it():
    """It is gone before the pass's output is looked at, and its blocks go back before those of others that end with it."""
    log = replay(SMALL, [Row(0, 20, 5, unique(1)), Row(0, 20, 5, unique(2), cancel=13 * MS + 1)])
    assert log.of("ended") == [("r1", 14 * MS, "CANCELLED", 4, "cancelled"), ("r0", 14 * MS, "FINISHED", 5, "")]


def test_a_request_given_up_while_its_prompt_is_computed_has_no_token():
    log = replay(SMALL, [Row(0, 20, 5, unique(1), cancel=3)])
    assert log.of("ended") == [("r0", 10 * MS, "CANCELLED", 0, "cancelled")]


def test_among_equal_priorities_the_first_admitted_is_pushed_out():
    rows = [Row(0, 300, 200, unique(1), priority=1), Row(0, 300, 200, unique(2), priority=1)]
    log = replay(replace(SMALL, num_gpu_blocks=48, scheduling_policy="priority"), rows)
    assert log.of("preempted")[0][0] == "r0"


def test_equals_wait_in_the_order_of_their_ids():
    """Of eleven at one instant r10 comes before r2, as with vLLM."""
    config = replace(SMALL, scheduling_policy="priority", max_num_seqs=1)
    log = replay(config, [Row(0, 20, 1, unique(at)) for at in range(11)])
    assert [name for name, *_ in log.of("admitted")] == ["r0", "r1", "r10", *(f"r{at}" for at in range(2, 10))]


def test_by_priority_a_request_that_preempts_itself_ends_the_pass():
    """r0, the least important, needs a block first and there is none: r1, behind it, has no token in that pass."""
    rows = [Row(0, 16 * 3, 60, unique(1), priority=1), Row(0, 16 * 4, 60, unique(2))]
    log = replay(replace(SMALL, num_gpu_blocks=9, scheduling_policy="priority"), rows)
    ((name, when, *_),) = log.of("preempted")
    assert name == "r0"
    starts = [start for start, *_ in log.passes]
    assert when in starts  # nobody had a token in the first pass, so one was formed anew at the same instant


def test_the_least_important_is_the_last_arrival_of_the_highest_value() -> None:
    def job(name: str, priority: int, arrival: int) -> Job:
        return Job(name, TraceChain(range(4), 4, 16, 4, 1), 1, arrival=arrival, priority=priority)

    jobs = [job("a", 1, 5), job("b", 2, 7), job("c", 2, 9), job("d", 2, 8), job("e", 0, 99)]
    assert least_important(dict(enumerate(jobs))).id == "c"
    twins = [job("f", 3, 4), job("g", 3, 4)]
    assert least_important(dict(enumerate(twins))).id == "f", "of those that came together, the one admitted first"
