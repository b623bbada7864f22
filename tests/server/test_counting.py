"""Counters and histograms of the hot path say what prometheus-client's own would."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("prometheus_client", reason="needs kvyard[server]")

import prometheus_client as prometheus

from kvyard.server.metrics import Metrics

TEXTS = {"a_total": "Some.", "b_seconds": "Others."}
BOUNDS = (0.001, 0.25, 1.0, 640.0)


def test_as_prometheus_has_them() -> None:
    rng = random.Random(5)
    ours = Metrics(TEXTS)
    counts, spreads = ours.counts("a_total", "x", "y"), ours.bucketed("b_seconds", BOUNDS, "x")
    registry = prometheus.CollectorRegistry()
    count = prometheus.Counter("a_total", TEXTS["a_total"], ["x", "y"], registry=registry)
    spread = prometheus.Histogram("b_seconds", TEXTS["b_seconds"], ["x"], buckets=BOUNDS, registry=registry)
    for _ in range(300):
        x, y = rng.choice(('m"', "n\n")), rng.choice("yz")
        amount = rng.choice((1, 7, 0.5))
        value = rng.choice((*BOUNDS, 0.0, 5000.0, rng.uniform(0, 2)))
        counts[x, y].inc(amount)
        count.labels(x, y).inc(amount)
        spreads[x,].observe(value)
        spread.labels(x).observe(value)

    def lines(text: bytes) -> set[str]:
        return {line for line in text.decode().splitlines() if "_created" not in line}

    assert lines(ours.text()[0]) == lines(prometheus.generate_latest(registry))
    del counts["n\n", "y"]
    assert b'a_total{x="n\\n",y="y"}' not in ours.text()[0]
