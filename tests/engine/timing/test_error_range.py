"""Error ranges: the finest class with evidence answers, and the shipped data are what the published results give."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    points = published_errors.weighted(published_errors.cells_of(many + few))
    low, middle, high = published_errors.quantiles(points, (0.1, 0.5, 0.9))
    assert (low, high) == pytest.approx((0.0, math.log(2.0)))
    assert low < middle < high


def test_a_class_needs_eight_runs_and_fewer_than_the_wider_one() -> None:
    alone = [row("a", at, 1.0 + at / 10) for at in range(8)]
    assert [one.of for one in published_errors.distil(alone).ranges] == [("below",)]
    assert published_errors.distil(alone[:-1]).ranges == ()
    both = alone + [row("b", at, 1.5, card="a100") for at in range(7)]
    ranges = published_errors.distil(both).ranges
    assert [(len(one.of), one.runs) for one in ranges] == [(1, 15), (5, 8)]


def test_a_class_of_few_sources_is_mostly_what_the_wider_one_is() -> None:
    rows = [row(name, at, 1.0 + at / 50) for name in "abde" for at in range(10)]
    rows += [row("c", at, 3.0 + at / 10, engine="sglang") for at in range(10)]
    ranges = {one.of: one for one in published_errors.distil(rows).ranges}
    wider, alone = ranges["below",], ranges["below", "dense", "sglang"]
    assert alone.sources == ("c",) and alone.low <= wider.low * 1.02
    assert wider.median < alone.median < 3.0 and 3.0 < alone.high < 4.0


def test_a_source_that_is_left_out_is_judged_by_the_others() -> None:
    rows = [
        row(name, at, ratio * (1 + at / 100)) for name, ratio in (("a", 1.0), ("b", 1.1), ("c", 4.0)) for at in range(8)
    ]
    cells = published_errors.cells_of(rows)
    ranges = published_errors.ranges_of(cells, 0.1)
    assert sum(bool(published_errors.held(cell, ranges)) for cell in cells) >= 0.7 * len(cells)
    out = [cell.source for cell, inside in published_errors.unseen(cells, 0.1) if not inside]
    assert out.count("c") == 8 and out.count("b") <= 1


def test_ranges_are_wide_enough_for_sources_that_are_left_out_and_no_wider() -> None:
    def share(held: Sequence[bool]) -> float:
        return sum(held) / len(held)

    names = "abcdefghijklmnop"
    rows = [row(name, at, 1.05**number * (1 + at / 100)) for number, name in enumerate(names) for at in range(8)]
    cells = published_errors.cells_of(rows)
    edge = published_errors.edge_of(cells)
    assert share([inside for _, inside in published_errors.unseen(cells, edge)]) >= 0.8
    assert share([inside for _, inside in published_errors.unseen(cells, edge + 0.01)]) < 0.8


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
