"""What a plain install gives: the hot modules compiled, and nothing else different from the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"

REPLAY = """
import sys
from kvyard.blocks import pool
from kvyard.replay.report.files import to_json
from kvyard.replay.run import replay

print(pool.__file__)
for settings in (
    {"router": "kv", "workers": 4, "block_size": 16, "num_gpu_blocks": 8000},
    {"router": "kv", "workers": 2, "num_gpu_blocks": 1500, "host_blocks": 4000, "block_size": 64},
    {"router": "round-robin", "workers": 2, "model": "gpt-oss-20b", "num_gpu_blocks": 20000, "host_blocks": 20000},
):
    print(to_json(replay(sys.argv[1], limit=400, **settings).report).decode())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvyard as ``pip install`` makes it, in an environment of its own that has only what the build asks for."""
    target = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    made = {**os.environ, "KVYARD_COMPILE": "1"}
    done = subprocess.run(
        [*command, "--target", str(target), str(ROOT)], env=made, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def run(path: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_report_is_the_same_to_the_byte(plain: Path) -> None:
    told = {path: run(path, sys.executable, "-c", REPLAY, str(TRACE)).split("\n", 1) for path in (plain, ROOT / "src")}
    (compiled, ours), (source, theirs) = told[plain], told[ROOT / "src"]
    assert not compiled.endswith(".py") and source.endswith(".py")
    assert ours == theirs


@pytest.mark.parametrize("package", ["blocks", "engine", "hashing", "index", "replay", "router", "tiers"])
def test_the_tests_pass_compiled(plain: Path, package: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"tests/{package}"]
    assert " passed" in run(plain, *command)


def test_without_a_compiler_the_install_is_pure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "CC": "/bin/false"}
    subprocess.run([*command, "--target", str(tmp_path), str(ROOT)], env=environment, check=True, capture_output=True)
    assert not [path for path in tmp_path.rglob("*.so")]
    assert "pool.py" in run(tmp_path, sys.executable, "-c", "from kvyard.blocks import pool; print(pool.__file__)")
