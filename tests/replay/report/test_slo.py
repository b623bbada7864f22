"""How SLOs are written, and what is made of percentiles."""

from __future__ import annotations

import msgspec
import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.replay.report import Report, Slo
from kvyard.replay.report.answers import answers
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.metrics import read_metrics
from kvyard.replay.report.slo import (
    RULE,
    Limit,
    judge,
    limits_of,
    missed,
    overload_text,
    read_slo,
    rejections_alone,
    violation,
)
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ttft=500,itl=20", {"ttft": 500.0, "itl": 20.0}),
        ("ttft<0.5s, itl <= 20ms", {"ttft": 500.0, "itl": 20.0}),
        ("e2e=1min", {"e2e": 60_000.0}),
        ("ttft_p99<1s", {"percentiles": {"ttft_p99": 1000.0}}),
        ("ttft_p99=1000", {"percentiles": {"ttft_p99": 1000.0}}),
        ("tpot_p50=250us,ttft=1e3", {"ttft": 1000.0, "percentiles": {"tpot_p50": 0.25}}),
    ],
)
def test_accepted_slos(text: str, wanted: dict[str, object]) -> None:
    assert read_slo(text) == msgspec.convert(wanted, Slo)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=1 parsec", "ttft>500", "ttft=nan", "ttft=1,ttft=2"),
        *("p99=1", "ttft_p98=1", "ttft_=1", "queue_p99=5", "tpot=5", "ttft_p99", "ttft_p99<1s;itl=3", "percentiles=1"),
    ],
)
def test_refused_slos(text: str) -> None:
    with pytest.raises(KvyardError, match="SLO"):
        read_slo(text)


def made(slo: str) -> Report:
    return replay(CONVERSATION, limit=120, workers=2, slo=slo).report


def test_a_percentile_is_judged_by_the_run() -> None:
    loose, tight = made("ttft_p99<60s,itl_p50<1h"), made("ttft_p99=1")
    good = loose.goodput
    assert good is not None and good.percentiles
    one = good.percentiles["ttft_p99"]
    assert one.met and one.value_ms == loose.latency["ttft"].p99
    assert good.requests.value == 1.0
    judged = tight.goodput
    assert judged is not None and judged.percentiles and not judged.percentiles["ttft_p99"].met
    assert judged.requests.value == 0.0, "without a limit of its own, a request has that of the percentile"
    text = report_text(tight)
    assert "TTFT p99 ≤ 1 ms" in text and "NOT met" in text
    assert from_json(to_json(tight), "x") == tight


def test_a_limit_of_requests_goes_before_that_of_a_percentile() -> None:
    both, alone = made("ttft=200,ttft_p99<60s"), made("ttft=200")
    assert both.goodput is not None and alone.goodput is not None
    assert both.goodput.requests == alone.goodput.requests
    assert b"percentiles" not in to_json(alone), "reports without percentiles are what they were"


@pytest.mark.parametrize(("tokens", "limit", "good"), [(1, 1, 1.0), (2, 5, 0.0), (2, 6, 1.0), (3, 5, 0.0), (3, 6, 1.0)])
def test_the_time_between_tokens_counts_from_the_second_on(tokens: int, limit: int, good: float) -> None:
    rows = [TraceRequest("a", 0, 16, tokens)]
    found = replay(rows, workers=1, num_gpu_blocks=100, block_size=16, timing="fixed:18,6", slo=f"itl={limit}").report
    assert found.goodput is not None and found.goodput.requests.value == good


def test_rejected_requests_count_as_missed_everywhere() -> None:
    """Nine short prompts and one that is longer than the model takes: a tenth is rejected."""
    rows = [TraceRequest(str(at), at * 10**9, 16 if at else 5000, 2) for at in range(10)]
    settings = {"workers": 1, "num_gpu_blocks": 100, "block_size": 16, "max_model_len": 1000, "timing": "fixed:18,6"}
    report = replay(rows, slo="ttft=500,ttft_p99<1s", **settings).report
    good = report.goodput
    assert good is not None and good.percentiles
    assert (good.requests.part, good.requests.whole, good.rejected) == (9, 10, 0.1)
    assert good.percentiles["ttft_p99"].value_ms < 1000 and not good.percentiles["ttft_p99"].met
    text = " ".join(report_text(report).split())
    assert "Rejected ≤ 1% 10.00% NOT met" in text and RULE in text
    values = read_metrics(report)
    assert violation(values, limits_of(Slo(percentiles={"ttft_p99": 1000.0}))) > 0
    assert missed(values, [Limit("ttft_p99", 1000.0)]) == "10.00% of the requests are rejected (limit 1%)"
    assert rejections_alone(values, [Limit("ttft_p99", 1000.0)])
    assert not rejections_alone({**values, "rejected_share": 0.0}, [Limit("ttft_p99", 1000.0)])
    assert not rejections_alone({**values, "ttft_p99": 1001.0}, [Limit("ttft_p99", 1000.0)])
    few = replay(rows[1:], slo="ttft_p99<1s", **settings).report
    assert few.goodput is not None and few.goodput.percentiles and few.goodput.percentiles["ttft_p99"].met
    assert "Rejected" not in report_text(few)


def test_overload_is_called_overload() -> None:
    """Ten requests a second, of which an engine that takes 0.2 s for each can serve five."""
    rows = [TraceRequest(str(at), at * 10**8, 1024, 1) for at in range(300)]
    settings = {"workers": 1, "num_gpu_blocks": 100, "block_size": 16, "max_num_batched_tokens": 1024}
    report = replay(rows, **settings, timing="fixed:200,6").report
    values = read_metrics(report)
    assert values["offered_requests_per_s"] == pytest.approx(10, rel=0.05)
    assert values["requests_per_s"] == pytest.approx(5, rel=0.05)
    assert answers(report)[0].startswith("Overloaded: 5.00 of 10.")
    assert "overloaded, 5.00 of 10." in missed(values, [Limit("ttft_p99", 1000.0)])
    idle = replay(rows, **settings, timing="fixed:20,6").report
    assert not answers(idle)[0].startswith("Overloaded") and not overload_text(read_metrics(idle))


def test_the_verdict_names_what_misses_or_all_that_is_kept() -> None:
    rows = [TraceRequest(str(at), at * 10**9, 16, 2) for at in range(10)]
    settings = {"workers": 1, "num_gpu_blocks": 100, "block_size": 16, "timing": "fixed:18,6"}
    met = judge(replay(rows, slo="ttft_p99<1s,itl_p99<50ms", **settings).report)
    assert met is not None and met.met
    assert met.why == "TTFT p99 is 18.00 ms (limit 1 s), ITL p99 is 6.00 ms (limit 50 ms)"
    report = replay(rows, slo="ttft=10,itl_p99<50ms", **settings).report
    missing = judge(report)
    assert missing is not None and not missing.met
    assert missing.why == "Share of requests within the SLO is 0.00% (limit 99.00%)"
    assert "SLO NOT met: Share of requests within the SLO is 0.00%" in report_text(report)
    assert judge(replay(rows, **settings).report) is None
