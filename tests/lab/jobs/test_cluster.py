"""Replays on a real Ray cluster of two nodes on this machine, and a third that is killed in the middle: ``make test-ray``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.replay.support import sessions, write_pool_trace
from tests.replay.traces.support import CONVERSATION

from kvyard.cli.app import main
from kvyard.errors import KvyardError
from kvyard.lab.jobs import LocalExecutor, Task, TracePart, perform
from kvyard.lab.jobs.cluster import RayExecutor, _check_reached, pack, unpack
from kvyard.lab.league import league
from kvyard.lab.pools import replay_pools
from kvyard.lab.sweep import sweep
from kvyard.lab.tune import parse_goals, parse_limits, tune
from kvyard.replay.report.files import to_json
from kvyard.replay.settings import make_config
from kvyard.replay.traces.writing import write_trace

BASE: dict[str, Any] = {"limit": 60, "block_size": 512, "num_gpu_blocks": 512}


class TestPacking:
    """Files that travel to the nodes; needs no Ray."""

    def test_a_file_and_a_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "talks"
        (folder / "deep").mkdir(parents=True)
        (folder / "a.json").write_text("1")
        (folder / "deep" / "b.json").write_text("2")
        packed = pack(folder)
        assert packed == {"talks/a.json": b"1", "talks/deep/b.json": b"2"}
        there = Path(unpack("digest-a", packed))
        assert there.name == "talks" and (there / "deep" / "b.json").read_text() == "2"
        assert unpack("digest-a", {}) == str(there), "once"
        one = Path(unpack("digest-b", pack(folder / "a.json")))
        assert one.name == "a.json" and one.read_text() == "1" and one.parent != there.parent
        with pytest.raises(KvyardError, match="can't read"):
            pack(tmp_path / "none")


@pytest.mark.parametrize(
    "command", [["sweep", "--vary", "workers=1,2"], ["league"], ["tune", "--search", "workers=1..2"]]
)
def test_without_ray_it_says_how_to_get_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as exit_:
        main([command[0], str(CONVERSATION), *command[1:], "--ray", "auto", "-o", str(tmp_path / "x")])
    assert exit_.value.code == 2 and not (tmp_path / "x").exists()
    assert capsys.readouterr().err == "Error: --ray needs ray: pip install 'kvyard[ray]'\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray: make test-ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    here = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = utils.Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
    made.add_node(**here)
    yield made
    made.shutdown()


def files(folder: Path) -> dict[str, bytes]:
    """All that a command wrote, but for the journal of a search, which has times in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "study.journal"
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
class TestOnTwoNodes:
    def test_the_same_byte_for_byte(self, cluster: Any, tmp_path: Path) -> None:
        vary = {"router": ["kv", "round-robin"], "workers": ["2", "3"]}
        search = "router=kv|round-robin,workers=2..5"
        with RayExecutor(cluster.address) as crew:
            assert crew.jobs == 2
            for name, executor in (("ray", crew), ("here", LocalExecutor(2))):
                folder = tmp_path / name
                sweep(CONVERSATION, vary, folder=folder / "sweep", executor=executor, slo="ttft=900", **BASE).save()
                league(
                    CONVERSATION, folder=folder / "league", policies=["kv", "lmetric"], executor=executor, **BASE
                ).save()
                tune(
                    CONVERSATION,
                    search,
                    parse_goals("min cost"),
                    parse_limits("ttft_p99=2800"),
                    folder=folder / "tune",
                    trials=5,
                    executor=executor,
                    **BASE,
                ).save()
        one, other = files(tmp_path / "ray"), files(tmp_path / "here")
        assert one == other and len(one) > 12

    def test_pools_give_the_same_bytes(self, cluster: Any, tmp_path: Path) -> None:
        names = ("small", "large", "host")
        write_pool_trace(tmp_path / "trace.jsonl", names)
        pools: list[dict[str, Any]] = [{"workers": 2}, {"prefill": 1, "decode": 1}, {"workers": 1, "host_blocks": 800}]
        settings = {
            "block_size": 16,
            "num_gpu_blocks": 400,
            "pools": [{"name": name, **more} for name, more in zip(names, pools, strict=False)],
        }
        rows = [tmp_path / "here.jsonl", tmp_path / "ray.jsonl"]
        here = replay_pools(tmp_path / "trace.jsonl", settings, per_request=rows[0])
        with RayExecutor(cluster.address) as crew:
            there = replay_pools(tmp_path / "trace.jsonl", settings, per_request=rows[1], executor=crew)
        assert to_json(here.report) == to_json(there.report) and here.report.requests["all"] == 24
        assert rows[0].read_bytes() == rows[1].read_bytes()

    def test_a_replay_that_fails_leaves_the_others(self, cluster: Any, tmp_path: Path) -> None:
        with RayExecutor(cluster.address) as crew:
            made = sweep(
                CONVERSATION, {"num_gpu_blocks": [1, 512]}, folder=tmp_path, executor=crew, limit=20, block_size=512
            )
        assert len(made.done) == 1 and "none of the 20 requests fits" in made.failures[0].why

    def test_a_lost_node_s_replays_are_run_again(self, cluster: Any, tmp_path: Path) -> None:
        victim = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        trace = tmp_path / "long.jsonl"
        write_trace(sessions(1_500, arrivals="poisson:rate=20", turns="fixed:1"), trace, "mooncake")
        config = make_config({"workers": 2, "block_size": 16, "num_gpu_blocks": 500, "plans": "off"})
        tasks = [
            Task(
                str(trace),
                {"trace_block_size": 16},
                config,
                None,
                str(at),
                str(tmp_path / f"{at}.json"),
                str(at),
                TracePart(),
            )
            for at in range(8)
        ]
        ends: dict[str, str | None] = {}

        def ended(key: str, why: str | None) -> None:
            assert key not in ends, "told once"
            ends[key] = why

        (raylet,) = (one.process.pid for one in victim.all_processes["raylet"])
        killer = threading.Thread(target=kill_when_busy, args=(raylet,))
        with RayExecutor(cluster.address) as crew:
            assert crew.jobs == 3
            begun = counted(crew)
            killer.start()
            crew.run(tasks, ended)
        killer.join()
        cluster.remove_node(victim, allow_graceful=False)
        assert ends == {task.key: None for task in tasks}
        assert len(begun) > len(tasks), "one that was on the lost node was begun again"
        want = perform(tasks[0]._replace(label="")).decode()
        for task in tasks:
            assert Path(task.path).read_text().replace(f'"label":"{task.label}"', '"label":""') == want

    def test_another_version_there(self, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvyard.lab.jobs import cluster as module

        monkeypatch.setattr(module, "__version__", "9.9")
        task = Task(str(CONVERSATION), {"limit": 5}, make_config({}), None, "", str(tmp_path / "x"), "x")
        with (
            RayExecutor(cluster.address) as crew,
            pytest.raises(KvyardError, match=r"can't run a replay .*install kvyard 9\.9 there"),
        ):
            crew.run([task], lambda key, why: None)


def kill_when_busy(raylet: int) -> None:
    """Kill a node, all of its processes at once, as soon as it is in the middle of a replay."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        own = children(raylet)
        if any(name.startswith("ray::_work") for name in own.values()):
            for pid in (raylet, *own):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def children(parent: int) -> dict[int, str]:
    """The processes that another one started, with what they call themselves."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (place / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def counted(crew: RayExecutor) -> list[str]:
    """The keys of all replays that ``crew`` begins, from now on."""
    found: list[str] = []
    remote = crew._remote

    class Counting:
        def remote(self, task: Task, *more: Any) -> Any:
            found.append(task.key)
            return remote.remote(task, *more)

    crew._remote = Counting()  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_an_address_that_nothing_listens_at_is_refused_at_once(address: str) -> None:
    with pytest.raises(KvyardError, match=r"^no Ray cluster at .*see that it runs"):
        _check_reached(address)


@pytest.mark.parametrize("address", ["auto", "local", "127.0.0.1:", "head:port"])
def test_other_addresses_are_left_to_ray(address: str) -> None:
    _check_reached(address)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_cluster_there() -> None:
    pytest.importorskip("ray", reason="needs Ray: make test-ray")
    with pytest.raises(KvyardError, match=r"no Ray cluster at 127\.0\.0\.1:1 \(.*see that it runs and can be reached"):
        RayExecutor("127.0.0.1:1")
