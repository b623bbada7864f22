"""Made-up traces: arrivals, lengths, prefixes shared as a tree, and sessions of several turns. Seeded, the same anywhere.

A session starts from a path through the tree of shared prefixes (a system prompt, below it the prompts of applications, below
those their documents, say). Each turn's prompt is all that was said before, and new tokens. As in recorded traces, an answer
is new to the cache when the next turn brings it back.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Annotated

import msgspec

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces.laws import Draw, arrival_law, arrival_times, number_law
from kvyard.replay.traces.reading import ReadingTally
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace, open_trace
from kvyard.settings import Setting

MAX_LENGTH = 10_000_000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Workload to generate. Laws are written as ``name:value,...`` or ``name:key=value,...``; see ``laws``."""

    requests: Annotated[int, Setting("How many requests.", flag=True)]
    """In all; the last session is cut short if need be."""
    arrivals: Annotated[
        str,
        Setting(
            "Of sessions: poisson:RATE, gamma:RATE,CV, constant:RATE, onoff:RATE,ON,OFF (seconds), daily:LOW,HIGH,DAY (hours).",
            flag=True,
        ),
    ] = "poisson:rate=1"
    input: Annotated[
        str,
        Setting(
            "New prompt tokens of a turn: fixed:N, uniform:MIN,MAX, lognormal:MEDIAN,SIGMA,MAX, empirical:FILE.",
            flag=True,
        ),
    ] = "lognormal:median=1000,sigma=1"
    output: Annotated[str, Setting("Tokens of an answer, likewise.", flag=True)] = "lognormal:median=200,sigma=0.7"
    turns: Annotated[str, Setting("Turns of a session, likewise, or geometric:MEAN.", flag=True)] = "fixed:1"
    think: Annotated[str, Setting("Seconds between turns, likewise, or exponential:MEAN.", flag=True)] = (
        "exponential:mean=10"
    )
    tree: Annotated[
        str, Setting("Shared prefixes: 1x2000/20x500 is one of 2000 tokens, below it 20 of 500.", flag=True)
    ] = ""
    zipf: Annotated[float, Setting("How unequal siblings in the tree are; 0 is equal.", flag=True)] = 1.0
    """The n-th is chosen in proportion to n to the power of minus this."""
    block_size: Annotated[int, Setting("Tokens an id stands for.", flag=True)] = 512
    seed: Annotated[int, Setting("Another seed makes another trace.", flag=True)] = 0


MOST_REQUESTS = 10**9
MOST_CHILDREN = 1_000_000
"""Prefixes on a level of the tree, at most."""


def generate(workload: Workload) -> Trace:
    """Return a trace by a workload, generated again on each pass. Raises ``KvyardError`` for one that makes no sense."""
    for name, value in (("requests", workload.requests), ("block_size", workload.block_size)):
        if value < 1:
            raise KvyardError(f"{name} must be at least 1, not {value}")
    if workload.requests > MOST_REQUESTS:
        raise KvyardError(f"requests must be at most {MOST_REQUESTS:,}, not {workload.requests:,}")
    recipe = _Recipe(workload)

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        return recipe.requests()

    return Trace(f"generated, seed {workload.seed}", "generated", rows)


class _Recipe:
    """A workload with its laws understood."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.gaps = arrival_law(workload.arrivals)
        self.input = number_law(workload.input, "input", lambda file: _lengths(file, "input_length"))
        self.output = number_law(workload.output, "output", lambda file: _lengths(file, "output_length"))
        self.turns = number_law(workload.turns, "turns")
        self.think = number_law(workload.think, "think")
        self.levels = prefix_levels(workload.tree)
        self.weights = [
            list(accumulate((rank + 1) ** -workload.zipf for rank in range(children))) for children, _ in self.levels
        ]
        self.talks = workload.turns not in ("fixed:1", "fixed:value=1")

    def requests(self) -> Iterator[TraceRequest]:
        workload, size = self.workload, self.workload.block_size
        arriving, lengths, turning, choosing = (
            Random(f"{workload.seed} {use}") for use in ("arrivals", "lengths", "turns", "tree")
        )
        answers, thinking = Random(f"{workload.seed} answers"), Random(f"{workload.seed} think")
        tree = _Tree(size)
        count = 0
        for number, arrival in enumerate(arrival_times(self.gaps, arriving)):
            length, ids = tree.path(self._choose(choosing))
            session = f"s{number}" if self.talks else None
            for turn in range(whole(self.turns, turning)):
                length += whole(self.input, lengths)
                answer = whole(self.output, answers)
                if length > MAX_LENGTH:
                    raise KvyardError(f"a prompt of {length} tokens: choose shorter inputs or fewer turns")
                ids = ids + tree.new(length // size - len(ids))
                tail = tree.new(1) if length % size else []
                delay = None if turn == 0 else round(max(0.0, self.think(thinking)) * SECOND)
                count += 1
                yield TraceRequest(
                    str(count),
                    arrival if turn == 0 else 0,
                    length,
                    answer,
                    ids + tail,
                    size,
                    session=session,
                    delay=delay,
                )
                if count == workload.requests:
                    return
                length += answer

    def _choose(self, random: Random) -> list[tuple[int, int]]:
        """Return a path through the tree: the number of the child and its length, by level."""
        return [
            (bisect(weights, random.random() * weights[-1]), tokens)
            for (_, tokens), weights in zip(self.levels, self.weights, strict=True)
        ]


class _Tree:
    """The shared prefixes used so far, and ids for them and for everything else."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.next = 0
        self.known: dict[tuple[int, ...], list[int]] = {(): []}

    def new(self, count: int) -> list[int]:
        """Return ids that are not in use."""
        self.next += count
        return list(range(self.next - count, self.next))

    def path(self, steps: list[tuple[int, int]]) -> tuple[int, list[int]]:
        """Return the length of a shared prefix and the ids of its whole blocks."""
        length, ids = 0, self.known[()]
        node: tuple[int, ...] = ()
        for child, tokens in steps:
            length += tokens
            node = (*node, child)
            below = self.known.get(node)
            if below is None:
                below = self.known[node] = ids + self.new(length // self.block_size - len(ids))
            ids = below
        return length, ids


def whole(draw: Draw, random: Random) -> int:
    """Return a whole number of at least 1."""
    return max(1, round(draw(random)))


def prefix_levels(text: str, field: str = "tree") -> list[tuple[int, int]]:
    """Return number and tokens of the prefixes on each level of a tree, as people write them. Raises ``KvyardError``."""
    levels = []
    for level in text.split("/") if text else ():
        children, times, tokens = level.partition("x")
        if not times or not children.isdecimal() or not tokens.isdecimal() or not int(children):
            raise KvyardError(f"{field}: {level!r} is no level; write CHILDRENxTOKENS, as in 1x2000/20x500")
        if int(children) > MOST_CHILDREN:
            raise KvyardError(f"{field}: {level!r} has more than {MOST_CHILDREN:,} children")
        levels.append((int(children), int(tokens)))
    return levels


def _lengths(file: str, field: str) -> array[int]:
    return array("q", (getattr(request, field) for request in open_trace(file)))
