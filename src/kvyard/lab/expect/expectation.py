"""An expectation: hits owed beside hits counted, the difference by cause, and the first cause in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from kvyard.engine.config import EngineConfig
from kvyard.lab.expect.candidates import BLIND
from kvyard.lab.expect.causes import FAULTS, LIMITS, say
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.difference import Difference
from kvyard.lab.expect.owed import (
    Granularity,
    Replayed,
    endless_hits,
    granularity,
    replay_traffic,
    settle_settings,
)
from kvyard.lab.expect.search import find_fault
from kvyard.lab.expect.traffic import Tokens, Traffic, repeated_tokens, shared_tokens
from kvyard.replay.record import Record
from kvyard.replay.run import Progress

TOLERANCE = 0.02
"""Share of prompt tokens by which counts may differ from what is owed."""
LARGE = 1 / 3
"""Share of reuse that one limit may cost before it is named."""
LEAST = 0.02
"""Share of prompt tokens below which a limit isn't worth a sentence."""
GUESSED_BY_SUMS = ("block-size", "pool", "events-off", "answers", "tier", "store-only")
"""Causes that fit a sum."""
FEW = 20
"""Requests that are listed one by one."""
BY_CACHE = "route by cached prefixes (kvyard gateway, policy kv), or by session"
WITH_CACHE = "give cached prefixes more weight in the router, or let workers share a tier or pull from each other"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the waterfall: prompt tokens that are lost to it, and those that are left."""

    cause: str
    title: str
    lost: int
    left: int


class OwedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: prompt tokens, those that an earlier prompt began with, those owed and those counted."""

    id: str
    input: int
    shared: int
    owed: int
    counted: int | None = None


class Expectation(msgspec.Struct, kw_only=True):
    """Hits that an engine owes a traffic, and those it counted. Figures are prompt tokens."""

    kind: str = "kvyard expectation"
    version: int = 1
    traffic: str
    requests: int
    rejected: int
    prompt_tokens: int
    """Prompt tokens of requests that were admitted."""
    shared: int
    """Tokens that an earlier prompt or answer began with: what a cache can find at best."""
    owed: int
    owed_device: int
    owed_loaded: int
    counted: int | None = None
    counted_by: str = ""
    granularity: Granularity
    steps: list[Step]
    """From what prompts share to what is owed."""
    cause: str = ""
    """The first cause; empty if there is none."""
    fault: bool = False
    """True if the engine's counts differ from what it owes; otherwise the cause is a limit of traffic or configuration."""
    sentence: str = ""
    equal: int | None = None
    """Requests whose counts are what they are owed, of those with a count."""
    compared: int | None = None
    different: list[OwedRequest] = []
    """The first of the others."""
    rows: list[OwedRequest] = []
    """All requests that were admitted."""
    notes: list[str] = []
    settings: dict[str, Any] = {}

    @property
    def flagged(self) -> bool:
        """True if a cause was named."""
        return bool(self.cause)


