"""Requests of published runs, as their clients sent them. Ids begin with the number of the cell they count for, or a letter."""

from __future__ import annotations

import csv
import io
import math
import random
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvyard.clock import SECOND
from kvyard.replay.traces import TraceRequest

BLOCK = 16
"""Tokens that an id stands for: every published block size is a multiple of it."""


class Ids:
    """Ids of prompts, by what a prompt consists of: each part is (name, tokens), and equal names have equal text."""

    def __init__(self) -> None:
        self._next = 0
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}

    def of(self, *parts: tuple[object, int]) -> tuple[tuple[int, ...], int]:
        """Return the ids of a prompt and its length. Parts but the last are remembered."""
        names: tuple[object, ...] = ()
        ids: tuple[int, ...] = ()
        length = 0
        for name, tokens in parts:
            names = (*names, name)
            length += tokens
            known = self._known.get(names)
            if known is None:
                known = self._known[names] = ids + self._new(length // BLOCK - len(ids))
            ids = known
        return (ids + self._new(1) if length % BLOCK else ids), length

    def _new(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))


def poisson(rate: float, duration: float, draw: random.Random) -> list[float]:
    """Seconds at which inference-perf sends the requests of a stage: as many as rate times duration, by seconds of Poisson
    counts.
    """
    times: list[float] = []
    start, wanted = 1.0, int(rate * duration)
    while len(times) < wanted:
        count = _poisson(rate, draw)
        gaps = [draw.expovariate(1.0) for _ in range(count)]
        whole, at = sum(gaps), start
        for gap in gaps:
            at += gap / whole
            times.append(at)
        start += 1.0
    return times[:wanted]


def _poisson(rate: float, draw: random.Random) -> int:
    count, left = 0, rate
    while (left := left - draw.expovariate(1.0)) > 0:
        count += 1
    return count


def stages(text: str) -> list[tuple[float, float]]:
    """``rate/seconds ...`` as numbers."""
    return [(float(rate), float(seconds)) for rate, _, seconds in (stage.partition("/") for stage in text.split())]


def shared_prefix(workload: Mapping[str, Any], seed: int = 0) -> list[TraceRequest]:
    """inference-perf's shared prefixes: groups times prompts fixed requests in one shuffled order, from its start in each
    stage. A stage begins when the one before it is through, ``interval_s`` later; cells are the stages but for warm-up.
    """
    draw, ids = random.Random(seed), Ids()
    prompts = [(group, prompt) for group in range(workload["groups"]) for prompt in range(workload["prompts"])]
    draw.shuffle(prompts)
    ladder = [("w", *stage) for stage in stages(workload.get("warm-up", ""))]
    ladder += [(str(cell), *stage) for cell, stage in enumerate(stages(workload["stages"]))]
    fresh = workload.get("fresh_questions", False)
    requests: list[TraceRequest] = []
    before: tuple[str, ...] = ()
    for number, (cell, rate, seconds) in enumerate(ladder):
        gate: tuple[str, ...] = ()
        if before:
            gate = (f"g:{number}",)
            delay = round(workload["interval_s"] * SECOND)
            requests.append(TraceRequest(gate[0], 0, 1, 1, delay=delay, after=before))
        names = []
        for at, sent in enumerate(poisson(rate, seconds, draw)):
            group, prompt = prompts[at % len(prompts)]
            system = [(f"s{group}", workload["system"])] if workload["system"] else []
            asked = (number, at) if fresh else prompt
            made, length = ids.of(*system, ((group, asked), workload["question"]))
            names.append(f"{cell}:{number}.{at}")
            when = round(sent * SECOND)
            requests.append(
                TraceRequest(
                    names[-1], when, length, workload["answer"], made, BLOCK, after=gate, delay=when if gate else None
                )
            )
        before = tuple(names)
    return requests


def conversations(workload: Mapping[str, Any]) -> list[TraceRequest]:
    """inference-perf's conversations over a long private document: the first turn of all, then the second of all, and so on."""
    ids, requests = Ids(), []
    for turn in range(workload["turns"]):
        for number in range(workload["conversations"]):
            parts: list[tuple[object, int]] = [("shared", workload["shared"]), (f"own {number}", workload["private"])]
            for earlier in range(turn):
                parts += [(f"asked {earlier}", workload["question"]), (f"answered {earlier}", workload["answer"])]
            made, length = ids.of(*parts, (f"asked {turn}", workload["question"]))
            requests.append(
                TraceRequest(f"0:{number}.{turn}", 0, length, workload["answer"], made, BLOCK, session=str(number))
            )
    return requests


PAUSE_S = 1.18
"""Mean of the profile's pause after an answer: a lognormal draw with mean 1 and deviation 1, from 1 to 2, rounded."""


def pause(name: str) -> int:
    """Nanoseconds of the pause after a turn: 1 s, or 2 s for 18 % of them. inference-perf counts it as part of the request."""
    return (2 if random.Random(name).random() < PAUSE_S - 1 else 1) * SECOND


