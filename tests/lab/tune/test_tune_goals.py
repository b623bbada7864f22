"""Goals and limits from text, what a fleet costs, and where a trace is cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.jobs import TracePart
from kvyard.lab.study.cost import TUNE_SETTINGS, Prices, cost, parted
from kvyard.lab.study.goals import Goal, judged, parse_goals
from kvyard.lab.tune.parts import cut
from kvyard.replay import replay
from kvyard.replay.report.metrics import METRICS
from kvyard.replay.report.slo import Limit, parse_limits
from kvyard.replay.settings import make_config
from kvyard.replay.traces import Trace, open_trace


def test_goals() -> None:
    assert parse_goals("min cost") == [Goal("cost", "min")]
    assert parse_goals("min cost, max reuse,min ttft_p99") == [
        Goal("cost", "min"),
        Goal("reuse", "max"),
        Goal("ttft_p99", "min"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cheap", "write min or max and a metric"),
        ("max cost", "that makes things worse; did you mean 'min cost'?"),
        ("min ttft_p98", "did you mean ttft_p9"),
        ("min cost, min cost", "cost is named twice"),
        ("min cost, min ttft_p99, min itl_p99, max reuse", "at most 3"),
        ("", "write min or max"),
    ],
)
def test_goals_that_are_none(text: str, words: str) -> None:
    with pytest.raises(KvyardError) as error:
        parse_goals(text)
    assert words in str(error.value)


def test_a_latency_that_no_request_had_is_no_zero() -> None:
    """Answers of one token have no gap between tokens."""
    rows = [msgspec.structs.replace(one, output_length=1) for one in open_trace(CONVERSATION, limit=20)]
    short = Trace("short", "made", lambda tally: iter(rows))
    report = replay(short, workers=2, block_size=512, num_gpu_blocks=512).report
    assert report.latency["itl"].count == 0 and report.latency["ttft"].count == 20
    found, missed = judged(report, 3.0, parse_limits("itl_p99=1,ttft_p99=1e9"))
    assert found["itl_p99"] is None and found["ttft_p99"] and found["cost"] == 3.0 and missed == 0
    assert METRICS["itl_p99"].text(found["itl_p99"]) == "–"


def test_limits_with_and_without_units() -> None:
    assert parse_limits("ttft_p99=1000, itl_p99<50ms,ttft_mean<=1s,reuse>=20%,cost<12.5") == [
        Limit("ttft_p99", 1000.0),
        Limit("itl_p99", 50.0),
        Limit("ttft_mean", 1000.0),
        Limit("reuse", 0.2),
        Limit("cost", 12.5),
    ]
    assert parse_limits(None) == []
    assert str(Limit("ttft_p99", 1000.0)) == "ttft_p99 ≤ 1 s" and "≥" in str(Limit("reuse", 0.2))
    assert Limit("ttft_p99", 1000.0).violation(1500.0) == 0.5 and Limit("reuse", 0.2).violation(0.1) == 0.5
    assert Limit("ttft_p99", 1000.0).violation(1000.0) <= 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft=500", "of which requests? Write ttft_p99=500"),
        ("ttft_p99", "an SLO has names and limits"),
        ("ttft_p99=fast", "a limit is milliseconds, or a time with its unit such as 1s, above 0"),
        ("ttft_p99=0", "above 0"),
        ("ttft_p99>100", "turn the sign round"),
        ("reuse<0.1", "turn the sign round"),
        ("nothing=1", "there is no metric 'nothing'"),
        ("ttft_p99=1,ttft_p99=2", "named twice"),
    ],
)
def test_limits_that_are_none(text: str, words: str) -> None:
    with pytest.raises(KvyardError) as error:
        parse_limits(text)
    assert words in str(error.value)


def priced(**settings: object) -> float:
    return cost(settings, make_config(settings), Prices(card=1.0, host=0.01, storage=0.001))


def test_cost_by_hand() -> None:
    assert priced(workers=3) == 3.0
    assert priced(workers=3, host_bytes="100GiB") == pytest.approx(3 + 3 * 1.0)
    assert priced(workers=3, host_bytes="100GiB", host_scope="shared") == pytest.approx(3 + 1.0)
    assert priced(workers=2, host_bytes="100GiB", storage_bytes="1TiB") == pytest.approx(2 + 2 * 1.0 + 2 * 1.024)
    # 128 KiB a token: 16,384 blocks of 64 tokens are 128 GiB.
    assert priced(workers=1, host_blocks=16384, block_size=64) == pytest.approx(1 + 1.28)
    assert priced(workers=2, model="llama-3.1-70b", gpu="h100", tensor_parallel_size=4) == 8.0
    kinds = [{"count": 2, "host_bytes": "10GiB"}, {"name": "x", "count": 1, "dp_size": 2}]
    assert priced(workers=kinds) == pytest.approx(2 + 2 * 0.1 + 2)


def test_prices_come_by_flags_and_in_a_table(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('workers = 2\n[prices]\ncard = 3.5\n[router]\npolicy = "random"\n')
    settings = TUNE_SETTINGS.merge(file, {"price_host": "0.5"})
    base, prices = parted(settings)
    assert base == {"workers": 2, "router": "random"} and prices == Prices(card=3.5, host=0.5)
    with pytest.raises(KvyardError, match="price_card is -1"):
        parted({"price_card": -1})
    with pytest.raises(KvyardError, match="it must be a number"):
        parted({"price_card": "much"})


def test_a_trace_is_cut_by_time() -> None:
    trace = open_trace(CONVERSATION, limit=1000)
    parts = cut(trace, 0.25)
    last = max(one.arrival for one in trace)
    assert parts.train == TracePart(until=round(last * 0.75)) and parts.test == TracePart(since=round(last * 0.75))
    assert parts.requests["train"] + parts.requests["test"] == 1000
    assert parts.requests["train"] == sum(one.arrival < last * 0.75 for one in trace)
    assert parts.prefix is not None and parts.requests["prefix"] == sum(one.arrival < last * 0.1875 for one in trace)
    whole = cut(trace, 0)
    assert whole.test is None and whole.requests["train"] == 1000


def test_sessions_stay_whole_and_short_prefixes_are_left_out() -> None:
    made = list(sessions(200, turns="fixed:4"))
    trace = Trace("talks", "test", lambda tally: iter(made))
    parts = cut(trace, 0.5)
    assert parts.test is not None and parts.prefix is None
    first, second = ({one.session for one in part.of(trace)} for part in (parts.train, parts.test))
    assert first and second and not first & second
    assert parts.requests["train"] + parts.requests["test"] == 200


def test_traces_without_a_common_clock_are_cut_by_sessions() -> None:
    made = sorted(sessions(200, turns="fixed:4"), key=lambda one: one.session or "")
    trace = Trace("talks", "test", lambda tally: iter(made), grouped=True)
    parts = cut(trace, 0.5)
    assert parts.test is not None
    first, second = ({one.session for one in part.of(trace)} for part in (parts.train, parts.test))
    assert len(first) == len(second) == 25 and not first & second


def test_parts_that_would_be_empty() -> None:
    trace = open_trace(CONVERSATION, limit=1)
    with pytest.raises(KvyardError, match="take a longer trace, or --test 0 for none"):
        cut(trace, 0.5)
    with pytest.raises(KvyardError, match="at least 0 and below 1"):
        cut(trace, 1.0)
