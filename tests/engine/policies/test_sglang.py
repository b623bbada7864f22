"""The SGLang policy: prompts first, a budget of tokens, retraction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Row, drive, replay, trace_job

from kvyard.blocks.spec import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.policies import sglang_order
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_budget import NewTokenRatio

CONFIG = EngineConfig(backend="sglang", block_size=16, num_gpu_blocks=100)


def with_settings(config, **options):
    return replace(config, sglang=SglangSettings(**options))


def order(log):
    return [name for name, *_ in log.of("admitted")]


def test_a_pass_has_prompts_or_decode_steps():
    rows = [Row(at * 9_000_000, 150, 40, (at,)) for at in range(6)]
    log = replay(CONFIG, rows)
    mixed = replay(EngineConfig(block_size=16, num_gpu_blocks=100), rows)
    assert all(
        not chunks or not decoding for _, _, chunks, decoding in log.passes if chunks and isinstance(chunks[0], tuple)
    )
    assert any(
        chunks and decoding for _, _, chunks, decoding in mixed.passes if chunks and isinstance(chunks[0], tuple)
    )


def test_decoding_waits_while_prompts_come():
    rows = [Row(0, 100, 2, (1,)), *(Row(1_000_000, 1000, 1, (10 + at, 30 + at)) for at in range(4))]
    log = replay(with_settings(replace(CONFIG, num_gpu_blocks=400), chunked_prefill_size=512), rows)
    ends = {name: now for name, now, *_ in log.of("ended")}
    assert ends["r0"] > max(ends[f"r{at}"] for at in range(1, 5))


def test_room_is_set_aside_for_the_output_of_others():
    rows = [Row(0, 100, 1000, (1,)), Row(20_000_000, 800, 10, (2, 3))]
    early = replay(with_settings(CONFIG, schedule_conservativeness=0.1), rows)
    late = replay(with_settings(CONFIG, schedule_conservativeness=1.0), rows)
    entered = [next(now for name, now, *_ in log.of("admitted") if name == "r1") for log in (early, late)]
    assert entered[0] < entered[1]


def test_the_ratio_falls_with_decode_passes_and_starts_anew_on_retraction():
    ratio = NewTokenRatio(1.0)
    assert ratio.current == 0.7
    ratio.decay(600)
    assert ratio.current == pytest.approx(0.7 * 0.14)
    ratio.decay(5000)
    assert ratio.current == pytest.approx(0.7 * 0.14)
    ratio.estimate(produced=100, wanted=399, requests=5)
    assert ratio.current == 0.5
    ratio.decay(1)
    assert ratio.current == pytest.approx(0.5 - 0.7 * 0.86 / 600)
    ratio.estimate(produced=100, wanted=100, requests=5)
    assert ratio.current == 1.0
    ratio.reset()
    assert ratio.current == 0.7


def test_the_one_with_the_least_output_is_retracted_and_queues_up_again():
    rows = [Row(0, 320, 300, (1,)), Row(500_000_000, 320, 300, (2,)), Row(500_000_001, 300, 5, (3,))]
    config = with_settings(replace(CONFIG, num_gpu_blocks=60), schedule_conservativeness=0.0, clip_max_new_tokens=10)
    log = replay(config, rows)
    assert [name for name, *_ in log.of("preempted")] == ["r1"]
    again = [(name, cached) for name, _, cached, _ in log.of("admitted")]
    assert [name for name, _ in again] == ["r0", "r1", "r2", "r1"]


@pytest.mark.parametrize("ahead", [False, True])
def test_between_decode_passes_arrivals_are_looked_for_every_so_often(ahead):
    rows = [Row(0, 100, 200, (1,)), *(Row(at, 100, 3, (at,)) for at in (100_000_001, 300_000_001, 301_000_000))]

    def passes_before(interval):
        config = with_settings(replace(CONFIG, async_scheduling=ahead), scheduler_recv_interval=interval)
        decoded, found = 0, []
        for _, _, chunks, decoding in replay(config, rows).passes:
            prompts = chunks and isinstance(chunks[0], tuple)
            if prompts:
                found.append((decoded, len(chunks)))
                decoded = 0
            elif decoding:
                decoded += 1
        return found

    each = passes_before(1)
    assert len(each) >= 3
    seldom = passes_before(25)
    assert seldom[0] == (0, 1), "an idle engine looks at once"
    assert all(decoded % 25 in (0, 1) for decoded, _ in seldom[1:]) and len(seldom) <= len(each)
    assert sum(count for _, count in seldom) == 4


def test_an_arrival_that_was_not_looked_for_can_be_cancelled():
    rows = [Row(0, 100, 200, (1,)), Row(100_000_001, 100, 3, (2,), cancel=20_000_000)]
    log = replay(with_settings(replace(CONFIG, async_scheduling=False), scheduler_recv_interval=50), rows)
    assert [name for name, *_ in log.of("admitted")] == ["r0"]
    assert [name for name, *_ in log.of("ended")] == ["r1", "r0"]


def test_longest_prefix_first():
    # r1 takes the room until all others have come; of those, r4 is mostly cached.
    rows = [Row(0, 512, 1, (1,)), Row(100_000_000, 700, 20, (5, 6))]
    rows += [Row(101_000_000 + at, 600 + at, 5, (20 + at, 30 + at)) for at in range(2)]
    rows.append(Row(102_000_000, 520, 5, (1, 2)))
    assert order(replay(CONFIG, rows)) == ["r0", "r1", "r2", "r3", "r4"]
    assert order(replay(with_settings(CONFIG, schedule_policy="lpm"), rows)) == ["r0", "r1", "r4", "r2", "r3"]


def test_many_waiting_come_in_order(monkeypatch):
    monkeypatch.setattr(sglang_order, "LONGEST_SORTED", 1)
    rows = [Row(0, 512, 1, (1,)), Row(100_000_000, 700, 20, (5, 6))]
    rows += [Row(101_000_000 + at, 600 + at, 5, (20 + at, 30 + at)) for at in range(2)]
    rows.append(Row(102_000_000, 520, 5, (1, 2)))
    assert order(replay(with_settings(CONFIG, schedule_policy="lpm"), rows)) == ["r0", "r1", "r2", "r3", "r4"]


def test_of_those_that_begin_alike_one_goes_first():
    rows = [Row(0, 700, 20, (5, 6)), Row(1, 500, 5, (7,)), Row(2, 501, 5, (7,)), Row(3, 502, 5, (8,))]
    config = with_settings(replace(CONFIG, num_gpu_blocks=400), schedule_policy="lpm", chunked_prefill_size=704)
    log = replay(config, rows)
    assert order(log) == ["r0", "r1", "r3", "r2"]
    cached = {name: cached for name, _, cached, _ in log.of("admitted")}
    assert cached["r2"] == 496  # and the other then finds what it computed


def test_a_prompt_longer_than_a_chunk_waits_until_it_fits_whole():
    # Nothing is set aside, so its first chunk would fit at once.
    config = with_settings(
        replace(CONFIG, num_gpu_blocks=40),
        schedule_conservativeness=0.0,
        chunked_prefill_size=256,
        max_prefill_tokens=256,
    )
    log = replay(config, [Row(0, 200, 300, (1,)), Row(30_000_000, 600, 20, (2, 3))])
    ended = {name: now for name, now, *_ in log.of("ended")}
    assert next(now for name, now, *_ in log.of("admitted") if name == "r1") >= ended["r0"]
    assert log.of("preempted") == []


def test_output_is_cut_to_the_pool():
    jobs = drive(make_core(replace(CONFIG, num_gpu_blocks=20)), [Row(0, 100, 5000, (1,))])
    assert jobs[0].output == 19 * 16 - 112 - 1


def test_a_prompt_without_room_for_an_answer_is_turned_away():
    log = replay(replace(CONFIG, num_gpu_blocks=20), [Row(0, 304, 1, (1,))])
    assert log.of("ended")[0][2] == "REJECTED"


def test_pages_are_found_when_they_have_been_computed():
    rows = [Row(0, 500, 1, (1,)), Row(0, 501, 1, (1,)), Row(10**9, 502, 1, (1,))]
    cached = {name: cached for name, _, cached, _ in replay(CONFIG, rows).of("admitted")}
    assert cached == {"r0": 0, "r1": 0, "r2": 496}


def test_windows_and_full_attention_share_the_memory():
    """A hybrid model's blocks are divided, and every window page is somewhere after every pass."""
    window = GroupSpec(kind="sliding_window", block_size=16, window=64)
    config = replace(CONFIG, block_size=None, groups=(GroupSpec(block_size=16), window, window), num_gpu_blocks=260)
    core = make_core(with_settings(config, chunked_prefill_size=256))
    windows = core.scheduler.manager.pool.windows
    assert core.scheduler.manager.pool.num_blocks == 101
    assert windows.size == 80
    assert windows.window == 63
    rows = [Row(at * 3_000_000, 200 + 37 * (at % 9), 5 + 40 * (at % 4), (at % 5, at % 3, at)) for at in range(40)]
    jobs = drive(core, rows, check=True)
    assert all(job.output == row.output for job, row in zip(jobs, rows, strict=True))
    assert windows.free + windows.evictable == 80


