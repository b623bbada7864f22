"""The strict CI mode of conftest.py, seen from outside: a run of its own in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MUST_RUN = {
    "test_marked.py": "import pytest\n@pytest.mark.zmq\ndef test_it(): pytest.skip('no')\n",
    "test_module.py": "import pytest\npytestmark = pytest.mark.redis\npytest.skip('no', allow_module_level=True)\n",
}
MAY_SKIP = {
    "test_unmarked.py": "import pytest\ndef test_it(): pytest.skip('no')\n",
    "test_xfailed.py": "import pytest\n@pytest.mark.zmq\n@pytest.mark.xfail\ndef test_it(): assert False\n",
    "test_passes.py": "def test_it(): pass\n",
}


def run(folder: Path, tests: dict[str, str], strict: bool) -> subprocess.CompletedProcess[str]:
    """Runs ``tests`` (text by file name) in ``folder`` under our conftest, in a worker as ``make test`` does."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  zmq:\n  redis:\n")
    for name, text in tests.items():
        (folder / name).write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KVYARD_"))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take seconds to load, and none but xdist is needed
    if strict:
        env["KVYARD_CI_STRICT"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "1", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)


def test_strict_fails_on_skipped_tests_that_must_run(tmp_path: Path) -> None:
    done = run(tmp_path, MUST_RUN | MAY_SKIP, strict=True)
    assert done.returncode == 1, done.stdout
    named = done.stdout.partition("must run here")[2]
    assert all(name in named for name in MUST_RUN)
    assert not any(name in named for name in MAY_SKIP)


def test_strict_accepts_other_skips(tmp_path: Path) -> None:
    done = run(tmp_path, MAY_SKIP, strict=True)
    assert done.returncode == 0, done.stdout


def test_lenient_accepts_every_skip(tmp_path: Path) -> None:
    done = run(tmp_path, MUST_RUN | MAY_SKIP, strict=False)
    assert done.returncode == 0, done.stdout
