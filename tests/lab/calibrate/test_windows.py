"""Passes from what clients saw. The oracle is an engine's own log of its passes."""

from __future__ import annotations

import json
import lzma
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from benchmarks.h200_engine import DATA

from kvyard.engine.timing.fitting import errors_by_kind, rough_fit, row_errors
from kvyard.lab.calibrate.passes import read_passes
from kvyard.lab.calibrate.windows import lone_prompts, windows
from kvyard.lab.validate.reading import MeasuredRequest, read_run
from kvyard.replay.traces import TraceRequest

MS = 1_000_000


def answered(at: int, new: int, times: list[int], cached: int | None = None) -> MeasuredRequest:
    gaps = [(after - before) * MS for before, after in pairwise(times)]
    return MeasuredRequest(
        request=TraceRequest(str(at), at * MS, new, len(times)),
        first_token=times[0] * MS,
        ended=times[-1] * MS,
        cached=cached,
        gaps=gaps,
    )


def test_an_answer_is_passes_and_others_are_in_them() -> None:
    long = answered(0, 100, [20, 30, 40, 75, 85, 95])
    short = answered(45, 512, [75, 85], cached=128)  # its prompt was computed in the pass that ends at 75
    first, mixed, rest = windows([long, short])
    assert (first.shape, first.ms, first.others) == (((), 1, 102, 102), 20.0, ((1.0, ((), 1, 102, 102)),))
    assert mixed.kind == "mixed"
    assert mixed.shape == (((384, 128),), 1, 103, 103)
    assert (mixed.ms, mixed.others) == (45.0, ((1.0, ((), 2, 104 + 513, 513)),))
    assert (rest.shape, rest.ms) == (((), 1, 105, 105), 10.0)


def test_tokens_that_came_together() -> None:
    one = answered(0, 10, [20, 30, 50, 60])
    late = msgspec.structs.replace(one, request=TraceRequest("0", 0, 10, 5))  # one of its five came with another, at 50
    (row,) = windows([late])
    assert (row.ms, row.shape[1], sum(times for times, _ in row.others)) == (40.0, 1, 3.0)


def test_an_answer_of_two_tokens_is_seen_where_only_its_ends_are_known() -> None:
    rough = msgspec.structs.replace(answered(0, 10, [20, 30]), gaps=None)
    (row,) = windows([rough])
    assert (row.ms, row.shape[1]) == (10.0, 1)
    assert windows([msgspec.structs.replace(answered(0, 10, [20]), gaps=None)]) == []


def test_a_long_prompt_is_computed_in_parts() -> None:
    long = answered(0, 10, [20, 30, 60, 75, 85])
    late = answered(25, 300, [75])
    rows = windows([long, late], budget=201)
    parts = [shape for row in rows for shape in (row.shape, *(other for _, other in row.others)) if shape[0]]
    assert [shape[0] for shape in parts] == [((100, 0),), ((200, 100),)]
    assert sum(row.ms for row in rows) == 65.0
    whole = windows([long, late])
    assert [row.shape[0] for row in whole if row.prefills] == [((300, 0),)]


def test_prompts_that_had_the_engine_for_themselves() -> None:
    requests = [
        answered(0, 100, [20]),
        answered(40, 300, [90], cached=44),
        answered(95, 10, [120]),
        answered(110, 9, [130]),
    ]
    alone = lone_prompts(requests, budget=200)
    assert [(row.shape[0], row.ms) for row in alone] == [(((100, 0),), 20.0), (((200, 44),), 50.0)]
    assert alone[1].others == ((1.0, (((56, 244),), 0, 0, 0)),)


@pytest.fixture(scope="module")
def run_a() -> list[MeasuredRequest]:
    """Run A of the H200, with the time of every token: the ends of the passes that it decoded in."""
    path = DATA / "runA.json.xz"
    ends = np.array([one[1] for one in json.loads(lzma.decompress(path.read_bytes()))["passes"]])
    made = []
    for one in read_run(path).requests:
        assert one.first_token is not None
        mine = ends[(ends >= one.first_token) & (ends <= one.ended)]
        assert len(mine) == one.request.output_length
        made.append(msgspec.structs.replace(one, gaps=np.diff(mine).tolist()))
    return made


def test_token_times_show_the_passes_of_an_engine(run_a: list[MeasuredRequest]) -> None:
    passes = read_passes(DATA / "runA.json.xz").rows
    found = windows(run_a, 2048)
    # Nine of ten have the very numbers of a logged pass; the others differ in which of two prompts was cut.
    logged = {row.shape for row in passes if row.prefills}
    seen = [shape for row in found for shape in (row.shape, *(other for _, other in row.others)) if shape[0]]
    assert sum(shape in logged for shape in seen) > 0.9 * len(logged)
    assert sum(row.ms for row in found) == pytest.approx(sum(row.ms + (row.host_ms or 0) for row in passes), rel=0.01)
    decode = [row for row in passes if row.kind == "decode"]
    assert errors_by_kind(decode, row_errors(rough_fit(found), decode))["all"].mean < 0.04


def test_first_and_last_tokens_show_them_roughly(run_a: list[MeasuredRequest]) -> None:
    found = windows([msgspec.structs.replace(one, gaps=None) for one in run_a], 2048)
    assert 100 < len(found) <= 160
    decode = [row for row in read_passes(DATA / "runA.json.xz").rows if row.kind == "decode"]
    assert errors_by_kind(decode, row_errors(rough_fit(found), decode))["all"].mean < 0.06
