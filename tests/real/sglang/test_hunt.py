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
import json
import random
from kvyard.sglang.hunt import ENGINE

ENGINE.import_engine()
from sglang.srt.mem_cache.allocator import paged, token

for kind in (paged.PagedTokenToKVPoolAllocator, token.TokenToKVPoolAllocator):
    free, freed = kind.free, [0]

    def forgetful(self, indices, *more, free=free, freed=freed):
        freed[0] += 1
        return None if freed[0] % 7 == 0 else free(self, indices, *more)

    kind.free = forgetful
found = [ENGINE.run(ENGINE.draw(random.Random(seed)))[0] for seed in range(12)]
print(json.dumps([each and each["kind"] for each in found]))
"""


@pytest.fixture
def python() -> str:
    found = os.environ.get("KVYARD_SGLANG_PYTHON")
    if not found:
        pytest.skip("needs a real SGLang: set KVYARD_SGLANG_PYTHON to a Python that has it (make peers ARGS=sglang)")
    return found


def test_cases_run(tmp_path: Path, python: str) -> None:
    command = [sys.executable, "-m", "kvyard", "hunt", "--engine=sglang", "--python", python, "--seconds=8", "--json"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["engine"].startswith("sglang 0.") and result["tried"] >= 1
    for each in result["findings"]:
        again = subprocess.run([python, tmp_path / each["script"]], capture_output=True, text=True, check=False)
        assert again.returncode == 1 and each["finding"]["kind"] in again.stdout


def test_pages_that_are_never_freed_are_noticed(python: str) -> None:
    source = str(Path(__file__).parents[3] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([python, "-c", BROKEN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kinds = json.loads(done.stdout.splitlines()[-1])
    assert kinds.count(None) < len(kinds) - 3, kinds
