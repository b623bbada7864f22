"""Real engines that some slow tests run beside kvyard. ``make peers`` makes their environments; see ``scripts/peers.sh``."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM_ORACLE = ROOT / "benchmarks" / "peers" / "vllm_oracle.py"


def peer_python(name: str) -> Path | None:
    """The Python that has ``vllm`` or ``dynamo``: what KVYARD_<NAME>_PYTHON names, or what ``make peers`` made."""
    asked = os.environ.get(f"KVYARD_{name.upper()}_PYTHON")
    found = Path(asked) if asked else ROOT / "build" / "peers" / name / "bin" / "python"
    return found if found.exists() else None


def why_not(name: str) -> str:
    """One line for a test that is skipped."""
    return f"no {name} here: make peers, or set KVYARD_{name.upper()}_PYTHON to a Python that has it"
