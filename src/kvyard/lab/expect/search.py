"""The cause of counts that aren't those owed: each candidate is replayed, and the one that gives the counts is named."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvyard.errors import KvyardError
from kvyard.lab.expect.causes import FAULTS, say
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.owed import Replayed, replay_traffic
from kvyard.lab.expect.traffic import Tokens, Traffic
from kvyard.replay.settings import OF_TIERS

EXPLAINS = 0.5
"""Share of a difference that a cause must explain to be named."""
BLOCK_SIZES = (16, 32, 64, 128, 256, 528, 784, 1056, 2096)
"""Block sizes that engines have, for counts from which it doesn't follow."""
HALVINGS = 4
BLIND = ("round-robin", "least-loaded", "random")
"""Policies that a router falls back to without events."""


class Difference:
    """Counts beside what is owed."""

    def __init__(
        self,
        traffic: Traffic,
        settings: Mapping[str, object],
        replayed: Replayed,
        counted: Counted,
        evidence: set[str],
        tolerance: float,
    ) -> None:
        self.traffic = traffic
        self.settings = settings
        self.replayed = replayed
        self.counted = counted
        self.evidence = evidence
        """Codes of causes that something else has shown."""
        self.tolerance = tolerance
        """Share of prompt tokens by which counts may differ."""
        counts = [counted.by_request.get(request.id, -1) for request in traffic.requests]
        self.all_counts = np.array(counts, dtype=np.int64)
        """By request, -1 for one without a count."""
        self._lengths = np.array([request.input_length for request in traffic.requests], dtype=np.int64)

    @property
    def by_request(self) -> bool:
        """True if counts of requests are compared one by one, and not only their sum."""
        return bool((self.all_counts >= 0).any())

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for requests that are compared."""
        admitted = self.replayed.hits >= 0
        return admitted & (self.all_counts >= 0) if self.by_request else admitted

    @property
    def prompts(self) -> int:
        """Prompt tokens of requests that are compared."""
        return int(self._lengths[self.known].sum())

    @property
    def total(self) -> int:
        """Tokens counted for requests that are compared."""
        return int(self.all_counts[self.known].sum()) if self.by_request else self.counted.total

    @property
    def missing(self) -> int:
        """Tokens owed less tokens counted."""
        return int(self.replayed.hits[self.known].sum()) - self.total

    @property
    def counts(self) -> Tokens:
        """Counts of requests that are compared one by one."""
        return self.all_counts[self.known]

    def distance(self, hits: Tokens) -> int:
        """Tokens by which ``hits`` differ from the counts."""
        known = np.maximum(hits[self.known], 0)
        return int(np.abs(known - self.counts).sum()) if self.by_request else abs(int(known.sum()) - self.total)

    def replay(self, **changed: object) -> Tokens | None:
        """Return hits with other settings; ``None`` if they are impossible."""
        try:
            return replay_traffic(self.traffic.requests, {**self.settings, **changed}).hits
        except KvyardError:
            return None


Candidate = tuple[str, Tokens, dict[str, object]]
"""A cause, the hits that it would give, and figures for its sentence."""


def find_fault(difference: Difference) -> tuple[str, str] | None:
    """Return the cause of a difference and its sentence; ``None`` where counts are those owed."""
    counted, prompts = difference.counted, difference.prompts
    if counted.asleep:
        return "asleep", say(FAULTS["asleep"])
    queries = _queries(difference)
    if queries is not None:
        return queries
    distance = difference.distance(difference.replayed.hits)
    if distance <= difference.tolerance * prompts:
        return ("hash-seed", say(FAULTS["hash-seed"])) if "hash-seed" in difference.evidence else None
    if difference.missing < 0 and -difference.missing > 0.9 * distance:
        size = _finer(difference)
        if size is not None:
            return size
        return "more", say(FAULTS["more"], more=-difference.missing)
    best: Candidate | None = None
    nearest = distance
    for source in SOURCES:
        for candidate in source(difference):
            away = difference.distance(candidate[1])
            if away < nearest:
                best, nearest = candidate, away
        if best is not None and nearest <= difference.tolerance * prompts / 4:
            break
    if best is None or nearest > (1 - EXPLAINS) * distance:
        return "unknown", say(FAULTS["unknown"], missing=difference.missing, request=_first(difference))
    code, _, figures = best
    return code, say(FAULTS[code], **figures)


def _queries(difference: Difference) -> tuple[str, str] | None:
    """A finding where the engine was asked for other tokens than this traffic has."""
    queries, prompts = difference.counted.queries, difference.traffic.prompt_tokens
    if queries is None or difference.by_request or not prompts:
        return None
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


def _block(difference: Difference) -> int:
    specs = difference.replayed.run.fleet.config.workers[0].engine.specs
    return math.lcm(*(spec.block_size for spec in specs))


def _finer(difference: Difference) -> tuple[str, str] | None:
    """A smaller block size than configured, which gives more hits."""
    for code, hits, figures in chain(_reported(difference), _block_sizes(difference)):
        if difference.distance(hits) <= (1 - EXPLAINS) * difference.distance(difference.replayed.hits):
            return code, say(FAULTS[code], **figures)
    return None


# -- candidates, by what they would give ------------------------------------------------------------------------------------


def _nothing(difference: Difference) -> Iterator[Candidate]:
    """No hits at all."""
    if difference.total > difference.tolerance * difference.prompts / 10:
        return
    reported = difference.counted.facts.get("enable_prefix_caching", "")
    code = "never-shared" if reported == "True" else "caching-off"
    words = " and reports enable_prefix_caching=False" if reported == "False" else ""
    yield code, np.zeros_like(difference.replayed.hits), {"reported": words}


def _reported(difference: Difference) -> Iterator[Candidate]:
    """Another block size or pool than configured, by what the engine itself reports."""
    engine = difference.replayed.run.fleet.config.workers[0].engine
    facts = {name: int(value) for name, value in difference.counted.facts.items() if value.isdecimal()}
    size = facts.get("block_size", _block(difference))
    if size != _block(difference) and len(engine.specs) == 1:
        yield from _of_size(difference, size)
    blocks = facts.get("num_gpu_blocks", engine.num_gpu_blocks + 1) - 1  # vLLM counts the null block
    if 1 <= blocks < engine.num_gpu_blocks and size == _block(difference):
        hits = difference.replay(num_gpu_blocks=blocks)
        if hits is not None:
            yield "pool", hits, {"blocks": blocks, "configured": engine.num_gpu_blocks}


def _store_only(difference: Difference) -> Iterator[Candidate]:
    """Lower tiers that nothing is loaded from."""
    if difference.replayed.loaded == 0 or difference.counted.external_hits:
        return
    without = {name: value for name, value in difference.settings.items() if name not in OF_TIERS}
    try:
        hits = replay_traffic(difference.traffic.requests, without).hits
    except KvyardError:
        return
    yield "store-only", hits, {"queried": difference.counted.external_queries}


def _blind(difference: Difference) -> Iterator[Candidate]:
    """A router that doesn't see what workers have."""
    config = difference.replayed.run.fleet.config
    if sum(kind.count for kind in config.workers) < 2 or config.router.policy in BLIND:
        return
    code = "hash-seed" if "hash-seed" in difference.evidence else "events-off"
    for policy in BLIND:
        hits = difference.replay(router=policy)
        if hits is not None:
            yield code, hits, {"policy": policy, "configured": config.router.policy}


