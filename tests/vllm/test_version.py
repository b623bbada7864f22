"""What kvyard.vllm says where it can't work."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import kvyard.vllm
from kvyard.vllm.version import VersionError, check_version


@pytest.mark.parametrize("known", ["0.32.0", "0.32.1", "0.32.4+cpu", "0.32.0rc2"])
def test_releases_of_the_known_version_are_accepted(known: str) -> None:
    check_version(known)


@pytest.mark.parametrize("unknown", ["0.33.0", "0.31.2", "1.32.0", "0.320.0", "0.33.0.dev12+gabc"])
def test_other_versions_are_refused_with_where_to_read_on(unknown: str) -> None:
    with pytest.raises(VersionError, match=r"knows vLLM 0\.32; this is .*docs/how-to/inside-vllm\.md") as refused:
        check_version(unknown)
    assert unknown in str(refused.value)


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, kvyard.vllm; assert 'Scheduler' in dir(kvyard.vllm); sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Schedule'"):
        _ = kvyard.vllm.Schedule


def test_without_vllm_the_scheduler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvyard.vllm.version._DISTRIBUTIONS", ("kvyard-has-no-such-distribution",))
    with pytest.raises(VersionError, match=r"it is vLLM that loads kvyard\.vllm"):
        _ = kvyard.vllm.Scheduler


@pytest.mark.parametrize("module", ["eviction", "offloading"])
def test_modules_that_vllm_loads_check_the_version_before_they_import_vllm(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvyard.vllm.version.installed_version", lambda: "0.33.1")
    with pytest.raises(VersionError, match=r"knows vLLM 0\.32; this is 0\.33\.1"):
        import_module(f"kvyard.vllm.{module}")
