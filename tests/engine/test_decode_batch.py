"""The decode batch: one counter of passes stands for one step of every job in each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.job import Job, JobState
from kvyard.hashing import TraceChain

SIZE = 16


def make() -> tuple[DecodeBatch, BlockManager]:
    return DecodeBatch(needs_longest=True), BlockManager(1000, [GroupSpec(block_size=SIZE)])


def decoding(batch: DecodeBatch, manager: BlockManager, serial: int, prompt: int, output: int) -> Job:
    """A job that has its first token, joined to ``batch``; it needs its block manager for new blocks only."""
    job = Job(str(serial), TraceChain((serial,), 512, prompt, SIZE, serial), output)
    assert manager.allocate(job, prompt) is not None
    job.serial, job.running, job.defers, job.num_computed_tokens = serial, True, True, prompt
    manager.note_limits(job)
    job.emit(1)
    batch.join(job)
    return job


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(2, 60), st.integers(0, 9)), min_size=1, max_size=8))
def test_a_batch_counts_as_single_steps_do(rows):
    """Jobs (prompt, output, the pass in which they join) against each job's own arithmetic."""
    (batch, manager), jobs, ended = make(), [], []
    left = sorted(range(len(rows)), key=lambda at: (rows[at][2], at))
    while left or batch.count:
        while left and rows[left[0]][2] <= batch.tick:
            at = left.pop(0)
            jobs.append((decoding(batch, manager, at, *rows[at][:2]), batch.tick))
        alive = [(job, joined) for job, joined in jobs if job.state is JobState.DECODE and job not in ended]
        assert batch.count == len(alive)
        assert batch.context == sum(job.num_prompt_tokens + batch.tick - joined + 1 for job, joined in alive)
        lengths = [job.num_prompt_tokens + batch.tick - joined + 1 for job, joined in alive]
        assert batch.longest() == max(lengths, default=0)
        due = batch.due()
        assert [job.serial for job in due] == sorted(
            job.serial for job, joined in alive if (job.num_prompt_tokens + batch.tick - joined) % SIZE == 0
        )
        for job in due:
            assert manager.allocate(job, 1) is not None
            batch.watch(job, batch.tick + 1)
        expected = [job for job, joined in alive if batch.tick + 2 - joined == job.max_tokens]
        assert batch.next_end() == min((joined + job.max_tokens - 1 for job, joined in alive), default=None)
        batch.advance(1)
        done = batch.finished()
        assert done == sorted(expected, key=lambda job: job.serial)
        assert all(job.output == job.max_tokens for job in done)
        ended += done


def test_a_job_that_left_and_came_back_is_due_once():
    batch, manager = make()
    job = decoding(batch, manager, 1, 16, 9)
    assert batch.next_touch() == 0
    batch.leave(job)
    assert batch.next_touch() is None and not batch.count and not batch.context
    batch.join(job)
    assert batch.due() == [job] and batch.due() == []


def test_blocks_of_many_passes_are_dealt_out_by_pass_then_by_admission():
    batch, manager = make()
    first, second = decoding(batch, manager, 1, 16, 99), decoding(batch, manager, 2, 30, 99)
    assert batch.due_before(40, SIZE) == [first, second, first, second, first, second]
    assert (first.touch, second.touch) == (48, 50)


def test_void_entries_are_swept():
    batch, manager = make()
    jobs = [decoding(batch, manager, serial, 20, 5000) for serial in range(100)]
    for job in jobs[1:]:
        batch.leave(job)
    assert len(batch._ends) < 70 and batch.next_end() == jobs[0].end


def test_a_preempted_job_has_its_new_place() -> None:
    """Though an entry from before is for the same pass."""
    batch, manager = make()
    early = decoding(batch, manager, 1, SIZE - 1, 50)
    batch.leave(early)
    manager.preempt(early)
    decoding(batch, manager, 2, SIZE - 1, 50)
    assert manager.allocate(early, SIZE - 1) is not None
    early.serial, early.running, early.num_computed_tokens = 3, True, SIZE - 1
    manager.note_limits(early)
    batch.join(early)
    batch.advance(1)
    assert [job.serial for job in batch.due()] == [2, 3]


def test_a_job_that_joins_after_its_pass_was_formed_is_due_behind_those_before_it():
    """As a request with a whole prompt from a prefill worker does: its first pass is in flight as it joins."""
    batch, manager = make()
    first = decoding(batch, manager, 1, SIZE - 1, 40)
    late = decoding(batch, manager, 2, SIZE, 40)
    batch.advance(1)
    assert batch.due() == [first, late]
