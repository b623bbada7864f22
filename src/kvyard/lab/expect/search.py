"""The cause of counts that differ from those owed: each candidate is replayed, and the candidate that gives the counts is
named.

Candidates are replayed on the first requests of the traffic (``Difference.sample``), so that a search takes about as long as
the replay of the whole. The first requests show little of a total: candidates that fit it are replayed on the
whole traffic, unless reuse distances rule them out before.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from kvyard.lab.expect.candidates import (
    GUESSED,
    SOURCES,
    Candidate,
    Source,
    block_sizes,
    contradicted_size,
    drafts,
    pools,
    reported,
    told_size,
)
from kvyard.lab.expect.causes import FAULTS, say
from kvyard.lab.expect.difference import Difference

EXPLAINS = 0.5
"""Share of a difference that a cause must explain to be named."""
GUESSED_WITHIN = 2
"""Tolerances by which the sum of a candidate may be off by its reuse distances, and it is replayed all the same."""
REPORTED_OFF = " and reports enable_prefix_caching=False"


def find_fault(difference: Difference) -> tuple[str, str] | None:
    """Return the cause of a difference and its sentence; ``None`` where counts are those owed."""
    if difference.counted.asleep:
        return "asleep", say(FAULTS["asleep"])
    if difference.configured_on and difference.counted.facts.get("enable_prefix_caching") == "False":
        return "caching-off", say(FAULTS["caching-off"], reported=REPORTED_OFF)
    distance, tolerated = difference.distance(difference.replayed.hits), difference.tolerance * difference.prompts
    told = told_size(difference) if distance else None
    if told is not None:
        return told.code, told.sentence
    queries = _queries(difference)
    if queries is not None:
        return queries
    if 0 < distance <= tolerated:
        size, left = _best(contradicted_size, difference, difference)
        if size is not None and left <= 1 - EXPLAINS:
            return size.code, size.sentence
    if distance <= tolerated:
        return ("hash-seed", say(FAULTS["hash-seed"])) if "hash-seed" in difference.evidence else None
    sample = difference.sample()
    if difference.missing < 0 and -difference.missing > 0.9 * distance:
        finer, left = _best(
            lambda compared: chain(reported(compared), block_sizes(compared), drafts(compared)), difference, sample
        )
        if finer is not None and left <= 1 - EXPLAINS:
            return finer.code, finer.sentence
        if difference.better_routed:
            return None
        return "more", say(FAULTS["more"], more=-difference.missing)
    best, nearest = None, math.nextafter(1 - EXPLAINS, 1)
    for source, replays in SOURCES:
        candidate, left = _best(source, difference, sample if replays else difference)
        if left < nearest:
            best, nearest = candidate, left
            if nearest * distance <= tolerated / 4:
                break
    if best is None:
        shown = next((code for code in ("salts", "adapters") if code in difference.evidence), None)
        if shown is not None:
            return shown, say(FAULTS[shown], found="less than it owes")
        return "unknown", say(FAULTS["unknown"], missing=difference.missing, request=_first(difference))
    return best.code, best.sentence


def _best(source: Source, difference: Difference, sample: Difference) -> tuple[Candidate | None, float]:
    """Return the candidate that leaves the least of a difference, and the share that it leaves."""
    if not difference.by_request and difference.reuse_tells and source in GUESSED:
        return _best_guess(source, difference)
    if source is pools and not difference.by_request:
        sample = difference  # blocks may be evicted only after the sample
    best, nearest = None, math.inf
    for candidate in source(sample):
        left = candidate.unexplained(sample)
        if left < nearest:
            best, nearest = candidate, left
    if best is not None and nearest <= 1 - EXPLAINS and sample is not difference and not difference.by_request:
        nearest = best.unexplained(difference)
    return best, nearest


def _best_guess(source: Source, difference: Difference) -> tuple[Candidate | None, float]:
    """Like ``_best``, of a sum, by guesses: only the nearest candidate is replayed; a pool, which fits any sum, never is."""
    guesses = [
        (abs(candidate.guess(difference) - difference.total), number, candidate)
        for number, candidate in enumerate(source(difference))
        if candidate.guess is not None
    ]
    if not guesses:
        return None, math.inf
    off, _, best = min(guesses)
    if source is pools:
        return best, off / difference.distance(difference.replayed.hits)
    if off > GUESSED_WITHIN * difference.tolerance * difference.prompts:
        return None, math.inf
    return best, best.unexplained(difference)


def _queries(difference: Difference) -> tuple[str, str] | None:
    """Return a finding where the engine was asked for other tokens than this traffic has."""
    queries, prompts = difference.counted.queries, difference.traffic.prompt_tokens
    if queries is None or difference.by_request or not prompts:
        return None
    if not queries and not difference.configured_on:
        return None  # vLLM doesn't count look-ups without prefix caching
    if abs(queries - prompts) <= difference.tolerance * prompts:
        return None
    ratio = queries / prompts
    if ratio >= 2 - difference.tolerance and abs(ratio - round(ratio)) <= difference.tolerance * ratio:
        return "choices", say(FAULTS["choices"], ratio=ratio)
    return "other-traffic", say(FAULTS["other-traffic"], queries=queries, prompts=prompts)


def _first(difference: Difference) -> str:
    if not difference.by_request:
        return "not known (give counts per request)"
    hits, counts = difference.replayed.hits, difference.all_counts
    at = int(np.nonzero(difference.known & (hits != counts))[0][0])
    request = difference.traffic.requests[at]
    return f"{request.id} ({request.input_length:,} tokens, {hits[at]:,} owed, {counts[at]:,} counted)"