def expect(
    traffic: Traffic,
    settings: Mapping[str, object],
    counted: Counted | None = None,
    *,
    evidence: Iterable[str] = (),
    tolerance: float = TOLERANCE,
    progress: Progress | None = None,
) -> Expectation:
    """Work out the hits that an engine with ``settings`` owes ``traffic``, and compare with those it ``counted``.

    ``evidence`` are codes of causes that something else has shown (``hash-seed``, ``salts``). Raises ``KvyardError`` as
    a replay does.
    """
    settled = settle_settings(settings)
    replayed = replay_traffic(traffic.requests, settled, progress)
    config = replayed.run.fleet.config
    engine = config.workers[0].engine
    sizes = granularity(engine)
    levels, elsewhere = _levels(traffic, replayed, engine, sizes)
    admitted = replayed.admitted
    prompts = np.array([request.input_length for request in traffic.requests], dtype=np.int64)
    prompt_tokens = int(prompts[admitted].sum())
    steps = [
        Step(
            cause=code,
            title=LIMITS[code].title,
            lost=int(before[admitted].sum() - after[admitted].sum()),
            left=int(after[admitted].sum()),
        )
        for (_, before), (code, after) in pairwise(levels)
        if code in LIMITS
    ]
    text = next(level for code, level in levels if code == "text")
    expectation = Expectation(
        traffic=traffic.name,
        requests=len(traffic.requests),
        rejected=int((~admitted).sum()),
        prompt_tokens=prompt_tokens,
        shared=int(text[admitted].sum()),
        owed=replayed.total,
        owed_device=replayed.device,
        owed_loaded=replayed.loaded,
        granularity=sizes,
        steps=[step for step in steps if step.lost],
        notes=[*traffic.notes, *(counted.notes if counted is not None else ())],
        rows=[
            OwedRequest(
                id=request.id,
                input=request.input_length,
                shared=int(most),
                owed=int(hits),
                counted=None if counted is None else counted.by_request.get(request.id),
            )
            for request, most, hits in zip(traffic.requests, text, replayed.hits, strict=True)
            if hits >= 0
        ],
        settings={name: value for name, value in settled.items() if isinstance(value, str | int | float | bool)},
    )
    if expectation.rejected:
        expectation.notes.append(f"{expectation.rejected:,} requests don't fit the engine and are left out.")
    moved = levels[0][1][admitted].sum() - text[admitted].sum()
    _name_limit(expectation, traffic, replayed, levels, int(moved), int(elsewhere[admitted].sum()))
    if counted is not None:
        _compare(expectation, traffic, replayed, settled, counted, set(evidence), tolerance)
    elif "hash-seed" in set(evidence):
        expectation.cause, expectation.sentence, expectation.fault = "hash-seed", say(FAULTS["hash-seed"]), True
    return expectation


# -- the waterfall --------------------------------------------------------------------------------------------------------


