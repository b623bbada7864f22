"""Independent pools: each as if it were alone, one report on all, the same whoever runs them, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.replay.support import write_pool_trace

from kvyard.errors import KvyardError
from kvyard.lab.jobs import Ended, LocalExecutor, Progress, Task
from kvyard.lab.pools import pool_requests, replay_pools
from kvyard.replay.report.files import to_json
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay
from kvyard.replay.traces import open_trace

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "num_gpu_blocks": 400,
    "router": "kv",
    "pools": [
        {"name": "org/small", "workers": 2},
        {"name": "large", "prefill": 1, "decode": 1, "nic_bandwidth": 1},
        {
            "name": "host",
            "workers": 1,
            "dp_size": 2,
            "num_gpu_blocks": 200,
            "host_blocks": 800,
            "router": "round-robin",
        },
    ],
}
NAMES = tuple(pool["name"] for pool in SETTINGS["pools"])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that ask for one of three models each."""
    path = tmp_path_factory.mktemp("pools") / "trace.jsonl"
    write_pool_trace(path, NAMES)
    return path


class Backwards(LocalExecutor):
    """Runs tasks as other processes get them, the last first."""

    def run(self, tasks: Sequence[Task], ended: Ended, told: Progress | None = None) -> None:
        super().run(pickle.loads(pickle.dumps(list(reversed(tasks)))), ended, told)


@pytest.mark.parametrize("crew", [Backwards(), pytest.param(LocalExecutor(2), marks=pytest.mark.slow)])
def test_one_process_and_others_give_the_same_bytes(trace: Path, tmp_path: Path, crew: LocalExecutor) -> None:
    rows = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    one = replay_pools(trace, SETTINGS, slo="ttft=500,itl=20", per_request=rows[0])
    two = replay_pools(trace, SETTINGS, slo="ttft=500,itl=20", per_request=rows[1], executor=crew)
    assert to_json(one.report) == to_json(two.report)
    assert rows[0].read_bytes() == rows[1].read_bytes()
    arrivals = [json.loads(line)["arrival_ns"] for line in rows[0].read_text().splitlines()]
    assert arrivals == sorted(arrivals) and len(arrivals) == one.report.requests["all"]
    assert report_text(one.report) == report_text(two.report)


