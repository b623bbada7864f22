"""Error ranges: the finest class with evidence answers, and the shipped data are what the published results give."""

from __future__ import annotations

import math

import msgspec
import pytest
from benchmarks import published_errors

from kvyard.engine.models import find_config
from kvyard.engine.timing import error_range as module
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.error_range import PublishedErrors, PublishedRange, class_of, error_range, model_class

CLASS = {"card": "h100", "dtype": "bf16", "model_class": "dense", "engine": "vllm"}


def known(*of: str, metric: str = "ttft", statistic: str = "central") -> PublishedRange:
    low = 1 - 0.1 * len(of)
    return PublishedRange(
        metric=metric, statistic=statistic, of=of, low=low, median=1.0, high=2.0, runs=9, sources=("a", "b")
    )


def test_the_finest_class_with_evidence_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = (known("below"), known("below", "dense", "vllm"), known("below", statistic="tail"))
    monkeypatch.setattr(module, "published_errors", lambda: PublishedErrors(ranges=ranges))
    module._ranges.cache_clear()
    try:
        found = error_range("ttft_mean", load="below", **CLASS)
        assert found is not None
        assert (found.of, found.runs, found.sources) == (("below", "dense", "vllm"), 9, 2)
        assert found.words == "dense models on vLLM, below the knee"
        assert found.around(100.0) == pytest.approx((70.0, 200.0))
        other = error_range("ttft_p50", load="below", **CLASS | {"engine": "sglang"})
        assert other is not None and other.words == "all models, below the knee"
        tail = error_range("ttft_p99", load="below", **CLASS)
        assert tail is not None and tail.of == ("below",)
        assert error_range("ttft_mean", load="above", **CLASS) is None
        assert error_range("reuse", load="below", **CLASS) is None
    finally:
        module._ranges.cache_clear()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3-32b", ("dense", "bf16")),
        ("gpt-oss-120b", ("mixture", "mxfp4")),
        ("deepseek-v3", ("mla", "fp8")),
        ("nemotron-h-8b", ("state", "bf16")),
    ],
)
def test_classes_of_models(model: str, expected: tuple[str, str]) -> None:
    found = class_of(Deployment(model=model, gpu="h200"), "sglang")
    assert (found.model_class, found.dtype) == expected
    assert (found.card, found.engine) == ("h200", "sglang")
    assert model_class(find_config(model)) == expected[0]


def test_the_shipped_ranges_and_the_page_are_what_the_results_give() -> None:
    rows = published_errors.read_rows()
    errors = published_errors.distil(rows)
    assert errors == module.published_errors(), "run benchmarks/published_errors.py"
    assert published_errors.PAGE.read_text() == published_errors.tables(errors, rows)
    assert all(one.low <= one.median <= one.high for one in errors.ranges)


def row(source: str, cell: int, ratio: float, **rest: object) -> dict[str, object]:
    head = {"knee": "below", "class": "dense", "engine": "vllm", "dtype": "bf16", "card": "h100", "half": "test"}
    return head | {"source": source, "load": str(cell), "metrics": {"ttft_mean_s": [ratio, 1.0, 0]}} | rest


def test_each_source_counts_the_same() -> None:
    many = [row("many", at, 1.0) for at in range(90)]
    few = [row("few", at, 2.0) for at in range(10)]
    low, middle, high = published_errors.quantiles(published_errors.cells_of(many + few), (0.1, 0.5, 0.9))
    assert (low, high) == pytest.approx((0.0, math.log(2.0)))
    assert low < middle < high


def test_a_class_needs_runs_of_two_sources_unless_there_is_one_alone() -> None:
    alone = [row("a", at, 1.0 + at / 10) for at in range(8)]
    assert {one.of for one in published_errors.distil(alone).ranges} >= {("below",), ("below", "dense")}
    assert published_errors.distil(alone[:-1]).ranges == ()
    both = alone + [row("b", at, 1.5, card="a100") for at in range(8)]
    assert max(len(one.of) for one in published_errors.distil(both).ranges) == 4


def test_a_range_is_as_wide_as_a_left_out_source_needs() -> None:
    """Three sources that lie about a factor of 1.5 apart, each with a spread of its own."""
    rows = [
        row(name, at, middle * (1 + at / 100))
        for name, middle in zip("abc", (1.0, 1.5, 2.25), strict=True)
        for at in range(10)
    ]
    cells = published_errors.cells_of(rows)
    out = [inside for _, inside in published_errors.held_out(cells)]
    assert 0.7 <= sum(out) / len(out) <= 0.9
    assert published_errors.widening(cells) > 1 and published_errors.widening(cells[:10]) == 1


def test_a_class_whose_sources_disagree_has_no_range() -> None:
    rows = [row(name, at, ratio * (1 + at / 1000)) for name, ratio in (("a", 1.0), ("b", 40.0)) for at in range(8)]
    assert published_errors.distil(rows).ranges == ()


def test_one_source_of_an_engine_extends_the_wider_range() -> None:
    rows = [row(name, at, 1.0 + at / 50) for name in "abde" for at in range(10)]
    rows += [row("c", at, 3.0 + at / 10, engine="sglang") for at in range(10)]
    ranges = {one.of: one for one in published_errors.distil(rows).ranges}
    wider, alone = ranges["below", "dense"], ranges["below", "dense", "sglang"]
    assert alone.sources == ("c",) and alone.low <= wider.low and alone.high >= max(wider.high, 3.5)
    assert ("below", "dense", "sglang", "bf16") not in ranges


def test_figures_within_the_print_resolution_are_no_error() -> None:
    (cell,) = published_errors.cells_of([row("a", 0, 1.0) | {"metrics": {"ttft_mean_s": [1.02, 1.0, 0.05]}}])
    assert cell.error == 0.0


def test_the_order_of_two_arms_is_safe_where_errors_are_common() -> None:
    """Both arms are 30 % slower than predicted at every load, and the second is truly 10 % above the first."""
    rows = [row("a", at, 1.3, arm="x") for at in range(16)]
    rows += [row("a", at, 1.43, arm="y") | {"metrics": {"ttft_mean_s": [1.43, 1.1 + at / 1000, 0]}} for at in range(16)]
    (order,) = published_errors.distil(rows).order
    assert order.factor < 1.02 and order.pairs == 16
    assert order.safe == pytest.approx(1.1, rel=0.01)


def test_the_file_is_small() -> None:
    assert len(msgspec.json.encode(module.published_errors())) < 100_000
