"""``kvyard.replay(...)``: one call from a trace to its report, the same each time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.replay.support import request, sessions
from tests.replay.traces.support import CONVERSATION, SAMPLES, SHARED

import kvyard
import kvyard.replay
from kvyard.errors import KvyardError
from kvyard.replay import SimulatedRun, replay
from kvyard.replay.report.files import read_report, to_json
from kvyard.replay.settings import make_config
from kvyard.replay.traces import open_trace

TIERS = {"block_size": 16, "num_gpu_blocks": 400, "host_blocks": 2000, "workers": 3}


def digest(run: SimulatedRun) -> str:
    return hashlib.sha256(to_json(run.report)).hexdigest()


def test_the_package_can_be_called() -> None:
    made = kvyard.replay(sessions(30), workers=2, block_size=16)  # type: ignore[operator]
    assert isinstance(made, SimulatedRun) and made.complete
    assert made.report.requests == {"all": 30, "finished": 30}
    assert len(made.records) == 30 and made.fleet.config.workers[0].count == 2
    assert "30 requests" in repr(made) and "2 workers" in repr(made)
    assert replay is kvyard.replay.replay


def test_importing_it_loads_nothing() -> None:
    code = "import sys, kvyard, kvyard.replay; print(sorted(m for m in sys.modules if 'kvyard.' in m or m == 'numpy'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvyard.replay']"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvyard.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvyard.replay.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_three_runs_one_hash_and_another_seed_another() -> None:
    def once(seed: int) -> str:
        settings = {"limit": 120, "num_gpu_blocks": 2000, "workers": 4, "host_blocks": 4000, "seed": seed}
        return digest(replay(CONVERSATION, slo="ttft=500", **settings))  # type: ignore[arg-type]

    assert once(0) == once(0) == once(0)
    assert once(1) != once(0)


@pytest.mark.parametrize(
    "settings",
    [
        {"router": "kv", "limit": 250, "num_gpu_blocks": 1500, "workers": 4, "event_lag": "20ms"},
        {"router": "round-robin", "limit": 150, "num_gpu_blocks": 2500, "workers": 2, "host_blocks": 4000},
        {
            "router": "round-robin",
            "limit": 250,
            "block_size": 16,
            "num_gpu_blocks": 8000,
            "workers": 2,
            "backend": "sglang",
        },
    ],
)
def test_plans_and_single_steps_agree_on_a_real_trace(settings: dict[str, object]) -> None:
    assert same_but_for_plans(CONVERSATION, settings)


FLEETS: list[dict[str, object]] = [
    {"router": "kv"},
    {"router": "affinity", "event_lag": "30ms"},
    {"router": "kv", "host_scope": "shared"},
    {"router": "kv", "host_blocks": 500, "storage_blocks": 5000},
    {"router": "kv", "host_blocks": 500, "storage_blocks": 5000, "storage_scope": "shared", "event_lag": "30ms"},
    {"router": "round-robin", "offload_policy": "on_eviction"},
    {"router": "least-loaded", "dp_size": 2},
    {"router": "approx", "concurrency": 8, "host_blocks": 0},
    {"router": "kv", "temperature": 0.3, "num_speculative_tokens": 2, "host_blocks": 0},
]
"""Fleets of all sorts."""


@pytest.mark.parametrize("settings", FLEETS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_plans_and_single_steps_agree_on_sessions(settings: dict[str, object]) -> None:
    assert same_but_for_plans(sessions(80, seed=8), {**TIERS, **settings})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", FLEETS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_plans_and_single_steps_agree_whatever_the_traffic(settings: dict[str, object]) -> None:
    for seed in range(12):
        assert same_but_for_plans(sessions(150, seed=seed), {**TIERS, **settings}), seed


def same_but_for_plans(trace: object, settings: dict[str, object]) -> bool:
    reports = []
    for plans in (True, False):
        made = replay(trace, plans=plans, **settings)  # type: ignore[arg-type]
        config = dict(made.report.config)
        assert config.pop("plans") is plans
        reports.append(to_json(made.report).replace(f'"plans":{str(plans).lower()}'.encode(), b""))
        rows = [
            (record.id, record.worker, record.admitted, record.first_token, record.ended) for record in made.records
        ]
        reports.append(repr(sorted(rows)).encode())
    return reports[0] == reports[2] and reports[1] == reports[3]


def test_agents_in_closed_loop_with_a_host_tier() -> None:
    trace = open_trace(SAMPLES / "weka_sessions.jsonl.xz")
    made = replay(trace, concurrency=2, workers=2, num_gpu_blocks=3000, host_blocks=20000)
    rows = list(trace)
    assert made.report.requests == {"all": len(rows), "finished": len(rows)}
    assert made.report.reuse["all"].value > 0.5
    assert digest(made) == digest(replay(trace, concurrency=2, workers=2, num_gpu_blocks=3000, host_blocks=20000))
    tops: dict[str, tuple[int, int]] = {}
    for row in rows:
        record = made.fleet.records[row.id]
        top = row.root or row.session or row.id
        first, last = tops.get(top, (record.arrival, record.ended))
        tops[top] = (min(first, record.arrival), max(last, record.ended))
    from tests.replay.support import most_at_once

    assert most_at_once(list(tops.values())) <= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (SHARED / "weka").is_dir(), reason="the whole Weka trace isn't here")
def test_a_hundred_agentic_sessions(tmp_path: Path) -> None:
    from kvyard.replay.traces import sliced

    trace = sliced(open_trace(SHARED / "weka" / "claude_code_710.jsonl.xz"), sessions=100)
    made = replay(trace, concurrency=20, workers=4, host_blocks=65_000, bounds=True)
    counts = made.report.requests
    assert counts["finished"] + counts.get("rejected", 0) == counts["all"] > 1000
    assert made.report.reuse["host"].part > 0
    assert made.report.reuse["all"].value <= made.report.bounds["infinite"].value
    made.save(tmp_path / "r.json", tmp_path / "r.jsonl", tmp_path / "r.html")


@pytest.mark.parametrize("plans", [True, False])
def test_a_hybrid_model_with_caching_host_tier_and_kv_routing(plans: bool) -> None:
    """Full attention and sliding windows: the combination that others refuse."""
    made = replay(
        CONVERSATION,
        model="gpt-oss-20b",
        timing="polynomial",
        num_gpu_blocks=6000,
        host_bytes="6GiB",
        workers=3,
        router="kv",
        limit=80,
        plans=plans,
        max_num_batched_tokens=4096,
    )
    kinds = {spec.kind for spec in made.fleet.config.workers[0].engine.specs}
    assert kinds == {"full", "sliding_window"}
    assert made.report.requests == {"all": 80, "finished": 80}
    assert made.report.reuse["device"].part > 0 and made.report.reuse["host"].part > 0
    assert any(record.overlap for record in made.records)
    for worker in made.fleet.workers:
        worker.cores[0].scheduler.manager.check_integrity()


def test_settings_may_come_from_a_file_with_arguments_on_top(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        """
        router = "round-robin"
        block_size = 16
        event_lag = "5ms"
        [[workers]]
        name = "big"
        count = 2
        num_gpu_blocks = "2k"
        [[workers]]
        name = "small"
        num_gpu_blocks = 500
        host_blocks = 1000
        drain = "1min"
        """
    )
    made = replay(sessions(30), config=file, router="kv")
    config = made.fleet.config
    assert config.router.policy == "kv" and config.event_lag == 5_000_000
    assert [(kind.name, kind.count, kind.engine.num_gpu_blocks) for kind in config.workers] == [
        ("big", 2, 2000),
        ("small", 1, 500),
    ]
    assert config.workers[1].drain == 60_000_000_000 and config.workers[1].engine.tiers is not None
    with pytest.raises(KvyardError, match="workers is given twice"):
        replay(sessions(30), config=file, workers=3)


def test_a_whole_config_stands_alone() -> None:
    config = make_config({"workers": 2, "block_size": 16})
    assert replay(sessions(20), config=config).fleet.config == config
    with pytest.raises(KvyardError, match="put seed into it"):
        replay(sessions(20), config=config, seed=1)


def test_any_requests_will_do() -> None:
    rows = [request(str(number), number) for number in range(5)]
    assert replay(rows, workers=1).report.requests["finished"] == 5
    assert replay(iter(rows), workers=1, limit=3, bounds=True).report.requests["finished"] == 3
    assert replay(sessions(20), workers=1, limit=4).report.requests["finished"] == 4
    with pytest.raises(KvyardError, match="no requests"):
        replay([])
    with pytest.raises(KvyardError, match="are for files"):
        replay(rows, skip_bad=True)


def test_saved_files_can_be_read(tmp_path: Path) -> None:
    made = replay(CONVERSATION, limit=60, workers=2, slo={"ttft": 500, "itl": 20}, bounds=True, label="a run")
    made.save(tmp_path / "r.json", tmp_path / "r.jsonl", tmp_path / "r.html")
    assert read_report(tmp_path / "r.json") == made.report
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 60
    assert "a run" in (tmp_path / "r.html").read_text()
    assert made.report.goodput is not None and made.report.bounds
    assert made.report.trace == {"name": "mooncake_conversation.jsonl.xz", "format": "mooncake"}


def test_an_interrupt_leaves_a_valid_report() -> None:
    def told(came: int, through: int, now: int) -> None:
        if through > 20:
            raise KeyboardInterrupt

    made = replay(CONVERSATION, limit=2000, workers=2, progress=told)
    assert not made.complete and not made.report.complete
    counts = made.report.requests
    assert 20 < counts["finished"] < counts["all"] < 2000
    assert read_again(made) == made.report


def read_again(made: SimulatedRun) -> object:
    from kvyard.replay.report.files import from_json

    return from_json(to_json(made.report))


def test_requests_that_fit_nobody() -> None:
    rows = [request("small", 0), request("large", 1, input_length=5000)]
    made = replay(rows, workers=1, num_gpu_blocks=20)
    assert made.report.requests == {"all": 2, "finished": 1, "rejected": 1}
    with pytest.raises(KvyardError, match=r"none of the 2 requests fits .*num_gpu_blocks"):
        replay(rows, workers=1, num_gpu_blocks=1)


def test_an_slo_that_is_none() -> None:
    for slo in ("ttft", "ttft=0", "speed=3", "ttft=x", {"itl": -1}, ""):
        with pytest.raises(KvyardError, match="SLO"):
            replay(sessions(10), slo=slo)
