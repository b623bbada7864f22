"""Stability of a choice in spite of the error of its times."""

from __future__ import annotations

import pytest

from kvyard.engine.timing.error_range import PublishedOrder, RunClass
from kvyard.lab.study import certainty
from kvyard.lab.study.advice import AdviceOption, answer, least_behind, lowest_ttft
from kvyard.lab.study.certainty import Evidence, order_text
from kvyard.replay.report.metrics import COST, METRICS
from kvyard.replay.report.report import StatedRange
from kvyard.replay.report.slo import Limit

H100 = RunClass(card="h100", dtype="bf16", model_class="dense", engine="vllm")
H200 = RunClass(card="h200", dtype="bf16", model_class="dense", engine="vllm")
TTFT = METRICS["ttft_mean"]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(metric: str, load: str) -> PublishedOrder:
        safe = 1.1 if load == "below" else 1.5
        return PublishedOrder(metric=metric, load=load, factor=1.2, safe=safe, pairs=20, sources=("a",))

    monkeypatch.setattr(certainty, "order_error", order)


def evidence(low: float, high: float, of: RunClass | None = H100, load: certainty.Load = "below") -> Evidence:
    stated = StatedRange(low=low, high=high, basis="published", of="x", runs=9, sources=2)
    return Evidence({"ttft_mean": stated, "ttft_p99": stated}, frozenset({of}), load)


def fleet(name: str, ttft: float, known: Evidence, cost: float = 1.0) -> AdviceOption:
    return AdviceOption(name, {"ttft_mean": ttft, "ttft_p99": ttft, "itl_p99": 1.0}, cost, evidence=known)


def test_the_order_is_safe_where_the_error_is_common() -> None:
    a, b = evidence(50, 300), evidence(60, 400)
    text = order_text(TTFT, ("a", 100.0, a), ("b", 120.0, b))
    assert text.startswith(
        "The order of a and b is safe, although the value isn't (50.00 ms to 300.0 ms): they share most of"
    )
    close = order_text(TTFT, ("a", 100.0, a), ("b", 105.0, b))
    assert close.startswith("a and b lie within the error of each other in TTFT mean: they are 5% apart")
    # Above the knee orders are less sure, and one of the two is enough.
    busy = order_text(TTFT, ("a", 100.0, a), ("b", 120.0, evidence(60, 400, load="above")))
    assert "within the error" in busy


def test_two_cards_share_no_error() -> None:
    near, far = evidence(110, 400, H200), evidence(310, 900, H200)
    assert "overlap." in order_text(TTFT, ("a", 100.0, evidence(50, 300)), ("b", 200.0, near))
    assert "is safe: their ranges don't overlap" in order_text(TTFT, ("a", 100.0, evidence(50, 300)), ("b", 500.0, far))


@pytest.mark.parametrize("known", [Evidence(), Evidence({}, frozenset({None}))])
def test_without_evidence_there_is_no_statement(known: Evidence) -> None:
    assert order_text(TTFT, ("a", 100.0, known), ("b", 200.0, known)) == ""
    assert order_text(TTFT, ("a", 100.0, evidence(1, 2)), ("b", 100.0, evidence(1, 2))) == ""


def test_every_adviser_says_it() -> None:
    fleets = [fleet("a", 100.0, evidence(50, 300)), fleet("b", 104.0, evidence(60, 400))]
    assert any("within the error" in text for text in lowest_ttft(fleets).sentences)
    assert any("within the error" in text for text in least_behind({"1x": fleets}).sentences)
    assert any("within the error" in text for text in answer(fleets, [TTFT], [], "").sentences)


def test_a_limit_within_the_range_is_not_sure() -> None:
    fleets = [fleet("a", 100.0, evidence(50, 300))]
    said = answer(fleets, [COST], [Limit("ttft_p99", 200.0)], "ttft_p99 ≤ 200 ms").sentences
    assert said[-1] == "Not sure: TTFT p99 is 50.00 ms to 300.0 ms with its error, and the limit is 200 ms."
    assert len(answer(fleets, [COST], [Limit("ttft_p99", 400.0)], "x").sentences) == 1
