"""Traffic for expectations, and engines whose counts are made by replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from msgspec.structs import replace

from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.owed import Replayed, replay_traffic, settle_settings
from kvyard.lab.expect.traffic import Traffic
from kvyard.replay.traces import TraceRequest

SECOND = 10**9
SYSTEM = list(range(1_000, 1_400))
"""Tokens of a system prompt."""
ONE = {"block_size": 16, "num_gpu_blocks": 8192, "max_num_seqs": 16}


def conversations(
    sessions: int = 10, turns: int = 3, *, system: Sequence[int] = SYSTEM, user: int = 120, answer: int = 40
) -> list[TraceRequest]:
    """Chats that share a system prompt; each turn has the turns and answers before it."""
    random = Random(29)
    rows: list[TraceRequest] = []
    texts = [list(system) for _ in range(sessions)]
    for turn in range(turns):
        for number, text in enumerate(texts):
            text += [random.randrange(10_000, 90_000) for _ in range(user + 7 * (number % 5))]
            said = [random.randrange(10_000, 90_000) for _ in range(answer)]
            rows.append(
                TraceRequest(
                    f"s{number}t{turn}",
                    len(rows) * SECOND // 2,
                    len(text),
                    len(said),
                    tokens=list(text),
                    output_tokens=said,
                )
            )
            text += said
    return rows


def documents(count: int = 60, *, document: int = 900, kinds: int = 6) -> list[TraceRequest]:
    """Questions about a few documents, by block ids as a gateway records them."""
    rows = []
    for at in range(count):
        ids = [*range(1000 * (at % kinds), 1000 * (at % kinds) + document // 16), 10**6 + at]
        rows.append(TraceRequest(f"d{at}", at * SECOND // 2, len(ids) * 16 - 5, 8, ids=ids, id_block_size=16))
    return rows


def traffic(rows: Sequence[TraceRequest]) -> Traffic:
    return Traffic(name="test", requests=list(rows), cached={}, media={}, texts={}, notes=[])


def engine(rows: Sequence[TraceRequest], settings: Mapping[str, object]) -> Replayed:
    """An engine of ``settings`` that receives ``rows``."""
    return replay_traffic(rows, settle_settings(settings))


def counts(rows: Sequence[TraceRequest], settings: Mapping[str, object], **facts: object) -> Counted:
    """Return the counts of an engine with these settings, by request."""
    hits = engine(rows, settings).hits
    by_request = {row.id: int(found) for row, found in zip(rows, hits, strict=True) if found >= 0}
    return Counted(source="test", by_request=by_request, facts={name: str(value) for name, value in facts.items()})


def counters(rows: Sequence[TraceRequest], settings: Mapping[str, object], **facts: object) -> Counted:
    """Return the counts as two sums, as an engine's metrics have them."""
    found = engine(rows, settings)
    queries = sum(row.input_length for row in rows)
    told = {name: str(value) for name, value in facts.items()}
    return Counted(source="test", queries=queries, hits=found.device, external_hits=found.loaded, facts=told)


def with_date(rows: Sequence[TraceRequest], at: int = 20) -> list[TraceRequest]:
    """``rows`` with a few tokens near the front that are new in every request."""
    return [
        replace(
            row,
            tokens=[
                *(row.tokens or ())[:at],
                *(9_000_000 + 3 * number + i for i in range(3)),
                *(row.tokens or ())[at:],
            ],
            input_length=row.input_length + 3,
        )
        for number, row in enumerate(rows)
    ]