def drafting(rates, *, eagle=True, **options):
    """Settings with drafts that hold by ``rates``."""
    drafts = SpeculativeConfig(num_speculative_tokens=len(rates), acceptance_rates=tuple(rates), eagle=eagle)
    return replace(with_settings(CONFIG, **options), speculative=drafts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [40, 400])
def test_drafts_that_hold_end_answers_sooner(overlap, pages):
    rows = [Row(at * 3_000_000, 100 + 37 * (at % 9), 5 + 40 * (at % 4), (at % 5, at)) for at in range(30)]
    passes = {}
    for rates in ((0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)):
        config = replace(drafting(rates), num_gpu_blocks=pages, async_scheduling=overlap)
        core = make_core(config)
        jobs = drive(core, rows, check=True)
        assert all(job.output == row.output for job, row in zip(jobs, rows, strict=True))
        passes[rates[0]] = core.passes
    assert passes[1.0] < passes[0.5] < passes[0.0]


def test_eagle_caches_pairs_of_tokens_and_others_tokens():
    """A page of pairs is known with the token after it, so that a prompt of whole pages leaves its last page out."""
    rows = [Row(0, 512, 1, (1,)), Row(10**9, 513, 1, (1, 2)), Row(2 * 10**9, 700, 1, (1, 2))]
    for eagle, found in ((True, [0, 496, 512]), (False, [0, 512, 512])):
        log = replay(drafting((0.5,), eagle=eagle), rows)
        assert [cached for _, _, cached, _ in log.of("admitted")] == found


def test_slots_are_reserved_for_the_drafts_of_two_passes():
    """Three drafts and the token before them are verified in a pass; twice four slots need a page more than the prompt has."""
    core = make_core(drafting((0.0, 0.0, 0.0)))
    core.submit(trace_job(0, Row(0, 90, 5, (1,)), 16), 0)
    core.begin(0)
    assert core.scheduler.manager.pool.free == 100 - 6
    core.advance(core.next_decision())
    core.begin(core.next_decision() or 10**9)
    assert core.scheduler.manager.pool.free == 100 - 7
