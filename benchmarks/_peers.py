"""Where the peers are that kvyard is measured against, and the trace that both sides read.

``make peers`` makes their environments in ``build/peers``; KVYARD_DYNAMO_PYTHON and KVYARD_VLLM_PYTHON name others.
"""

from __future__ import annotations

import lzma
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "peers"
"""What runs inside a peer's environment."""
DYNAMO_REPLAY = SCRIPTS / "dynamo_replay.py"
DYNAMO_INDEX = SCRIPTS / "dynamo_index.py"
VLLM_ORACLE = SCRIPTS / "vllm_oracle.py"


def peer_python(name: str) -> str | None:
    """The Python of the peer ``dynamo`` or ``vllm``; says so and returns ``None`` where there is none."""
    asked = os.environ.get(f"KVYARD_{name.upper()}_PYTHON")
    python = Path(asked) if asked else ROOT / "build" / "peers" / name / "bin" / "python"
    if python.exists():
        return str(python)
    print(f"no {name} at {python} (make peers): our side only", flush=True)
    return None


def conversation_trace() -> Path:
    """Mooncake's conversation trace as plain lines, as the peers want it: unpacked into ``build/`` once."""
    plain = ROOT / "build" / "mooncake_conversation.jsonl"
    if not plain.exists():
        plain.parent.mkdir(exist_ok=True)
        packed = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
        plain.write_bytes(lzma.decompress(packed.read_bytes()))
    return plain
