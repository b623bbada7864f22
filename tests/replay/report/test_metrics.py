"""The list of metrics: names, values as people read them, and which of several is best."""

from __future__ import annotations

from msgspec.structs import replace
from tests.replay.report.support import reported

from kvyard.replay.report.metrics import COST, METRICS, read_metrics
from kvyard.replay.report.slo import Limit, limits_of, read_slo, violation


def test_every_metric_has_names_of_its_own() -> None:
    for names in zip(*((one.name, one.key, one.column) for one in METRICS.values()), strict=False):
        assert len(set(names)) == len(METRICS)
    assert METRICS["ttft_p99"].key == "ttft.p99" and METRICS["ttft_p99"].column == "ttft_p99_ms"
    assert METRICS["reuse"].key == "reuse.all" and METRICS["reuse"].column == "reuse"


def test_values_are_the_report_s() -> None:
    report = reported(policy="kv", blocks=2200, host=4000)
    values = read_metrics(report)
    assert list(values) == list(METRICS)
    assert values["ttft_p90"] == report.latency["ttft"].p90
    assert values["reuse_host"] == report.reuse["host"].value
    assert values["finished"] == report.requests["finished"]
    assert report.goodput is not None
    assert values["within_slo"] == report.goodput.requests.part / report.requests["all"]
    assert values["moved"] == sum(flow.bytes for flow in report.transfers.values())


def test_a_latency_that_no_request_had_is_no_zero() -> None:
    report = reported()
    none = replace(report, latency=report.latency | {"itl": replace(report.latency["itl"], count=0)})
    assert read_metrics(none)["itl_mean"] is None and read_metrics(none)["ttft_mean"] is not None
    live = replace(report, latency={name: one for name, one in report.latency.items() if name != "queue"}, goodput=None)
    assert read_metrics(live)["queue_mean"] is None and read_metrics(live)["goodput"] is None


def test_values_for_people() -> None:
    texts = {999.94: "999.9 ms", 1234.56: "1.235 s", 2000.0: "2 s", 16_800.0: "16.8 s", 1_250_000.0: "20 min 50 s"}
    assert {ms: METRICS["ttft_mean"].text(ms, unit=True) for ms in texts} == texts
    assert METRICS["ttft_mean"].text(12.3456, unit=True) == "12.35 ms" and METRICS["ttft_mean"].text(1.0) == "1.00"
    assert METRICS["reuse"].text(0.25) == "25.00%" and METRICS["rejected"].text(1200) == "1,200"
    assert METRICS["moved"].text(2e9) == "2.0 GB" and METRICS["balance"].text(1.0) == "1.000"
    assert COST.text(9.4) == "9.40" and COST.text(None) == "–"


def test_the_best_and_what_is_as_good() -> None:
    ttft, reuse, device = METRICS["ttft_mean"], METRICS["reuse"], METRICS["reuse_device"]
    assert ttft.best([100.4, 100.0, 120.0, None]) == [0, 1] and ttft.best([100.6, 100.0, 120.0]) == [1]
    assert reuse.best([0.2, 0.4]) == [1] and ttft.best([5.0, 5.0]) == ttft.best([None]) == device.best([0.1, 0.2]) == []
    assert (ttft.beats(90.0, 100.0), ttft.beats(100.0, 90.0), ttft.beats(100.0, 100.4)) == (1, -1, 0)
    assert reuse.beats(0.4, 0.2) == 1 and reuse.beats(None, 0.2) == device.beats(0.1, 0.2) == 0


def test_an_slo_is_limits_of_a_run() -> None:
    slo = read_slo("ttft=500,ttft_p99<1s")
    assert slo is not None
    limits = limits_of(slo)
    assert limits == [Limit("within_slo", 0.99), Limit("ttft_p99", 1000.0)]
    assert violation({"within_slo": 0.99, "ttft_p99": 1000.0}, limits) == 0
    assert violation({"within_slo": 0.99, "ttft_p99": 1500.0}, limits) == 0.5
    assert violation({"within_slo": 1.0, "ttft_p99": None}, limits) == 0, "what no request had misses nothing"
    assert violation({"within_slo": 1.0, "ttft_p99": 1.0, "rejected_share": 0.02}, limits) == 2.0
    only = read_slo("itl_p50<1s")
    assert only is not None and limits_of(only) == [Limit("itl_p50", 1000.0)]
