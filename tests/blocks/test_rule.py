"""The rules of each kind of attention: worked examples from vLLM's own tests, and naive scans that they must agree with."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvyard.blocks import GroupSpec
from kvyard.blocks.attention.chunked import ChunkRule
from kvyard.blocks.attention.state import StateRule
from kvyard.blocks.attention.window import WindowRule
from kvyard.blocks.rule import Rule, RuleMatch
from kvyard.blocks.spans import Spans, clip, intersect


def spans_of(flags: list[bool]) -> list[tuple[int, int]]:
    """The intervals of positions whose flag is set."""
    found = []
    for present, run in itertools.groupby(enumerate(flags), key=lambda item: item[1]):
        if present:
            positions = [position for position, _ in run]
            found.append((positions[0], positions[-1] + 1))
    return found


def flags_of(pattern: str) -> list[bool]:
    return [letter == "T" for letter in pattern]


def window(tokens: int, size: int = 2) -> WindowRule:
    return WindowRule(size, tokens)


def chunk(tokens: int, size: int = 2) -> ChunkRule:
    return ChunkRule(size, tokens)


def state(size: int = 2) -> StateRule:
    return StateRule(size)


FULL = Rule(2)


# -- hits: worked examples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("FFFFFFFFFF", 0),
        ("T", 1),
        ("TF", 1),
        ("TT", 2),
        ("TTF", 2),
        ("TTT", 3),
        ("TTTF", 3),
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("TTFTFFTTFFFT", 8),
    ],
)
def test_sliding_window_possible_cached_prefix(pattern: str, blocks: int) -> None:
    """Block size 2, window 4: a hit rests on two blocks, or on what there is at the very start."""
    match = window(4).match(spans_of(flags_of(pattern)), 2 * len(pattern), 2, False)
    assert match == RuleMatch(2 * blocks, max(0, blocks - 2))


CHUNK_CASES = [
    ("T", 0, 1), ("T", 1, 1),
    ("TF", 0, 2), ("TF", 1, 2), ("TT", 0, 2), ("TT", 1, 2),
    ("TTF", 0, 2), ("TTF", 1, 2), ("TTT", 0, 3), ("TTT", 1, 3),
    ("TTTF", 0, 4), ("TTTF", 1, 4),
    ("TTFFTFTFT", 1, 9), ("TTFFTFTFF", 1, 8),
    ("FFFFFFFFTT", 1, 10), ("TTTTTTTTTF", 0, 10), ("TTTTTTTTTF", 1, 10), ("FTFTFTFTFT", 0, 10), ("FTFTFTFTFT", 1, 10),
    ("TFTFTFTFFF", 0, 10), ("TFTFTFTFFF", 1, 10),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "tail", "blocks"), CHUNK_CASES)
def test_chunked_local_attention_possible_cached_prefix(pattern: str, tail: int, blocks: int) -> None:
    """Block size 2, chunk 4: what lies before the chunk counts as there, whatever is cached of it."""
    limit = 2 * len(pattern) + tail
    match = chunk(4).match(spans_of(flags_of(pattern)), limit, 2, False)
    assert match == RuleMatch(2 * blocks, limit // 4 * 2)


@pytest.mark.parametrize(
    ("pattern", "limit", "alignment", "drop", "tokens"),
    [
        ("", 10, 2, False, 0),
        ("TTT", 6, 2, False, 6),
        ("TTT", 5, 2, False, 4),
        ("TTT", 6, 4, False, 4),
        ("FTT", 6, 2, False, 0),
        ("TFT", 6, 2, False, 2),
        ("TTT", 6, 2, True, 4),
        ("T", 6, 2, True, 0),
        ("FTT", 6, 2, True, 0),
        ("TTTT", 8, 4, True, 4),
        ("TTTTT", 10, 4, True, 8),
    ],
)
def test_full_attention_hits_an_unbroken_prefix(
    pattern: str, limit: int, alignment: int, drop: bool, tokens: int
) -> None:
    assert FULL.match(spans_of(flags_of(pattern)), limit, alignment, drop) == RuleMatch(tokens, 0)


@pytest.mark.parametrize(
    ("pattern", "limit", "alignment", "tokens", "low"),
    [
        ("FFF", 6, 2, 0, 0),
        ("TFF", 6, 2, 2, 0),
        ("TFT", 6, 2, 6, 2),
        ("TFT", 5, 2, 2, 0),
        ("TTT", 6, 4, 4, 1),
        ("FFTF", 8, 4, 0, 0),
        ("FTTF", 8, 4, 4, 1),
    ],
)
def test_one_state_is_enough(pattern: str, limit: int, alignment: int, tokens: int, low: int) -> None:
    spans = spans_of(flags_of(pattern))
    for drop in (False, True):  # draft heads have no states, so there is nothing to drop
        assert state().match(spans, limit, alignment, drop) == RuleMatch(tokens, low)


@pytest.mark.parametrize(
    ("pattern", "drop", "alignment", "tokens"),
    [
        ("TTTF", True, 2, 4),  # three in a row are needed, the last is given up
        ("TTF", True, 2, 2),  # a short prefix is complete by itself, and gives up its last block too
        ("T", True, 2, 0),
        ("FTTT", True, 2, 6),
        ("FFTT", True, 2, 0),
        ("FTTFTTT", True, 4, 12),  # without the block it drops it ends where it may
        ("FTTFTT", True, 4, 0),
        ("FTTTTTF", True, 4, 8),
        ("TTFTT", False, 4, 4),
        ("FTTT", False, 4, 8),
    ],
)
def test_window_hits_with_draft_heads_and_alignment(pattern: str, drop: bool, alignment: int, tokens: int) -> None:
    assert window(4).match(spans_of(flags_of(pattern)), 2 * len(pattern), alignment, drop).tokens == tokens


# -- hits: naive scans ------------------------------------------------------------------------------------------------


def scan_full(flags: list[bool], size: int, limit: int, alignment: int, drop: bool) -> int:
    """From the left until the first miss; one unit less for a draft head; rounded down."""
    blocks = 0
    while blocks < min(len(flags), limit // size) and flags[blocks]:
        blocks += 1
    tokens = blocks * size
    if drop and tokens:
        tokens -= min(alignment, size)
    return tokens // alignment * alignment


def scan_window(flags: list[bool], size: int, width: int, limit: int, alignment: int, drop: bool) -> tuple[int, int]:
    """From the right, as vLLM does it block by block."""
    need = math.ceil((width - 1) / size) + drop
    count = 0
    for position in reversed(range(min(len(flags), limit // size))):
        if not flags[position]:
            count = 0
            continue
        if count == 0 and (position + 1 - drop) * size % alignment:
            continue
        count += 1
        if count >= need:
            return (position + count - drop) * size, position
    tokens = count * size // alignment * alignment
    if drop and tokens:
        tokens = (tokens - size) // alignment * alignment
    return tokens, 0


def scan_chunk(flags: list[bool], size: int, length: int, limit: int) -> int:
    blocks = limit // length * length // size
    while blocks < min(len(flags), limit // size) and flags[blocks]:
        blocks += 1
    return blocks * size


def scan_state(flags: list[bool], size: int, limit: int, alignment: int) -> int:
    for position in reversed(range(min(len(flags), limit // size))):
        if flags[position] and (position + 1) * size % alignment == 0:
            return (position + 1) * size
    return 0


patterns = st.lists(st.booleans(), max_size=24)
sizes = st.sampled_from([1, 2, 4])
scales = st.sampled_from([1, 1, 2, 3])


@given(patterns, sizes, scales, st.integers(0, 8), st.booleans())
def test_full_attention_equals_a_scan(flags: list[bool], size: int, scale: int, short: int, drop: bool) -> None:
    limit, alignment = max(0, len(flags) * size - short), size * scale
    rule = Rule(size)
    assert rule.match(spans_of(flags), limit, alignment, drop) == RuleMatch(
        scan_full(flags, size, limit, alignment, drop), 0
    )


@given(patterns, sizes, scales, st.integers(1, 30), st.integers(0, 8), st.booleans())
@example([True] * 4, 2, 1, 1, 0, False)
def test_window_equals_a_scan(flags: list[bool], size: int, scale: int, width: int, short: int, drop: bool) -> None:
    limit, alignment = max(0, len(flags) * size - short), size * scale
    match = window(width, size).match(spans_of(flags), limit, alignment, drop)
    assert (match.tokens, match.low) == scan_window(flags, size, width, limit, alignment, drop)


@given(patterns, sizes, st.integers(1, 8), st.integers(0, 8))
def test_chunk_equals_a_scan(flags: list[bool], size: int, blocks: int, short: int) -> None:
    limit, length = max(0, len(flags) * size - short), blocks * size
    match = chunk(length, size).match(spans_of(flags), limit, size, False)
    assert match == RuleMatch(scan_chunk(flags, size, length, limit), limit // length * length // size)


@given(patterns, sizes, scales, st.integers(0, 8))
def test_state_equals_a_scan(flags: list[bool], size: int, scale: int, short: int) -> None:
    limit, alignment = max(0, len(flags) * size - short), size * scale
    tokens = scan_state(flags, size, limit, alignment)
    assert state(size).match(spans_of(flags), limit, alignment, False) == RuleMatch(tokens, max(0, tokens // size - 1))


# -- what is stale ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "computed", "blocks"),
    [
        *((window(4), computed, blocks) for computed, blocks in [(0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)]),
        *((chunk(4), computed, blocks) for computed, blocks in [(0, 0), (4, 2), (6, 2), (12, 6)]),
        *((state(), computed, blocks) for computed, blocks in [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]),
        *((FULL, computed, 0) for computed in [0, 4, 1000]),
    ],
)
def test_which_blocks_are_skipped(rule: Rule, computed: int, blocks: int) -> None:
    """As vLLM's tests have it: block size 2, window and chunk 4."""
    assert rule.stale(computed) // 2 == blocks