def _levels(
    traffic: Traffic, replayed: Replayed, engine: EngineConfig, sizes: Granularity
) -> tuple[list[tuple[str, Tokens]], Tokens]:
    """Return the hits of each request, from the most to what it is owed, and tokens that are repeated at another place.

    Each level has the name of the limit that lowers it.
    """
    requests, config = traffic.requests, replayed.run.fleet.config
    plain = requests
    if traffic.media:
        plain = [replace(request, tokens=traffic.texts.get(request.id, request.tokens)) for request in requests]
    adapters = any(request.lora is not None for request in requests)
    salts = any(request.salt is not None for request in requests)
    text = shared_tokens(plain, adapters=False, salts=False)
    repeated = repeated_tokens(plain)
    levels = [("repeated", np.maximum(text, repeated.tokens)), ("text", text)]
    if traffic.media:
        levels.append(("media", shared_tokens(requests, adapters=False, salts=False)))
    if adapters:
        levels.append(("adapters", shared_tokens(requests, salts=False)))
    if salts:
        levels.append(("salts", shared_tokens(requests)))
    lengths = np.array([request.input_length for request in requests], dtype=np.int64)
    block = sizes.block_size
    levels.append(("granularity", levels[-1][1] // block * block))
    recomputed = np.minimum(levels[-1][1], (lengths - 1) // block * block)
    endless = np.minimum(recomputed, endless_hits(requests, engine))
    if sizes.drafts or not all(spec.is_full for spec in engine.specs):
        levels.append(("last-block", recomputed))
        levels.append(("draft-head" if sizes.drafts else "attention", endless))
    else:
        levels.append(("last-block", endless))  # an answer's last token is computed with the next turn
    if not engine.enable_prefix_caching:
        levels.append(("caching-off", np.zeros_like(lengths)))
        return levels, repeated.moved
    by_id: dict[str, Record] = {record.id: record for record in replayed.run.records}
    ranks = sum(kind.count * kind.dp_size for kind in config.workers)
    if ranks > 1:
        routed = endless_hits(requests, engine, list(by_id.values()))
        levels.append(("routing", np.minimum(levels[-1][1], routed)))
    left = np.array([by_id[request.id].left if request.id in by_id else 0 for request in requests], dtype=np.int64)
    owed = np.maximum(replayed.hits, 0)
    if left.any():
        levels.append(("left", np.maximum(owed, levels[-1][1] - left)))
    levels.append(("pool" if replayed.evicted else "in-flight", owed))
    return levels, repeated.moved


def _name_limit(
    expectation: Expectation,
    traffic: Traffic,
    replayed: Replayed,
    levels: list[tuple[str, Tokens]],
    moved: int,
    elsewhere: int,
) -> None:
    """Name the limit that costs the most, if one costs much. ``moved`` tokens are repeated and not shared, ``elsewhere`` of
    them, or of those shared, at another place than before."""
    repeated = int(levels[0][1][replayed.admitted].sum())
    worst = max(expectation.steps, key=lambda step: step.lost, default=None)
    code, lost, of = "", 0, expectation.shared
    if worst is not None:
        code, lost = worst.cause, worst.lost
    if moved > lost:
        code, lost, of = "moved-text" if elsewhere > moved / 2 else "changing-text", moved, repeated
    if not code or lost < LARGE * of or lost < LEAST * expectation.prompt_tokens:
        return
    engine = replayed.run.fleet.config.workers[0].engine
    by_name = dict(levels)
    shared = by_name["text"][by_name["text"] > 0]
    smallest = expectation.granularity.smallest or expectation.granularity.block_size
    parted = by_name["text"][levels[0][1] > by_name["text"]]
    expectation.cause = code
    expectation.sentence = say(
        LIMITS[code],
        moved=repeated / expectation.prompt_tokens,
        parting=int(np.median(parted)) if len(parted) else 0,
        adapters=len({request.lora for request in traffic.requests}),
        salts=len({request.salt for request in traffic.requests}),
        requests=expectation.requests,
        block=expectation.granularity.block_size,
        smallest=smallest,
        short=float((shared < smallest).mean()) if len(shared) else 0.0,
        blocks=expectation.prompt_tokens
        / max(1, expectation.requests - expectation.rejected)
        / expectation.granularity.block_size,
        groups=" and ".join(dict.fromkeys(expectation.granularity.groups)),
        evicted=replayed.evicted,
        tokens=engine.capacity_tokens,
        better=BY_CACHE if replayed.run.fleet.config.router.policy in BLIND else WITH_CACHE,
    )


# -- what was counted -----------------------------------------------------------------------------------------------------


def _compare(
    expectation: Expectation,
    traffic: Traffic,
    replayed: Replayed,
    settings: Mapping[str, object],
    counted: Counted,
    evidence: set[str],
    tolerance: float,
) -> None:
    """Enter the counts, and the cause if they aren't those owed."""
    rows = [row for row in expectation.rows if row.counted is not None]
    expectation.counted_by = counted.source
    expectation.counted = sum(row.counted or 0 for row in rows) if rows else counted.total
    if rows:
        others = [row for row in rows if row.owed != row.counted]
        expectation.compared, expectation.equal = len(rows), len(rows) - len(others)
        expectation.different = others[:FEW]
    difference = Difference(traffic, settings, replayed, counted, evidence, tolerance)
    fault = find_fault(difference)
    if fault is not None:
        expectation.cause, expectation.sentence = fault
        expectation.fault = True
        if not difference.by_request and expectation.cause in GUESSED_BY_SUMS:
            expectation.notes.append(
                "Told by sums alone, which something else may give by chance: counts per request decide (--answers)."
            )
    elif -difference.missing > tolerance * difference.prompts:
        expectation.notes.append(
            f"Engines counted {-difference.missing:,} tokens more than in the replay, whose requests take other times and so "
            "go to other workers: name the card (--model and --gpu), or --speedup."
        )
