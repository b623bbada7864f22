"""Faults of other sizes and kinds than the ten, two at once, and sums that many causes give."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace
from tests.lab.expect.support import ONE, SECOND, conversations, counters, counts, documents, traffic, with_date

from kvyard.lab.expect import Expectation, expect
from kvyard.lab.expect.counted import Counted
from kvyard.replay.traces import TraceRequest

TIERED = {**ONE, "num_gpu_blocks": 420, "host_blocks": 4000}


def agents(sessions: int = 6, steps: int = 10) -> list[TraceRequest]:
    """Agents with a common system prompt of 1,500 tokens, which call a tool at each step."""
    random = Random(2)
    texts = [[*range(3000, 4500), *(random.randrange(10_000, 90_000) for _ in range(100))] for _ in range(sessions)]
    rows: list[TraceRequest] = []
    for step in range(steps):
        for number, text in enumerate(texts):
            call = [random.randrange(10_000, 90_000) for _ in range(40)]
            name, length = f"a{number}.{step}", len(text)
            at, prompt = len(rows) * 2 * SECOND, list(text)
            rows.append(TraceRequest(name, at, length, 40, tokens=prompt, output_tokens=call, session=f"a{number}"))
            text += [*call, *(random.randrange(10_000, 90_000) for _ in range(180))]
    return rows


def passages(count: int = 90) -> list[TraceRequest]:
    """Questions about three of a few passages, in any order."""
    random = Random(4)
    texts = [[random.randrange(10_000, 90_000) for _ in range(300)] for _ in range(9)]
    rows: list[TraceRequest] = []
    for at in range(count):
        chosen = [token for text in random.sample(texts, 3) for token in text]
        tokens = [*range(500, 700), *chosen, *(random.randrange(10_000, 90_000) for _ in range(60))]
        rows.append(TraceRequest(f"p{at}", at * SECOND, len(tokens), 4, tokens=tokens, salt=f"tenant{at % 3}"))
    return rows


def found(rows: list[TraceRequest], told: dict[str, object], counted: Counted | None, **more: object) -> Expectation:
    return expect(traffic(rows), told, counted, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("told", "real"), [(16, 32), (32, 16), (64, 128), (128, 64)])
def test_a_block_size_that_costs_little_is_named_by_what_counts_are_multiples_of(told: int, real: int) -> None:
    rows = agents()
    mine, theirs = ({**ONE, "block_size": size, "num_gpu_blocks": 131_072 // size} for size in (told, real))
    named = found(rows, mine, counts(rows, theirs))
    assert abs(named.owed - (named.counted or 0)) < 0.02 * named.prompt_tokens
    assert named.cause == "block-size" and f"blocks of {real} tokens" in named.sentence


@pytest.mark.parametrize("real", [32, 1056])
def test_a_block_size_that_the_engine_reports_comes_first(real: int) -> None:
    """Even where nothing is found with it."""
    rows = conversations()
    theirs = {**ONE, "block_size": real, "num_gpu_blocks": 131_072 // real}
    named = found(rows, ONE, counters(rows, theirs, block_size=real, enable_prefix_caching=True))
    assert named.cause == "block-size" and named.sentence.startswith(f"The engine reports blocks of {real:,} tokens")


def test_a_cache_that_was_emptied() -> None:
    rows = agents()
    parts = [rows[:20], rows[20:45], rows[45:]]
    by_request = {name: count for part in parts for name, count in counts(part, ONE).by_request.items()}
    named = found(rows, ONE, Counted(source="test", by_request=by_request))
    assert named.cause == "reset" and "From request a2.3" in named.sentence and "2 times" in named.sentence
    some = counts(rows, ONE)
    for row in rows[::10]:
        some.by_request[row.id] = 0
    assert found(rows, ONE, some).cause == "unknown", "requests here and there are no reset"


def test_drafts_told_wrongly() -> None:
    rows = agents()
    plain = {**ONE, "block_size": 64}
    heads = {**plain, "num_speculative_tokens": 2}
    for told, real, word in ((plain, heads, "with a draft head"), (heads, plain, "with no draft head")):
        named = found(rows, told, counts(rows, real))
        assert named.cause == "draft-head" and named.fault and word in named.sentence


def test_sessions_that_share_nothing() -> None:
    rows = agents()
    apart = counts([replace(row, salt=row.session) for row in rows], ONE)
    assert found(rows, ONE, apart).cause == "sessions-apart"


def test_tier_that_is_too_small() -> None:
    rows = agents()
    for blocks in (500, 200):
        named = found(rows, TIERED, counts(rows, {**TIERED, "host_blocks": blocks}))
        assert named.cause == "tier" and "4,000 were configured" in named.sentence, named.sentence


def test_two_faults_at_once() -> None:
    rows = agents()
    small = {**ONE, "num_gpu_blocks": 210}
    assert found(rows, TIERED, counts(rows, small)).cause == "store-only", "in a smaller pool"
    coarse = {**ONE, "block_size": 64, "num_gpu_blocks": 2048}
    assert found(rows, ONE, counts(with_date(rows, at=300), coarse)).cause == "changing-text"


def test_salts_by_tenant_that_the_trace_lacks_are_shown_by_events() -> None:
    rows = documents(90)
    hidden = counts([replace(row, salt=f"tenant{at % 7}") for at, row in enumerate(rows)], ONE)
    assert found(rows, ONE, hidden).cause == "unknown"
    named = found(rows, ONE, hidden, evidence={"salts"})
    assert named.cause == "salts" and "finds less than it owes" in named.sentence


def test_a_sum_that_no_pool_gives_isn_t_called_a_pool() -> None:
    rows = agents()
    dated = with_date(rows, at=300)
    assert found(rows, ONE, counters(dated, ONE)).cause == "unknown", "such a pool doesn't hold the longest request"
    tight = counters(rows, {**ONE, "num_gpu_blocks": 600})
    named = found(rows, ONE, tight)
    assert named.cause == "pool" and "by sums alone" in named.notes[-1]
    tight.facts |= {"num_gpu_blocks": "8193", "block_size": "16"}
    assert found(rows, ONE, tight).cause == "unknown", "the engine has all its blocks"


def test_nothing_found_by_an_engine_that_doesn_t_say_if_caching_is_on() -> None:
    rows = conversations()
    named = found(rows, ONE, counts(with_date(rows, at=5), ONE))
    assert named.cause == "caching-off" and "nothing here says if caching is on" in named.sentence


def test_passages_in_another_order_are_no_text_that_changes() -> None:
    rows = passages()
    named = found(rows, ONE, None)
    assert named.cause == "moved-text" and not named.fault
    assert found(with_date(agents(), at=300), ONE, None).cause == "changing-text"