def _block_sizes(difference: Difference) -> Iterator[Candidate]:
    """Blocks of another size than configured."""
    config = difference.replayed.run.fleet.config
    configured = _block(difference)
    if len(config.workers[0].engine.specs) > 1:
        return
    if "block_size" in difference.counted.facts:
        return
    sizes: tuple[int, ...]
    if difference.by_request:
        step = math.gcd(*difference.counts[difference.counts > 0].tolist())
        if not step or step == configured:
            return
        # All counts may be multiples of more than one block.
        sizes = tuple(size for size in dict.fromkeys((step, *BLOCK_SIZES)) if step % size == 0 and size != configured)
    else:
        sizes = tuple(size for size in BLOCK_SIZES if size != configured)
    for size in sizes:
        yield from _of_size(difference, size)


def _of_size(difference: Difference, size: int) -> Iterator[Candidate]:
    """As many tokens in blocks of ``size``."""
    configured = _block(difference)
    blocks = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
    hits = difference.replay(block_size=size, num_gpu_blocks=max(1, blocks * configured // size))
    if hits is not None:
        yield "block-size", hits, {"block": size, "configured": configured}


def _media(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at the first image."""
    media, block = difference.traffic.media, _block(difference)
    if not media:
        return
    ends = [
        min((item.at for item in media.get(request.id, ())), default=request.input_length)
        for request in difference.traffic.requests
    ]
    yield "media", np.minimum(difference.replayed.hits, np.array(ends, dtype=np.int64) // block * block), {}


def _parting(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at one place in all prompts."""
    if not difference.by_request:
        return
    end = int(difference.counts.max())
    hits = difference.replayed.hits
    if end and end < np.percentile(hits[difference.known], 90):
        yield "changing-text", np.minimum(hits, end), {"parting": end}


def _answers(difference: Difference) -> Iterator[Candidate]:
    """Answers that are never found again."""
    if not any(request.output_tokens for request in difference.traffic.requests):
        return
    without = [replace(request, output_tokens=None) for request in difference.traffic.requests]
    yield "answers", replay_traffic(without, difference.settings).hits, {}


def _late_states(difference: Difference) -> Iterator[Candidate]:
    """States that are kept at the last two block boundaries of a prompt alone, as earlier versions of vLLM kept them."""
    specs = difference.replayed.run.fleet.config.workers[0].engine.specs
    requests = difference.traffic.requests
    if not any(spec.is_state for spec in specs) or any(request.tokens is None for request in requests):
        return
    block = _block(difference)
    kept: dict[int, set[bytes]] = {}
    found: list[int] = []
    for request in requests:
        text = array("Q", request.tokens or ())
        last = (len(text) - 1) // block * block
        found.append(max((at for at, texts in kept.items() if at <= last and text[:at].tobytes() in texts), default=0))
        for at in (last, last - block):
            if at > 0:
                kept.setdefault(at, set()).add(text[:at].tobytes())
    yield "late-states", np.array(found, dtype=np.int64), {"block": block}


def _pools(difference: Difference) -> Iterator[Candidate]:
    """Pools with fewer blocks than configured."""
    configured = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
    low, high = 0, configured
    for _ in range(2 * HALVINGS):
        blocks = (low + high) // 2 if low else high // 2
        if blocks <= low or blocks < 1:
            return
        hits = difference.replay(num_gpu_blocks=blocks)
        if hits is None or int(hits[difference.known].clip(0).sum()) < difference.total:
            low = blocks
        else:
            high = blocks
        if hits is not None:
            yield "pool", hits, {"blocks": blocks, "configured": configured}
        if low and high - low < configured // 64 + 1:
            return


SOURCES: tuple[Callable[[Difference], Iterator[Candidate]], ...] = (
    _late_states,
    _nothing,
    _reported,
    _media,
    _store_only,
    _block_sizes,
    _answers,
    _parting,
    _blind,
    _pools,
)
"""Cheap and telling ones first; the search ends with one that gives the counts."""
