"""Servers of kvyard that benchmarks start."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(command: list[str], folder: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of kvyard, and where it is."""
    ready = folder / f"{name}.json"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvyard", *command, "--port", "0", "--ready-file", str(ready)],
            stdout=log,
            stderr=log,
        )
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit(f"{name} didn't start:\n{(folder / f'{name}.log').read_text()}")
            time.sleep(0.1)
        match = re.search(r"http://[\d.:]+", ready.read_text())
        assert match is not None
        yield process, match[0]
    finally:
        process.terminate()
        process.wait(60)