@given(
    st.one_of(
        st.builds(window, st.integers(1, 20), sizes),
        st.builds(lambda blocks, size: chunk(blocks * size, size), st.integers(1, 5), sizes),
        st.builds(chunk, st.integers(1, 20), sizes),
        st.builds(state, sizes),
        st.just(FULL),
    ),
    st.integers(0, 20),
    st.integers(0, 60),
)
def test_fresh_until_is_the_inverse_of_stale(rule: Rule, position: int, computed: int) -> None:
    """A block is in use up to that many computed tokens, and stale from the next on."""
    in_use = rule.stale(computed) < (position + 1) * rule.block_size
    assert in_use == (computed <= rule.fresh_until(position))


# -- the admission cap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "in_flight", "longest", "blocks"),
    [
        (window(9, 4), 0, 1000, 3),  # 8 tokens are 2 blocks; one more, since a window need not start at a block's edge
        (window(9, 4), 6, 1000, 5),  # 14 tokens are 4 blocks
        (window(9, 4), 6, 10, 4),  # no request is longer than 10 tokens, which is 3 blocks
        (window(1, 4), 0, 1000, 1),
        (chunk(8, 4), 0, 1000, 2),
        (chunk(8, 4), 5, 1000, 4),
        (chunk(8, 4), 5, 10, 3),
        (FULL, 5, 10, None),
        (state(), 5, 10, None),
    ],
)
def test_admission_cap(rule: Rule, in_flight: int, longest: int, blocks: int | None) -> None:
    assert rule.cap(in_flight, longest) == blocks


