"""What watches vLLM's scheduler, over a scheduler that is played: vLLM isn't installed here, so a few names stand in for it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvyard.errors import KvyardError
from kvyard.lab.calibrate.passes import read_passes
from kvyard.vllm.recorder import LIMIT
from kvyard.vllm.recording_settings import recording_settings

STATUS = SimpleNamespace(FINISHED_ABORTED="aborted", FINISHED_ERROR="error")
STOOD_IN_FOR: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1.core.sched.interface": {"SchedulerInterface": object},
    "vllm.v1.request": {"RequestStatus": STATUS},
    "vllm.v1.kv_cache_interface": dict.fromkeys(
        (
            "ChunkedLocalAttentionSpec",
            "CircularBufferSpec",
            "CrossAttentionSpec",
            "FullAttentionSpec",
            "KVCacheGroupRole",
            "MambaSpec",
            "MLAAttentionSpec",
            "SlidingWindowMLASpec",
            "SlidingWindowSpec",
            "UniformTypeKVCacheSpecs",
        )
    ),
}


class PlayedScheduler:
    """Computes a prompt in one step and answers with one token. Where there are some that are ``decoding``, by how many tokens
    they have, the next step is theirs.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.connector = "one, so that no decisions are recorded"
        self.hash_block_size = 16
        self.requests: dict[str, Any] = {}
        self.running: list[str] = []
        self.decoding: dict[str, int] = {}
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 9))

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.requests) - len(self.running)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        if self.decoding:
            known, self.decoding = self.decoding, {}
            cached = SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values()), resumed_req_ids=())
            return SimpleNamespace(
                total_num_scheduled_tokens=len(known),
                num_scheduled_tokens=dict.fromkeys(known, 1),
                scheduled_new_reqs=[],
                scheduled_cached_reqs=cached,
            )
        name = next((name for name in self.requests if name not in self.running), None)
        fresh = []
        if name is not None:
            self.running.append(name)
            fresh.append(SimpleNamespace(req_id=name, num_computed_tokens=0))
        return SimpleNamespace(
            total_num_scheduled_tokens=3 * len(fresh),
            num_scheduled_tokens={data.req_id: 3 for data in fresh},
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=()),
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> list[str]:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            self._update_request_with_output(request)
            self._free_request(request)
        return list(scheduler_output.num_scheduled_tokens)

    def _update_request_with_output(self, request: Any) -> None:
        request.num_output_tokens = 1

    def _free_request(self, request: Any) -> None:
        self.running.remove(request.request_id)
        del self.requests[request.request_id]

    def shutdown(self) -> None:
        pass


def config(record: object, *, stages: int = 1, batches: int = 1) -> Any:
    return SimpleNamespace(
        additional_config={"kvyard_record": record},
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, data_parallel_index=0),
        max_concurrent_batches=batches,
    )


def request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        block_hashes=[],
        all_token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        num_output_tokens=0,
        max_tokens=1,
        priority=0,
        status="length",
    )


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """A scheduler that is watched, by its configuration."""
    for name, content in STOOD_IN_FOR.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("kvyard.vllm.recording", "kvyard.vllm.groups")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    mixin = import_module("kvyard.vllm.recording").RecordingMixin
    made: list[Any] = []

    def make(vllm_config: Any) -> Any:
        made.append(type("WatchedScheduler", (mixin, PlayedScheduler), {})(vllm_config))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
    for name in ours:
        sys.modules.pop(name, None)


def only_folder(path: Path) -> Path:
    (found,) = path.iterdir()
    return found


def test_the_idle_engine_writes_and_the_busy_one_does_not(scheduler: Callable[[Any], Any], tmp_path: Path) -> None:
    watched = scheduler(config({"folder": str(tmp_path)}))
    watched.add_request(request("a"))
    step = watched.schedule()
    assert watched.update_from_output(step, None) == ["a"]
    folder = only_folder(tmp_path)
    assert {file.stat().st_size for file in folder.iterdir()} == {0}
    watched.schedule()  # as vLLM does to tell its workers who has ended
    assert json.loads((folder / "summary.json").read_text())["passes"] == 1
    assert len((folder / "passes.jsonl").read_text().splitlines()) == 1


