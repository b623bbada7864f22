"""Value of a hint: the study is the replays it is made of, and its quick mode is what others measured."""

from __future__ import annotations

import csv
import json
import random
from collections import OrderedDict
from pathlib import Path
from statistics import fmean

import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.blocks import Hints
from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.lab.hints import hints, quick_hints
from kvyard.lab.hints.caches import DECAY, Prompt, reuse_without_time
from kvyard.lab.study import Study
from kvyard.replay import replay
from kvyard.replay.report.plain_cache import PlainCache
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.replay.traces.conversations import conversations

SMALL = {"limit": 40, "workers": 2, "num_gpu_blocks": 1500}
HINTS = ("session-end", "ttl:seconds=5,then=first")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("hints")
    return hints(CONVERSATION, folder=folder, hints=HINTS, recalls=(1,), falses=(0, 0.5), config=SMALL)


def test_points_are_the_replays(made: Study) -> None:
    rows = made.result().rows
    assert [(row["hint"], row["recall"], row["false"]) for row in rows] == [
        (hint, recall, false) for hint in HINTS for false in (0, 0.5) for recall in (0, 1)
    ]
    plain = replay(CONVERSATION, **SMALL).report
    for row in rows:
        spec = f"{row['hint']}{',' if ':' in row['hint'] else ':'}recall={row['recall']},false={row['false']}"
        runs = [replay(CONVERSATION, hints=spec, seed=seed, **SMALL).report for seed in (0, 1)]
        assert row["ttft_mean_ms"] == fmean(run.latency["ttft"].mean for run in runs)
        shares = [run.reuse["all"].value for run in runs]
        assert row["reuse"] == fmean(shares)
        assert row["reuse_spread"] == max(shares) - min(shares)
        assert row["reuse_gain"] == row["reuse"] - plain.reuse["all"].value, "no hints are no hints"


def test_files_say_the_same(made: Study, capsys: pytest.CaptureFixture[str]) -> None:
    table, data, page = (path.read_text() for path in made.save())
    rows = list(csv.DictReader(table.splitlines()))
    told = json.loads(data)
    assert told["kind"] == "kvyard hints" and "router" in told["setting"]
    assert len(rows) == len(told["points"]) == len(HINTS) * 4
    for row, one in zip(rows, told["points"], strict=True):
        assert float(row["reuse_gain"]) == one["reuse_gain"] and row["hint"] == one["hint"]
    assert all(hint in page for hint in HINTS) and "50% false" in page
    made.show()
    out = capsys.readouterr().out
    assert "the trace's end cuts no more" in " ".join(out.split()) and all(hint in out for hint in HINTS)


def test_finished_points_are_not_run_again(made: Study) -> None:
    again = hints(CONVERSATION, folder=made.folder, hints=HINTS, recalls=(1,), falses=(0, 0.5), config=SMALL)
    assert again.found == len(again.points) and again.result().rows == made.result().rows


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"hints": ("session-end:recall=0.5",)}, "are varied"),
        ({"hints": ("session-end", "session-end")}, "twice"),
        ({"recalls": (2,)}, "from 0 to 1"),
        ({"config": {"seed": 3}}, "say --seeds instead"),
        ({"config": {"hints": "session-end"}}, "say --hint instead"),
        ({"config": {"eviction": "unknown"}}, "eviction"),
    ],
)
def test_senseless_settings_are_refused_before_anything_runs(how: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=why):
        hints(CONVERSATION, folder=tmp_path / "x", **how)  # type: ignore[arg-type]


# -- without time -----------------------------------------------------------------------------------------------------


def oracle(rows: list[TraceRequest], said: list[bool], caches: int, capacity: int) -> float:
    """Sections A.1 and B.3 of the reference's next.md in the fewest words: LRU, leaf first; what is over goes before it, all
    but the block that everyone begins with. By hand, and for this trace alone.
    """
    alive: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(caches)]
    over: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(caches)]
    load, found = [0.0] * caches, 0
    for row, end in zip(rows, said, strict=True):
        ids = list(row.ids or ())
        best, most = 0, -1
        for at in range(caches):
            match = 0
            while match < len(ids) and (ids[match] in alive[at] or ids[match] in over[at]):
                match += 1
            worth = match if match > 1 else 0
            if worth > most or (worth == most and load[at] < load[best]):
                best, most, length = at, worth, match
        found += min(512 * length, row.input_length)
        load = [one * DECAY for one in load]
        load[best] += row.input_length
        for at, block in reversed(list(enumerate(ids))):
            alive[best].pop(block, None)
            over[best].pop(block, None)
            (over if end and at else alive)[best][block] = None
        while len(alive[best]) + len(over[best]) > capacity:
            (over[best] or alive[best]).popitem(last=False)
    return found / sum(row.input_length for row in rows)


