"""``kvyard hunt`` with a real SGLang: its scheduler runs, and what its radix tree gets wrong on purpose is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BROKEN = """
import sys
from pathlib import Path
from kvyard.sglang.hunt import ENGINE
from kvyard.lab.hunt.hunter import Hunter

ENGINE.import_engine()
from sglang.srt.mem_cache.allocator import paged, token

for kind in (paged.PagedTokenToKVPoolAllocator, token.TokenToKVPoolAllocator):
    free, freed = kind.free, [0]

    def forgetful(self, indices, *more, free=free, freed=freed):
        freed[0] += 1
        return None if freed[0] % 7 == 0 else free(self, indices, *more)

    kind.free = forgetful
hunter = Hunter(ENGINE, "sglang broken", Path(sys.argv[1]), 0)
hunter.search(45, print)
print(hunter.findings, file=sys.stderr)
sys.exit(not any(found["finding"]["kind"] in ("leak", "crash", "stuck") for found in hunter.findings))
"""


@pytest.fixture
def python() -> str:
    found = os.environ.get("KVYARD_SGLANG_PYTHON")
    if not found:
        pytest.skip("needs a real SGLang: set KVYARD_SGLANG_PYTHON to a Python that has it (make peers ARGS=sglang)")
    return found


def test_cases_run(tmp_path: Path, python: str) -> None:
    command = [sys.executable, "-m", "kvyard", "hunt", "--engine=sglang", "--python", python, "--seconds=30", "--json"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["engine"].startswith("sglang 0.") and result["tried"] >= 10
    for each in result["findings"]:
        again = subprocess.run([python, tmp_path / each["script"]], capture_output=True, text=True, check=False)
        assert again.returncode == 1 and each["finding"]["kind"] in again.stdout


def test_pages_that_are_never_freed_are_noticed(tmp_path: Path, python: str) -> None:
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [python, "-c", BROKEN, tmp_path],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