def test_the_context_of_a_decoding_request_includes_its_new_token(
    scheduler: Callable[[Any], Any], tmp_path: Path
) -> None:
    watched = scheduler(config({"folder": str(tmp_path)}))
    for name in "ab":
        watched.add_request(request(name))
    watched.running = ["a", "b"]
    watched.decoding = {"a": 10, "b": 4}
    watched.update_from_output(watched.schedule(), None)
    watched.schedule()
    (row,) = read_passes(only_folder(tmp_path) / "passes.jsonl").rows
    assert (row.batch, row.context, row.longest, row.prefills) == (2, 11 + 5, 11, ())


@pytest.mark.parametrize(("stages", "files"), [(1, {"passes.jsonl", "trace.jsonl"}), (2, {"trace.jsonl"})])
def test_concurrent_steps_are_recorded_separately(
    stages: int,
    files: set[str],
    scheduler: Callable[[Any], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        watched = scheduler(config({"folder": str(tmp_path)}, stages=stages, batches=2))
    said = "several pipeline stages at once" if stages > 1 else "asynchronous scheduling is on"
    assert [said in record.getMessage() for record in caplog.records] == [True]
    for name in "ab":
        watched.add_request(request(name))
    steps = [watched.schedule(), watched.schedule()]
    for step in steps:
        watched.update_from_output(step, None)
    watched.schedule()
    folder = only_folder(tmp_path)
    assert {file.name for file in folder.iterdir()} == files | {"summary.json"}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["requests"], summary["trace"]["rows"], summary["errors"]) == (2, 2, 0)
    if stages == 1:
        assert summary["passes"] == 2


BAD: list[tuple[object, str]] = [
    ("/var/tmp/recordings", "kvyard_record must be a table"),
    ([], "kvyard_record must be a table"),
    ({"folder": 7}, "folder must be the path of a folder, not 7"),
    ({"folder": ["a"]}, "folder must be the path"),
    ({"folder": ""}, "folder must be the path"),
    ({"foldr": "/var/tmp"}, "kvyard_record has no 'foldr'; there are folder and limit"),
    ({"folder": "x", "limit": "much"}, "a number of bytes, at least 1, not 'much'"),
    ({"folder": "x", "limit": 0}, "at least 1, not 0"),
    ({"folder": "x", "limit": True}, "at least 1, not True"),
    ({"folder": "x", "limit": [1]}, "at least 1"),
]


@pytest.mark.parametrize(("record", "said"), BAD)
def test_bad_settings_are_refused_in_one_sentence(record: object, said: str) -> None:
    with pytest.raises(KvyardError) as refused:
        recording_settings(config(record))
    assert said in str(refused.value)


def test_settings_come_from_the_table_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVYARD_RECORD", raising=False)
    assert recording_settings(config(None)) is recording_settings(SimpleNamespace(additional_config="a")) is None
    monkeypatch.setenv("KVYARD_RECORD", "there")
    monkeypatch.setenv("KVYARD_RECORD_LIMIT", "5000")
    assert recording_settings(config(None)) == (Path("there"), 5000)
    assert recording_settings(config({"folder": "here", "limit": 7})) == (Path("here"), 7)
    monkeypatch.delenv("KVYARD_RECORD_LIMIT")
    assert recording_settings(config({})) == (Path("there"), LIMIT)


@pytest.mark.parametrize(
    "record", ["/var/tmp/recordings", {"folder": 7}, {"folder": "a\0b"}, {"folder": "/proc/none/such"}]
)
def test_an_engine_starts_whatever_is_wrong_with_its_recording(
    record: object, scheduler: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        watched = scheduler(config(record, stages=2, batches=2))
    said = [one.getMessage() for one in caplog.records if "nothing is recorded" in one.getMessage()]
    assert len(said) == 1 and "\n" not in said[0]
    watched.add_request(request("a"))
    assert watched.update_from_output(watched.schedule(), None) == ["a"]