@given(st.integers(1, 20), sizes, st.integers(1, 12), st.data())
def test_a_window_never_holds_more_than_its_cap(width: int, size: int, step: int, data: st.DataObject) -> None:
    """Computed so many tokens at a time, releasing what is stale before each step: that is what the cap is for."""
    rule = window(width, size)
    cap = rule.cap(step, 1 << 20)
    assert cap is not None
    computed = 0
    for _ in range(12):
        count = data.draw(st.integers(1, step))
        held = math.ceil((computed + count) / size) - rule.stale(computed) // size
        assert held <= cap
        computed += count


# -- what is worth registering ----------------------------------------------------------------------------------------


def kept_by(
    rule: Rule, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: list[int]
) -> list[int]:
    kept = rule.worth(0, last, alignment, eagle, retention, boundaries)
    spans: Spans = [(0, last)] if kept is None else kept
    return [position for low, high in spans for position in range(low, high)]


@pytest.mark.parametrize(
    ("rule", "last", "alignment", "eagle", "retention", "boundaries", "kept"),
    [
        # Window of one block's width, block size 16: the blocks at the end of each stretch of 64 tokens.
        (window(16, 16), 16, 64, False, None, [], [3, 7, 11, 15]),
        (window(33, 16), 16, 64, False, None, [], [2, 3, 6, 7, 10, 11, 14, 15]),
        (window(80, 16), 8, 64, False, None, [], list(range(8))),
        (window(16, 16), 16, 64, True, None, [], [3, 4, 7, 8, 11, 12, 15]),
        # Every 64 tokens and where a resend of 193 tokens resumes.
        (window(16, 16), 12, 16, False, 64, [192], [3, 7, 11]),
        (window(16, 16), 12, 16, False, 0, [192], [11]),
        (window(33, 16), 12, 16, False, 0, [192, 100], [4, 5, 10, 11]),
        (window(16, 16), 12, 16, False, 0, [], []),
        (window(16, 16), 12, 16, True, 0, [160], [9, 10]),
        # A boundary beyond what is registered now is none of today's business.
        (window(16, 16), 6, 16, False, 0, [192], []),
        (state(16), 6, 16, False, None, [], list(range(6))),
        (state(16), 6, 16, False, 16, [], list(range(6))),
        (state(16), 6, 16, False, 32, [], [1, 3, 5]),
        (state(16), 6, 16, False, 32, [16], [0, 1, 3, 5]),
        (state(16), 6, 16, False, 0, [95], [4]),
        (state(16), 6, 32, False, 0, [95], [3]),
        (state(16), 6, 16, False, 0, [1000], []),
        (FULL, 6, 2, False, 0, [3], list(range(6))),
        (chunk(4), 6, 2, False, 0, [3], list(range(6))),
    ],
)
def test_worth(
    rule: Rule, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: list[int], kept: list[int]
) -> None:
    assert kept_by(rule, last, alignment, eagle, retention, boundaries) == kept