def drawn(rows: list[TraceRequest], recall: float, false: float, seed: int) -> list[bool]:
    last = {row.ids[1] if len(row.ids or ()) > 1 else -at: at for at, row in enumerate(rows)}  # type: ignore[index]
    final, dice = set(last.values()), random.Random(seed)
    return [dice.random() < (recall if at in final else false) for at in range(len(rows))]


def prompts(rows: list[TraceRequest]) -> list[Prompt]:
    names = {name: at for at, name in enumerate(dict.fromkeys(conversations(rows)))}
    return [
        Prompt(row.ids or (), 512, row.input_length, names[name])
        for row, name in zip(rows, conversations(rows), strict=True)
    ]


@pytest.mark.parametrize(("caches", "capacity"), [(1, 1024), (8, 128)])
def test_the_quick_model_is_the_oracle(caches: int, capacity: int) -> None:
    rows = list(open_trace(CONVERSATION, limit=700))
    for recall, false in ((0.0, 0.0), (0.5, 0.0), (0.7, 0.3)):
        said = drawn(rows, recall, false, seed=1)
        expected = oracle(rows, said, caches, capacity)
        # The common block is one conversation's own until the second one comes: a block or two may differ.
        assert reuse_without_time(prompts(rows), said, caches, capacity) == pytest.approx(expected, abs=0.0005)


def test_the_block_manager_without_a_clock_gains_as_much() -> None:
    rows = list(open_trace(CONVERSATION, limit=700))
    names = conversations(rows)
    for recall in (0.0, 1.0):
        said = drawn(rows, recall, 0, seed=1)
        engine = EngineConfig(block_size=512, num_gpu_blocks=1024, heed_hints=True)
        cache = PlainCache(engine, 1024)
        for row, name, end in zip(rows, names, said, strict=True):
            hinted = TraceRequest(row.id, 0, row.input_length, 1, row.ids, 512, hints=Hints(name, session_end=end))
            cache.add(hinted, 0)
        share = cache.found / sum(row.input_length for row in rows)
        # A manager caches no partial block, and always leaves the last block of a prompt to be computed.
        assert share == pytest.approx(reuse_without_time(prompts(rows), said, 1, 1024), abs=0.012)


EIGHT = {(0, 0): 27.0, (0.5, 0): 31.5, (0.7, 0.1): 32.1, (1, 0): 36.9}
"""B.3, eight separate caches of 2,048, longest match."""
POOLED = {
    (0, 0): (5.6, 9.0, 18.5, 27.1, 34.2),
    (0.25, 0): (5.9, 11.0, 20.9, 29.4, 35.9),
    (0.5, 0): (6.5, 13.9, 23.6, 31.8, 36.4),
    (1, 0): (12.1, 22.9, 32.7, 37.0, 37.4),
    (0.7, 0.1): (7.9, 16.5, 25.1, 32.4, 34.8),
    (0.7, 0.3): (8.1, 15.1, 22.0, 27.9, 30.9),
}
"""B.3, one cache of 2,048 to 32,768 blocks."""


def test_eight_caches_reach_what_was_measured_before(tmp_path: Path) -> None:
    found = quick_hints(CONVERSATION, recalls=(0.5, 1), falses=(), seeds=(0,), config={"workers": 8})
    shares = {(row["recall"], row["false"]): 100 * row["reuse"] for row in found.rows}
    assert shares[0, 0] == pytest.approx(27.0, abs=0.1)
    assert shares[0.5, 0] >= 31.5
    assert shares[1, 0] == pytest.approx(36.9, abs=0.1)
    assert found.save(tmp_path)[2].read_text().count("recall") > 2


@pytest.mark.slow
@pytest.mark.parametrize("quality", POOLED)
def test_all_rows_of_the_reference(quality: tuple[float, float]) -> None:
    rows = list(open_trace(CONVERSATION))
    asked = prompts(rows)
    said = drawn(rows, *quality, seed=1)  # the reference's own draw: each figure is met to a tenth
    sizes = (2048, 4096, 8192, 16384, 32768)
    for capacity, expected in zip(sizes, POOLED[quality], strict=True):
        share = 100 * reuse_without_time(asked, said, 1, capacity)
        assert share == pytest.approx(expected, abs=0.1), capacity
    if quality in EIGHT:  # its tie-break is known in words only
        share = 100 * reuse_without_time(asked, said, 8, 2048)
        assert share == pytest.approx(EIGHT[quality], abs=0.35)
