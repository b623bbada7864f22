"""What kvyard.vllm offers is what the pinned vLLM asks for, and the pinned one is the one that is installed.

Both sides are read as text, so this needs no vLLM, except for the comparison with an installed one.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import kvyard.vllm
from kvyard.vllm import interface
from kvyard.vllm.version import VersionError

HERE = Path(kvyard.vllm.__file__).parent
PREFIX = "KVCacheManager."


def pinned_manager() -> dict[str, list[str]]:
    lines = [line.removeprefix(PREFIX) for line in interface.pinned() if line.startswith(PREFIX)]
    text = "class KVCacheManager:\n" + "".join(f"    def {line}: ...\n" for line in lines)
    return interface.signatures(text, "KVCacheManager")


def test_the_manager_has_every_method_with_the_same_parameters() -> None:
    theirs = pinned_manager()
    ours = interface.signatures((HERE / "manager.py").read_text(), "Manager")
    assert len(theirs) > 25
    assert {name: ours.get(name) for name in theirs} == theirs


def test_the_manager_has_every_attribute() -> None:
    theirs = {line.split()[-1] for line in interface.pinned() if line.startswith("KVCacheManager has ")}
    source = ast.parse((HERE / "manager.py").read_text())
    ours = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert theirs
    assert theirs <= ours


@pytest.mark.parametrize(("part", "facade"), [("block_pool", "PoolFacade"), ("coordinator", "CoordinatorFacade")])
def test_attributes_read_through_the_manager_exist(part: str, facade: str) -> None:
    wanted = {path.split(".")[1] for path in interface.asked_for() if path.startswith(f"{part}.")}
    text = (HERE / "facades.py").read_text()
    found = next(item for item in ast.parse(text).body if isinstance(item, ast.ClassDef) and item.name == facade)
    there = set(interface.signatures(text, facade)) | {
        node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert wanted
    assert wanted <= there


def test_everything_else_asked_for_is_the_managers() -> None:
    plain = {path.split(".")[0] for path in interface.asked_for()}
    assert plain <= set(pinned_manager()) | {"block_pool", "coordinator", "empty_kv_cache_blocks"} | {
        line.split()[-1] for line in interface.pinned() if line.startswith("KVCacheManager has ")
    }


@pytest.mark.parametrize(
    ("file", "ours", "theirs"),
    [
        ("recording.py", "RecordingMixin", "Scheduler"),
        ("eviction.py", "OrderPolicy", "CachePolicy"),
        ("offloading.py", "CopyWorker", "OffloadingWorker"),
        ("offloading.py", "CopyOffloadingSpec", "CPUOffloadingSpec"),
    ],
)
def test_every_method_that_is_overridden_or_called_is_pinned(file: str, ours: str, theirs: str) -> None:
    source = (HERE / file).read_text()
    found = next(item for item in ast.parse(source).body if isinstance(item, ast.ClassDef) and item.name == ours)
    own = {"__init__", "_tell", "_is_busy", "_pairs", "_note"}
    named = set(interface.signatures(source, ours)) - own
    named |= {
        node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute) and "super()" in ast.unparse(node)
    }
    named |= {"get_request_counts"} if ours == "RecordingMixin" else set()
    pinned = {line.partition("(")[0] for line in interface.pinned()}
    assert len(named) > 1
    assert {name for name in named if f"{theirs}.{name}" not in pinned} == set()


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match=r"has no v1/core/kv_cache_manager\.py"):
        interface.drift(tmp_path)


def installed_vllm() -> Path:
    """The folder of the installed vLLM, found without importing it."""
    python = os.environ.get("KVYARD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs a real vLLM: set KVYARD_VLLM_PYTHON to a Python that has it (make peers ARGS=vllm)")
    code = "from importlib.util import find_spec; print(find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


@pytest.mark.vllm
@pytest.mark.slow
def test_the_installed_vllm_is_as_pinned() -> None:
    found = interface.drift(installed_vllm())
    assert not found, "\n".join(["the installed vLLM isn't the pinned one:", *found])


@pytest.mark.vllm
@pytest.mark.slow
def test_a_changed_vllm_shows_as_a_readable_diff(tmp_path: Path) -> None:
    vllm = installed_vllm()
    for file in {file for file, *_ in (*interface._CLASSES, *interface._METHODS, *interface._FIELDS)} | {
        *interface._USERS,
        "v1/request.py",
    }:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(vllm / file, tmp_path / file)
    assert not interface.drift(tmp_path)
    manager = tmp_path / "v1/core/kv_cache_manager.py"
    manager.write_text(manager.read_text().replace("def free(self, request: Request)", "def free(self, request, why)"))
    scheduler = tmp_path / "v1/core/sched/scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("self.kv_cache_manager.usage", "self.kv_cache_manager.load"))
    changed = [line for line in interface.drift(tmp_path) if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert sorted(changed) == [
        "+KVCacheManager.free(self, request, why) -> None",
        "+v1/core/sched/scheduler.py asks for load",
        "-KVCacheManager.free(self, request: Request) -> None",
        "-v1/core/sched/scheduler.py asks for usage",
    ]