def test_each_pool_is_as_it_would_be_alone_and_the_whole_is_their_sum(trace: Path) -> None:
    done = replay_pools(trace, SETTINGS, slo="ttft=500")
    common = {name: value for name, value in SETTINGS.items() if name != "pools"}
    whole = open_trace(trace)
    assert isinstance(done.report.pools, dict) and list(done.report.pools) == list(NAMES)
    found = []
    for pool in SETTINGS["pools"]:
        own = {name: value for name, value in pool.items() if name != "name"}
        alone = replay(
            pool_requests(whole, pool["name"], NAMES), label=pool["name"], slo="ttft=500", **{**common, **own}
        )
        in_it = done.report.pools[pool["name"]]
        assert {**vars_of(alone.report), "trace": {}} == vars_of(in_it)
        found.append(alone)
    report = done.report
    assert report.requests["all"] == sum(len(one.records) for one in found)
    ttfts = sorted(record.ttft for one in found for record in one.records if record.status == "finished")
    assert report.latency["ttft"].p50 * 1e6 == pytest.approx(ttfts[(len(ttfts) - 1) // 2])
    assert report.latency["itl"].count == sum(one.report.latency["itl"].count for one in found)
    assert report.router is not None and report.router.decisions == report.requests["all"]
    assert report.router.policy == "kv, round-robin"
    admitted = sum(record.input for one in found for record in one.records if record.admitted >= 0)
    for name in report.reuse:
        assert report.reuse[name].part == sum(one.report.reuse[name].part for one in found)
        assert report.reuse[name].whole == admitted
    assert sum(one.part for one in (*report.missed_tokens.values(), report.reuse["all"])) == admitted
    assert sum(one.part for one in report.misses.values()) == report.misses["never_seen"].whole
    assert [worker.name for worker in report.workers] == [
        f"{pool}/{worker.name}" for pool, one in zip(NAMES, found, strict=False) for worker in one.report.workers
    ]
    by_worker = {worker.name: worker.requests for worker in report.workers}
    assert sum(map(sum, report.series.routed)) == sum(by_worker.values())
    assert report.tiers["host"].capacity_blocks == 1600 and report.transfers["stores"].blocks > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_of_models_may_have_an_at_sign(trace: Path, tmp_path: Path, ranks: int) -> None:
    """It tells ranks apart in the names of workers, and mustn't be taken for that in the name of a pool."""
    odd = tmp_path / "odd.jsonl"
    odd.write_text(trace.read_text().replace('"large"', '"la@7"'))
    pools = [{**pool, "dp_size": ranks} for pool in SETTINGS["pools"]]
    plain = replay_pools(trace, {**SETTINGS, "pools": pools}).report
    renamed = [{**pool, "name": pool["name"].replace("large", "la@7")} for pool in pools]
    named = replay_pools(odd, {**SETTINGS, "pools": renamed}).report
    assert named.series.routed == plain.series.routed
    assert [(one.name.replace("la@7", "large"), one.requests) for one in named.workers] == [
        (one.name, one.requests) for one in plain.workers
    ]
    assert sum(one.requests for one in named.workers) >= named.requests["all"]


def vars_of(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


def refused(trace: Path, pools: Any, **more: Any) -> str:
    with pytest.raises(KvyardError) as error:
        replay_pools(trace, {**SETTINGS, **more, "pools": pools})
    return str(error.value)


def test_refusals(trace: Path, tmp_path: Path) -> None:
    assert "asks for the model 'large', and the fleet's pools are 'org/small'" in refused(trace, SETTINGS["pools"][:1])
    assert "write [[pools]]" in refused(trace, 3)
    assert "pool 2 has no name" in refused(trace, [{"name": "a"}, {"workers": 2}])
    assert "two pools are called 'a'" in refused(trace, [{"name": "a"}, {"name": "a"}])
    assert "pool 'a': unknown setting 'worker'" in refused(trace, [{"name": "a", "worker": 2}])
    assert "pool 'a': limit is for the whole trace" in refused(trace, [{"name": "a", "limit": 2}])
    idle = [*SETTINGS["pools"], {"name": "idle", "workers": 1}]
    assert "no request that is replayed asks for the model 'idle': leave its pool out" in refused(trace, idle, limit=15)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    again = next(at for at, row in enumerate(rows) if row.get("delay") is not None)
    cases: dict[str, Callable[[dict[str, Any]], object]] = {
        "names no model": lambda row: row.pop("model"),
        "so their pools aren't independent": lambda row: row.update(model=next(n for n in NAMES if n != row["model"])),
        "waits for": lambda row: row.update(
            session_id="new", wait_for=[next(one["request_id"] for one in rows if one["model"] != row["model"])]
        ),
    }
    for words, change in cases.items():
        changed = [dict(row) for row in rows]
        change(changed[again])
        path = tmp_path / "odd.jsonl"
        path.write_text("\n".join(map(json.dumps, changed)) + "\n")
        assert words in refused(path, SETTINGS["pools"]), words


def test_bad_rows_that_are_left_out_are_counted_once(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    lines = trace.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], "{bad", *lines[20:]]) + "\n")
    done = replay_pools(path, {**SETTINGS, "limit": 25}, skip_bad=True)
    assert done.report.trace == {"name": "odd.jsonl", "format": "mooncake", "skipped": 1}
    assert done.trace is not None and "1 bad rows skipped, the first: " in done.trace.tally.notes()[0]


def test_the_limit_is_of_the_whole_trace(trace: Path) -> None:
    done = replay_pools(trace, {**SETTINGS, "limit": 15})
    assert done.report.requests["all"] == 15
