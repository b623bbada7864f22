"""Small traces and fleets for tests of the replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvyard.replay.arrivals import TraceArrivals
from kvyard.replay.record import Record
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.replay.traces.generate import Workload, generate

SECOND = 1_000_000_000


def request(
    name: str, arrival: float = 0, *, session: str | None = None, delay: float | None = None, **more: object
) -> TraceRequest:
    """One request; times are seconds."""
    fields = {"input_length": 100, "output_length": 10, "ids": None, **more}
    wait = None if delay is None else round(delay * SECOND)
    return TraceRequest(id=name, arrival=round(arrival * SECOND), session=session, delay=wait, **fields)  # type: ignore[arg-type]


def record_of(
    name: str, arrival: int = 0, *, tokens: int = 1, wanted: int = 1, session: str | None = None, **more: Any
) -> Record:
    """The record of a request that came at ``arrival`` nanoseconds."""
    row = TraceRequest(id=name, arrival=arrival, input_length=tokens, output_length=wanted, session=session)
    return Record(request=row, arrival=arrival, **more)


def sessions(requests: int = 120, seed: int = 1, **more: object) -> Trace:
    """Talks of a few turns over shared prefixes."""
    fields = {
        "arrivals": "poisson:rate=4",
        "input": "lognormal:median=300,sigma=0.8",
        "output": "lognormal:median=40,sigma=0.6",
        "turns": "geometric:3",
        "think": "exponential:2",
        "tree": "2x600/8x400",
        "block_size": 16,
        **more,
    }
    return generate(Workload(requests=requests, seed=seed, **fields))  # type: ignore[arg-type]


def play(
    requests: Iterable[TraceRequest], lasting: float = 1.0, *, lasts: dict[str, float] | None = None, **options: object
) -> list[tuple[str, int, int]]:
    """Run arrivals against a server that takes ``lasting`` seconds for each: (id, came, ended), in order of coming."""
    arrivals = TraceArrivals(requests, **options)  # type: ignore[arg-type]
    in_flight: list[tuple[int, int, TraceRequest]] = []
    out: list[tuple[str, int, int]] = []
    serial = 0
    while True:
        due = arrivals.peek()
        end = min(in_flight)[0] if in_flight else None
        if due is None and end is None:
            assert arrivals.exhausted, "arrivals wait for nobody"
            return out
        if end is not None and (due is None or end <= due):
            one = min(in_flight)
            in_flight.remove(one)
            arrivals.ended(one[2], end)
            continue
        assert due is not None
        for row in arrivals.take(due):
            serial += 1
            ends = due + round((lasts or {}).get(row.id, lasting) * SECOND)
            in_flight.append((ends, serial, row))
            out.append((row.id, due, ends))


def most_at_once(spans: Sequence[tuple[int, int]]) -> int:
    """How many half-open spans overlap at most."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def write_pool_trace(path: Path, names: Sequence[str]) -> None:
    """Sessions that ask for one of the models ``names`` each."""
    rows = []
    models: dict[str | None, str] = {}
    for one in sessions(24, seed=3, arrivals="poisson:rate=30"):
        row = {"input_length": one.input_length, "output_length": one.output_length, "hash_ids": list(one.ids or ())}
        row |= {"block_size": one.id_block_size, "request_id": one.id, "session_id": one.session}
        row["model"] = models.setdefault(one.session, names[len(models) % len(names)])
        if one.delay is None:
            row["timestamp"] = one.arrival / 1e6
        else:
            row["delay"] = one.delay / 1e6
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
