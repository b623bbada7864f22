"""A client: the pace at which it sends requests, and what it makes of a trace's lengths."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from random import Random
from typing import ClassVar, NamedTuple

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.integers import ceil_div
from kvyard.registry import Option, Options, defaults
from kvyard.replay.traces import TraceRequest

TURNAROUND_MS = 7.0
"""Milliseconds from the last token of an answer until an asynchronous client in Python has sent the next request. No
client's source states one. Runs of Qwen3-32B under vLLM 0.12 (aiconfigurator-core's silicon rows) are met best by 6 to 8, the
front end's time apart; with 20 prompts bunch up, and wait for one another, that didn't."""
TURNAROUND = Option(TURNAROUND_MS, "Milliseconds from an answer until the next request is sent.")
RAMP = Option(0.0, "Seconds over which the first requests of a closed loop are spread.")


class Pacing(NamedTuple):
    """Times at which requests are sent, beyond the trace. Nanoseconds."""

    turnaround: int = 0
    """Closed loop: from the end of a request until the next one of its slot."""
    ramp: int = 0
    """Closed loop: the first requests of its slots are spread over this long."""
    most: int | None = None
    """Open loop: requests in flight at most; others wait at the client, and count from when they are sent."""
    join: int | None = None
    """Sessions start this far apart, whatever the recorded times ..."""
    users: int = 0
    """... but for this many that are there at the start, each within its first ``gap``."""
    gap: int = 0
    """With ``join``: from sending one turn of a session until sending the next, at least."""
    tick: int = 0
    """With ``join``: turns are sent at multiples of this."""
    processes: int = 0
    """Closed loop of sessions: processes that share out sessions and slots among them (``ProcessArrivals``); 0: a slot takes
    any session, and keeps it to its end."""
    token_ns: float = 0.0
    """With ``processes``: nanoseconds for each token that a process tokenizes, during which it does nothing else."""

    def first(self, number: int) -> int:
        """Return when session ``number`` sends its first request (with ``join``)."""
        assert self.join is not None
        if number < self.users:
            return self.gap - (self.users - number) * self.join % max(1, self.gap)
        return (number - self.users + 1) * self.join

    def next(self, sent: int, ended: int) -> int:
        """Return when a session sends its next request, after one that was sent and ended at these times (with ``join``)."""
        due = max(sent + self.gap, ended)
        return ceil_div(due, self.tick) * self.tick if self.tick else due


PLAIN = Pacing()
"""Requests are sent when they are due."""


class Client:
    """The interface, and the client of a bare ``--concurrency``."""

    OPTIONS: ClassVar[Options] = {"turnaround_ms": TURNAROUND}
    """Numbers that people may set."""

    def __init__(self, options: Mapping[str, float]) -> None:
        """``options`` have been checked by ``make_client``."""
        self.options = {**defaults(self.OPTIONS), **options}

    def pacing(self, concurrency: int | None) -> Pacing:
        """Return the pace of a loop with ``concurrency`` slots, or of an open one."""
        return Pacing(
            turnaround=round(self.options["turnaround_ms"] * MS), ramp=round(self.options.get("ramp_s", 0.0) * SECOND)
        )

    def requests(self, rows: Iterable[TraceRequest], concurrency: int | None, random: Random) -> Iterable[TraceRequest]:
        """Return ``rows`` as the client sends them: how many, and of which lengths."""
        return rows

    def warm_up(self, first: TraceRequest, concurrency: int | None) -> Iterator[TraceRequest]:
        """Return requests that it sends beforehand, and waits for. ``first`` is the trace's first."""
        return iter(())


def rounds_of(rows: Iterable[TraceRequest], rounds: float, concurrency: int | None) -> Iterable[TraceRequest]:
    """Return the first ``rounds`` requests of each slot of a closed loop; all without a loop, or for 0 rounds."""
    if concurrency is None or not rounds:
        return rows
    return islice(rows, round(rounds * concurrency))


def ranged(rows: Iterable[TraceRequest], least: float, most: float, random: Random) -> Iterator[TraceRequest]:
    """Draw lengths from ``least`` to ``most`` times those of the trace. Prompts whose text is known get no longer."""
    for row in rows:
        length = max(1, random.randint(round(least * row.input_length), round(most * row.input_length)))
        if row.ids is not None or row.tokens is not None:
            length = min(length, row.input_length)
        answer = max(1, random.randint(round(least * row.output_length), round(most * row.output_length)))
        ids = None if row.ids is None else row.ids[: ceil_div(length, row.id_block_size)]
        tokens = None if row.tokens is None else row.tokens[:length]
        yield msgspec.structs.replace(row, input_length=length, output_length=answer, ids=ids, tokens=tokens)


def repeated(first: TraceRequest, count: int) -> Iterator[TraceRequest]:
    """``first``, sent ``count`` times, as requests without a session."""
    for number in range(count):
        yield msgspec.structs.replace(
            first, id=f"warm-up {number}", arrival=0, session=None, delay=None, after=(), root=None
        )
