"""Grids: what is varied, and names of points that depend on what they mean and not on how they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvyard.errors import KvyardError
from kvyard.lab.study.grid import fingerprint, make_grid, parse_vary


def test_all_combinations_in_order() -> None:
    grid = make_grid({"block_size": 16}, parse_vary(["host_blocks=0,20k", "router=round-robin,kv"]))
    assert [point.label for point in grid.points] == [
        "host_blocks=0, router=round-robin",
        "host_blocks=0, router=kv",
        "host_blocks=20k, router=round-robin",
        "host_blocks=20k, router=kv",
    ]
    assert len({point.key for point in grid.points}) == 4
    assert grid.points[2].config.workers[0].engine.block_size == 16


def test_values_with_commas() -> None:
    assert parse_vary(["timing=fixed:50,8;polynomial", "host-blocks = 1, 2"]) == {
        "timing": ["fixed:50,8", "polynomial"],
        "host_blocks": ["1", "2"],
    }


def test_a_key_is_what_a_point_means() -> None:
    def key(vary: dict[str, list[object]], about: dict[str, object] | None = None, **base: object) -> str:
        return make_grid(base, vary, about).points[0].key

    plain = key({"host_blocks": ["20k"]})
    assert plain == key({"host_blocks": [20000]}) == key({"workers": [8]}, host_blocks="20000", router="least-time")
    assert len({plain, key({"host_blocks": ["20k"]}, seed=1), key({"host_blocks": ["20k"]}, {"trace": "other"})}) == 3


@pytest.mark.parametrize(
    ("vary", "base", "match"),
    [
        ([], {}, "varies something"),
        (["host_blocks"], {}, "nothing to vary"),
        (["host_blocks="], {}, "nothing to vary"),
        (["workers=1..4"], {}, "is a range, which kvyard tune takes"),
        (["host_blocks=1,,2"], {}, "nothing to vary"),
        (["host_blocks=1", "host_blocks=2"], {}, "varied twice"),
        (["host_blocks=1,1"], {}, "same value twice"),
        (["hostblocks=1,2"], {}, "did you mean host_blocks"),
        (["planner=1,2"], {}, "planner: say autoscale"),
        (["router=kv,best"], {}, "at the point router=best: unknown routing policy"),
        (["router=kv,random"], {"router": "kv"}, "both set and varied"),
        (
            ["seed=" + ",".join(map(str, range(200))), "limit=" + ",".join(map(str, range(1, 200)))],
            {},
            "grid of 39,800",
        ),
    ],
)
def test_refused(vary: list[str], base: dict[str, object], match: str) -> None:
    with pytest.raises(KvyardError, match=match):
        make_grid(base, parse_vary(vary))


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    before = fingerprint(tmp_path)
    (tmp_path / "b").write_text("y")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b") and fingerprint(tmp_path) != before
    with pytest.raises(KvyardError, match="no such file"):
        fingerprint(tmp_path / "c")


def test_cards_and_splits_are_varied_by_any_of_their_names() -> None:
    base = {"model": "llama-3.1-8b", "timing": "roofline"}
    grid = make_grid(
        base, {"gpu": ["h100", "a100"], "tensor_parallel_size": ["1", "2"], "quantization": ["fp8", "awq"]}
    )
    assert list(grid.axes) == ["gpu", "tensor_parallel_size", "weight_dtype"] and len(grid.points) == 8
    sources = {point.config.workers[0].engine.timing.describe() for point in grid.points}
    assert len(sources) == 8 and "roofline of llama-3.1-8b on h100 TP2 int4 weights, no measurement" in sources
    with pytest.raises(KvyardError, match="weight_dtype is both set and varied"):
        make_grid({**base, "gpu": "h100", "weight_dtype": "fp8"}, {"quantization": ["awq"]})
    with pytest.raises(KvyardError, match=r"at the point gpu=l4: .*doesn't fit"):
        make_grid({**base, "model": "llama-3.1-70b"}, {"gpu": ["l4"]})
