"""The cause of counts that differ from those owed: each candidate is replayed, and the candidate that gives the counts is
named.

Candidates are replayed on the first requests of the traffic (``Difference.sample``), so that a search takes about as long as
the replay of the whole. Of a sum the first requests show little: candidates that fit it there are replayed on the whole
traffic, unless reuse distances show before that they don't fit.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvyard.lab.expect.causes import FAULTS, say
from kvyard.lab.expect.difference import Difference
from kvyard.lab.expect.traffic import Tokens, shared_tokens
from kvyard.replay.settings import OF_TIERS

EXPLAINS = 0.5
"""Share of a difference that a cause must explain to be named."""
BLOCK_SIZES = (16, 32, 64, 128, 256, 528, 784, 1056, 2096)
"""Block sizes that engines have, for counts from which it doesn't follow."""
SIZES_TRIED = 2
"""Of those, sizes that are replayed where only sums were counted."""
CLOSE = 0.02
"""Share of the counted tokens by which a pool may be off that is named."""
GUESSED_WITHIN = 2
"""Tolerances by which the sum of a candidate may be off by its reuse distances, and it is replayed all the same."""
POOLS_TRIED = 4
"""Replays of smaller pools on a sample; half as many on the whole traffic."""
REPORTED_OFF = " and reports enable_prefix_caching=False"
BLIND = ("round-robin", "least-loaded", "random")
"""Policies that a router falls back to without events."""


class Candidate(NamedTuple):
    """A cause, how the hits that it would give are worked out, and figures for its sentence."""

    code: str
    hits: Callable[[Difference], Tokens | None]
    """``None`` if the cause is impossible."""
    figures: Mapping[str, object] = MappingProxyType({})
    guess: Callable[[Difference], int] | None = None
    """About the sum of the hits, where reuse distances tell."""

    def unexplained(self, difference: Difference) -> float:
        """Return share of ``difference`` that is left with this cause."""
        hits = self.hits(difference)
        return math.inf if hits is None else difference.unexplained(hits)

    @property
    def sentence(self) -> str:
        """The cause and its fix."""
        return say(FAULTS[self.code], **self.figures)


Source = Callable[[Difference], Iterator[Candidate]]


def find_fault(difference: Difference) -> tuple[str, str] | None:
    """Return the cause of a difference and its sentence; ``None`` where counts are those owed."""
    if difference.counted.asleep:
        return "asleep", say(FAULTS["asleep"])
    if difference.configured_on and difference.counted.facts.get("enable_prefix_caching") == "False":
        return "caching-off", say(FAULTS["caching-off"], reported=REPORTED_OFF)
    queries = _queries(difference)
    if queries is not None:
        return queries
    distance, tolerated = difference.distance(difference.replayed.hits), difference.tolerance * difference.prompts
    if distance <= tolerated:
        return ("hash-seed", say(FAULTS["hash-seed"])) if "hash-seed" in difference.evidence else None
    sample = difference.sample()
    if difference.missing < 0 and -difference.missing > 0.9 * distance:
        finer, left = _best(lambda compared: chain(_reported(compared), _block_sizes(compared)), difference, sample)
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
        return "unknown", say(FAULTS["unknown"], missing=difference.missing, request=_first(difference))
    return best.code, best.sentence


def _best(source: Source, difference: Difference, sample: Difference) -> tuple[Candidate | None, float]:
    """Return the candidate that leaves the least of a difference, and the share that it leaves."""
    if not difference.by_request and difference.reuse_tells and source in GUESSED:
        return _best_guess(source, difference)
    if source is _pools and not difference.by_request:
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
    if source is _pools:
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


# -- candidates, by what they would give ------------------------------------------------------------------------------------


def _nothing(difference: Difference) -> Iterator[Candidate]:
    """No hits at all."""
    if difference.total > difference.tolerance * difference.prompts / 10:
        return
    reported = difference.counted.facts.get("enable_prefix_caching", "")
    unnamed = "never-shared" if reported == "True" else "caching-off"
    code = next((code for code in ("salts", "adapters") if code in difference.evidence), unnamed)
    yield Candidate(code, lambda compared: np.zeros_like(compared.replayed.hits), {"reported": ""})


def _reported(difference: Difference) -> Iterator[Candidate]:
    """Another block size or pool than configured, by what the engine itself reports."""
    engine = difference.replayed.run.fleet.config.workers[0].engine
    facts = {name: int(value) for name, value in difference.counted.facts.items() if value.isdecimal()}
    size = facts.get("block_size", difference.block_size)
    if size != difference.block_size and len(engine.specs) == 1:
        yield _of_size(difference, size)
    blocks = facts.get("num_gpu_blocks", engine.num_gpu_blocks + 1) - 1  # vLLM counts the null block
    if 1 <= blocks < engine.num_gpu_blocks and size == difference.block_size:
        yield _of_pool(difference, blocks)


def _store_only(difference: Difference) -> Iterator[Candidate]:
    """Lower tiers that nothing is loaded from."""
    if difference.replayed.loaded == 0 or difference.counted.external_hits:
        return
    changed = dict.fromkeys(name for name in difference.settings if name in OF_TIERS)
    yield Candidate(
        "store-only",
        lambda compared: compared.replay(**changed),
        {"queried": difference.counted.external_queries},
    )