def alone(lengths: Sequence[int]) -> list[TraceRequest]:
    """Each prompt twice, far apart: the first is computed by one worker, the second, its cell's, by another or pulled."""
    ids, requests = Ids(), []
    for cell, tokens in enumerate(lengths):
        made, length = ids.of((cell, tokens), ("question", 32))
        for turn, name in enumerate((f"w:{cell}", f"{cell}:{cell}")):
            when = (2 * cell + turn) * 60 * SECOND
            requests.append(TraceRequest(name, when, length, 2, made, BLOCK))
    return requests


def random_prompts(
    isl: int, mean: float, limit: int, count: int, earlier: int = 0, seed: int = 0
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Prompts that share nothing, with answers by the flattest law from 1 to ``limit`` tokens with that mean; and what was sent
    before them: the prompts of ``earlier`` runs, and the first prompt once more ahead of each run, as vllm bench does.
    """
    draw, ids = random.Random(f"{seed} {isl} {limit}"), Ids()
    lengths = answers(mean, limit, count, draw)
    prompts = [ids.of((at, isl))[0] for at in range(count)]
    before = [
        TraceRequest(f"w:{run}.{at}", 0, isl, 1, prompts[max(at, 0)], BLOCK)
        for run in range(earlier + 1)
        for at in range(-1, count if run < earlier else 0)
    ]
    return before, [
        TraceRequest(f"0:{at}", 0, isl, length, prompt, BLOCK)
        for at, (length, prompt) in enumerate(zip(lengths, prompts, strict=True))
    ]


def answers(mean: float, limit: int, count: int, draw: random.Random) -> list[int]:
    """Draw lengths from the truncated exponential law with that mean, in equal shares of its range, in random order."""
    target = mean / limit
    low, high = -200.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        if _mean_of(middle) < target:
            low = middle
        else:
            high = middle
    shares = [(at + 0.5) / count for at in range(count)]
    draw.shuffle(shares)
    return [max(1, round(limit * _quantile(share, low))) for share in shares]


def _mean_of(slope: float) -> float:
    """Mean on 0 to 1 of the density that grows as exp(slope x)."""
    if abs(slope) < 1e-6:
        return 0.5
    return 1 / (1 - math.exp(-slope)) - 1 / slope if slope > 0 else 1 - _mean_of(-slope)


def _quantile(share: float, slope: float) -> float:
    if abs(slope) < 1e-6:
        return share
    if slope > 0:
        return 1 - _quantile(1 - share, -slope)
    return math.log1p(share * math.expm1(slope)) / slope


RATES = ("0.1", "0.5", "0.9", "1.3", "1.7", "2.1", "2.5", "2.9", "3.3", "3.7", "4.1")
"""Requests a second of AIBrix's runs."""


def aibrix_rows(path: Path, stack: str) -> dict[str, list[dict[str, float]]]:
    """The rows of one stack by rate, as they were sent."""
    with zipfile.ZipFile(path) as archive:
        found = {}
        for rate in RATES:
            text = archive.read(f"benchmark_output/{stack}_output_{rate}.csv").decode()
            rows = [
                {name: float(value) for name, value in row.items() if name and value}
                for row in csv.DictReader(io.StringIO(text))
            ]
            found[rate] = sorted(rows, key=lambda row: row["launch_time"])
    return found


SYSTEM, OWN = 1012, 20020
"""Tokens of the prompt that all users share, and of a user's own history, as the tokeniser has them, about."""


def aibrix(rates: Mapping[str, list[dict[str, float]]], descending: bool) -> Iterator[TraceRequest]:
    """One stack from its warm-up to its last rate: each rate begins 10 s after the one before is through."""
    ids = Ids()

    def request(name: str, user: int, length: int, answer: int, when: float, **more: Any) -> TraceRequest:
        made, length = ids.of(("system", SYSTEM), (user, OWN), (name, length - SYSTEM - OWN))
        return TraceRequest(name, round(when * SECOND), length, answer, made, BLOCK, session=None, **more)

    before = []
    for user in range(1, 401):
        for turn in range(2):
            # A user's second question is sent when the first is answered, at the client's next tick.
            more = {"after": (before[-1],), "delay": round(0.05 * SECOND)} if turn else {}
            before.append(f"w:{user}.{turn}")
            yield request(before[-1], user, 21073 + 129 * turn, 100, user * 0.5, **more)
    order = list(reversed(RATES)) if descending else list(RATES)
    for rate in order:
        gate = f"g:{rate}"
        yield TraceRequest(gate, 0, 1, 1, delay=10 * SECOND, after=tuple(before))
        rows, before = rates[rate], []
        start = rows[0]["launch_time"]
        for at, row in enumerate(rows):
            before.append(f"{RATES.index(rate)}:{at}")
            yield request(
                before[-1],
                int(row["user_id"]),
                int(row["prompt_tokens"]),
                int(row["generation_tokens"]),
                0,
                after=(gate,),
                delay=round((row["launch_time"] - start) * SECOND),
            )