def worth_of_window(
    position: int, size: int, width: int, alignment: int, eagle: bool, retention: int | None, boundaries: list[int]
) -> bool:
    """Block by block: the last ``need`` of each segment, and those before each boundary."""
    need = math.ceil((width - 1) / size) + eagle
    segment = alignment if retention is None else retention
    if segment:
        per = segment // size
        if need >= per or (position >= eagle and (position - eagle) % per >= per - need):
            return True
    ends = [] if retention is None else [boundary // alignment * alignment // size + eagle for boundary in boundaries]
    return any(end - need <= position < end for end in ends)


def worth_of_state(position: int, size: int, alignment: int, retention: int | None, boundaries: list[int]) -> bool:
    if retention is None or (retention and retention <= size):
        return True
    if retention and (position + 1) * size % retention == 0:
        return True
    return any(boundary // alignment * alignment // size - 1 == position for boundary in boundaries)


bounds = st.lists(st.integers(0, 100), max_size=3)


@given(st.integers(0, 20), st.integers(0, 12), sizes, scales, st.integers(1, 20), st.booleans(), bounds, st.data())
def test_worth_of_a_window_equals_a_scan(
    first: int, count: int, size: int, scale: int, width: int, eagle: bool, boundaries: list[int], data: st.DataObject
) -> None:
    alignment = size * scale
    retention = data.draw(st.sampled_from([None, 0, alignment, 3 * alignment]))
    kept = window(width, size).worth(first, first + count, alignment, eagle, retention, boundaries)
    scanned = [worth_of_window(at, size, width, alignment, eagle, retention, boundaries) for at in range(first + count)]
    expected = [at for at in range(first, first + count) if scanned[at]]
    spans = [(first, first + count)] if kept is None else kept
    assert [at for low, high in spans for at in range(low, high)] == expected


@given(st.integers(0, 20), sizes, scales, st.integers(1, 20), st.booleans(), st.data())
def test_keeps_all_is_true_if_all_blocks_are_worth_registering(
    first: int, size: int, scale: int, width: int, eagle: bool, data: st.DataObject
) -> None:
    """And what doesn't leaves something out, sooner or later."""
    alignment = size * scale
    retention = data.draw(st.sampled_from([None, 0, alignment, 3 * alignment]))
    rule = data.draw(st.sampled_from([window(width, size), chunk(width, size), state(size), FULL]))
    kept = rule.worth(first, first + 200, alignment, eagle, retention, [])
    assert (kept is None) == rule.keeps_all(alignment, eagle, retention)
    assert kept is None or kept != [(first, first + 200)]


@given(st.integers(0, 20), st.integers(0, 12), sizes, scales, bounds, st.data())
def test_worth_of_states_equals_a_scan(
    first: int, count: int, size: int, scale: int, boundaries: list[int], data: st.DataObject
) -> None:
    alignment = size * scale
    retention = data.draw(st.sampled_from([None, 0, alignment, 3 * alignment]))
    kept = state(size).worth(first, first + count, alignment, False, retention, boundaries)
    expected = [at for at in range(first, first + count) if worth_of_state(at, size, alignment, retention, boundaries)]
    spans = [(first, first + count)] if kept is None else kept
    assert [at for low, high in spans for at in range(low, high)] == expected


@given(st.integers(2, 20), sizes, scales, st.booleans(), st.integers(1, 24), st.integers(0, 30))
def test_registered_blocks_suffice_for_every_hit(
    width: int, size: int, scale: int, eagle: bool, blocks: int, short: int
) -> None:
    """Leaving out what ``worth`` leaves out never shortens a hit. (A window of one token needs no block and keeps none,
    yet a lookup wants to see one: like vLLM's, such a group never hits.)"""
    rule, alignment = window(width, size), size * scale
    kept = set(kept_by(rule, blocks, alignment, eagle, None, []))
    limit = max(0, blocks * size - short)
    all_there = rule.match([(0, blocks)], limit, alignment, eagle)
    thinned = rule.match(spans_of([at in kept for at in range(blocks)]), limit, alignment, eagle)
    assert thinned.tokens == all_there.tokens


# -- intervals --------------------------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def inside(spans: Spans) -> set[int]:
    return {at for low, high in spans for at in range(low, high)}


@given(intervals, st.integers(0, 30), st.integers(0, 30))
def test_clip(raw: list[tuple[int, int]], first: int, last: int) -> None:
    clipped = clip(raw, first, last)
    assert inside(clipped) == {at for at in inside(raw) if first <= at < last}
    assert all(low < high for low, high in clipped)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(clipped)), "touching intervals are joined"


@given(patterns, patterns)
def test_intersect(left: list[bool], right: list[bool]) -> None:
    both = intersect(spans_of(left), spans_of(right))
    assert both == spans_of([one and other for one, other in zip(left, right, strict=False)])


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("full", Rule),
        ("mla", Rule),
        ("cross", Rule),
        ("sliding_window", WindowRule),
        ("sliding_window_mla", WindowRule),
        ("chunked_local", ChunkRule),
        ("mamba", StateRule),
    ],
)
def test_each_kind_has_its_rule(kind: str, rule: type[Rule]) -> None:
    made = GroupSpec(kind=kind, window=4, chunk=4, block_size=2).rule()
    assert type(made) is rule
    assert made.keeps_all(2, False, 0) == (rule in (Rule, ChunkRule))
