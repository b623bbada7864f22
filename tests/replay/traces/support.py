"""Where the samples are, and small helpers."""

from __future__ import annotations

import json
from pathlib import Path

from kvyard.replay.traces import TraceRequest

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = Path(__file__).with_name("samples")
CONVERSATION = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
SHARED = ROOT.parent / "shared" / "traces"
"""Whole public traces, where the machine has them."""


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(time: float | None = 0, tokens_in: int = 512, tokens_out: int = 1, **more: object) -> dict[str, object]:
    row: dict[str, object] = {"timestamp": time, "input_length": tokens_in, "output_length": tokens_out, **more}
    return {key: value for key, value in row.items() if value is not None}


def plain(requests: list[TraceRequest]) -> list[TraceRequest]:
    """With ids as lists, whatever held them."""
    from msgspec.structs import replace

    return [one if one.ids is None else replace(one, ids=list(one.ids)) for one in requests]