def _blind(difference: Difference) -> Iterator[Candidate]:
    """A router that doesn't see what workers have."""
    config = difference.replayed.run.fleet.config
    if sum(kind.count for kind in config.workers) < 2 or config.router.policy in BLIND:
        return
    code = "hash-seed" if "hash-seed" in difference.evidence else "events-off"
    for policy in BLIND:
        figures = {"policy": policy, "configured": config.router.policy}
        yield Candidate(
            code, partial(Difference.replay, router=policy), figures, partial(Difference.guess, policy=policy)
        )


def _block_sizes(difference: Difference) -> Iterator[Candidate]:
    """Blocks of another size than configured."""
    configured = difference.block_size
    if (
        len(difference.replayed.run.fleet.config.workers[0].engine.specs) > 1
        or "block_size" in difference.counted.facts
    ):
        return
    if difference.by_request:
        step = math.gcd(*difference.counted.by_request.values())
        if not step or step == configured:
            return
        # All counts may be multiples of more than one block.
        sizes = [size for size in dict.fromkeys((step, *BLOCK_SIZES)) if step % size == 0 and size != configured]
    else:
        shared = np.minimum(shared_tokens(difference.traffic.requests), difference.lengths - 1)[difference.known]

        def far(size: int) -> float:
            """Return tokens between the sum counted and about what blocks of ``size`` give."""
            ratio = int((shared // size * size).sum()) / max(1, int((shared // configured * configured).sum()))
            return abs(difference.owed * ratio - difference.total)

        sizes = sorted((size for size in BLOCK_SIZES if size != configured), key=far)[:SIZES_TRIED]
    for size in sizes:
        yield _of_size(difference, size)


def _of_size(difference: Difference, size: int) -> Candidate:
    """As many tokens in blocks of ``size``."""
    configured = difference.block_size
    tokens = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks * configured
    hits = partial(Difference.replay, block_size=size, num_gpu_blocks=max(1, tokens // size))
    figures = {"block": size, "configured": configured}
    return Candidate("block-size", hits, figures, partial(Difference.guess, block_size=size))


def _media(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at the first image."""
    media, block = difference.traffic.media, difference.block_size
    if not media:
        return
    ends = [
        min((item.at for item in media.get(request.id, ())), default=request.input_length) // block * block
        for request in difference.traffic.requests
    ]
    yield Candidate("media", lambda compared: np.minimum(compared.replayed.hits, np.array(ends, dtype=np.int64)))


def _parting(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at one place in all prompts."""
    if not difference.by_request:
        return
    end = int(difference.counts.max())
    hits = difference.replayed.hits
    if end and end < np.percentile(hits[difference.known], 90):
        seen = "media" in difference.evidence or difference.counted.new_media > len(difference.counts) / 2
        code = "media" if seen else "changing-text"
        yield Candidate(code, lambda compared: np.minimum(compared.replayed.hits, end), {"parting": end})


def _answers(difference: Difference) -> Iterator[Candidate]:
    """Answers that are never found again."""
    if not any(request.output_tokens for request in difference.traffic.requests):
        return
    yield Candidate("answers", Difference.replay_without_answers)


def _late_states(difference: Difference) -> Iterator[Candidate]:
    """States that are kept at the last two block boundaries of a prompt alone, as earlier versions of vLLM kept them."""
    specs = difference.replayed.run.fleet.config.workers[0].engine.specs
    requests = difference.traffic.requests
    if not any(spec.is_state for spec in specs) or any(request.tokens is None for request in requests):
        return
    block = difference.block_size
    kept: dict[int, set[bytes]] = {}
    hits: list[int] = []
    for request in requests:
        text = array("Q", request.tokens or ())
        last = (len(text) - 1) // block * block
        hits.append(
            max((end for end, texts in kept.items() if end <= last and text[:end].tobytes() in texts), default=0)
        )
        for end in (last, last - block):
            if end > 0:
                kept.setdefault(end, set()).add(text[:end].tobytes())
    yield Candidate("late-states", lambda compared: np.array(hits, dtype=np.int64), {"block": block})


def _pools(difference: Difference) -> Iterator[Candidate]:
    """Pools with fewer blocks than configured: one by reuse distances, then those between the two nearest."""
    low, high = (0, 0), (difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks, difference.owed)
    blocks = difference.pool_guess()
    if not difference.by_request and difference.reuse_tells:
        yield _of_pool(difference, blocks)
        return
    for _ in range(POOLS_TRIED if difference.by_request else POOLS_TRIED // 2):
        candidate = _of_pool(difference, blocks)
        yield candidate
        hits = candidate.hits(difference)
        total = 0 if hits is None else int(hits[difference.known].clip(0).sum())
        if abs(total - difference.total) <= CLOSE * difference.total:
            return
        if total < difference.total:
            low = blocks, total
        else:
            high = blocks, total
        share = (difference.total - low[1]) / max(1, high[1] - low[1])
        blocks = low[0] + round((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        if not low[0] < blocks < high[0]:
            return


def _of_pool(difference: Difference, blocks: int) -> Candidate:
    configured = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
    figures = {"blocks": blocks, "configured": configured}
    return Candidate(
        "pool", partial(Difference.replay, num_gpu_blocks=blocks), figures, lambda compared: compared.total
    )


SOURCES: tuple[tuple[Source, bool], ...] = (
    (_late_states, False),
    (_nothing, False),
    (_reported, True),
    (_media, False),
    (_store_only, True),
    (_block_sizes, True),
    (_answers, True),
    (_parting, False),
    (_blind, True),
    (_pools, True),
)
"""Cheap and telling ones first, and whether they replay; the search ends with one that gives the counts."""
GUESSED: tuple[Source, ...] = (_block_sizes, _blind, _pools)
"""Those of which reuse distances tell the sum."""
